"""Models and tokenizers: a small Qwen3 built from nothing, any Hugging Face causal model loaded, checkpoints written.

What holds: a checkpoint directory has `config.json`, `model.safetensors` in bf16 and the tokenizer's files, which is
what transformers, vLLM and a weight anchor need; it appears whole or not at all.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tidemill.trainer.choices import Experts
from tidemill.trainer.midtrain_config import ModelShape, TokenizerSettings

PADDING = "<|pad|>"
TOKENIZER_FILE = "tokenizer.json"


def train_tokenizer(texts: Iterable[str], settings: TokenizerSettings) -> Tokenizer:
    """A byte-level BPE tokenizer: any text has an encoding, and decoding gives the text back."""
    tokenizer = Tokenizer(models.BPE())
    if settings.phrases:
        special = "|".join(map(re.escape, settings.special_tokens))
        spans = pre_tokenizers.Split(Regex(rf"{special}|\n|\d+|(?:(?!{special})[^\d\n])+"), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([spans, byte_level])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[PADDING, *settings.special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build_model(shape: ModelShape, tokenizer: Tokenizer, end_token: str, seed: int) -> PreTrainedModel:
    """A Qwen3 with random fp32 weights, the same for the same seed. Leaves torch's global generator seeded."""
    torch.manual_seed(seed)
    end = tokenizer.token_to_id(end_token)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied_embeddings,
        pad_token_id=tokenizer.token_to_id(PADDING),
        eos_token_id=end,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def load_model(directory: str, experts: Experts | None = None) -> PreTrainedModel:
    """The causal model of a checkpoint directory, in fp32, with that implementation of its experts.

    Raises FileNotFoundError when there is none, ValueError for a model without experts where one is named.
    """
    options = {} if experts is None else {"experts_implementation": experts.value}
    return AutoModelForCausalLM.from_pretrained(_checkpoint(directory), dtype=torch.float32, **options)


def save_checkpoint(
    directory: str,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    end_token: str,
    chat_template: str,
    also: Callable[[Path], None] = lambda _directory: None,
) -> None:
    """Write a checkpoint, weights rounded to bf16; `also` may add files to it before it appears."""
    final = Path(directory)
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(partial)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end_token, pad_token=PADDING)
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(partial)
    tokenizer.save(str(partial / TOKENIZER_FILE))
    also(partial)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)


def _checkpoint(directory: str) -> Path:
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{path} is not a Hugging Face checkpoint (no config.json): name one, or make one with "
            "`tidemill documents` and `tidemill train --phase midtrain`"
        )
    return path
