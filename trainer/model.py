"""Models and tokenizers: built from random weights, loaded, checked for training, written as checkpoints.

Invariant: a checkpoint directory has `config.json`, `model.safetensors` in bf16 and the tokenizer's files, as
transformers, vLLM and a weight anchor need them; it appears whole or not at all.

A packed row gives the same results as whole sequences if the layers of the model use other tokens only by softmax
attention over all earlier tokens, and if its logits are the output of its head. Any other model would be trained
wrongly, without an error. So three checks can refuse a model: of its configuration, of the arguments that its layers
pass to attention, and of a small row against the model's own results.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.functional import linear, log_softmax
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tidemill.trainer.attention import UntrainableModelError, packed_attention, tree_calls
from tidemill.trainer.choices import Experts
from tidemill.trainer.midtrain_config import ModelShape, TokenizerSettings
from tidemill.trainer.model_size import ModelSize, UnknownModelError, size_of

PADDING = "<|pad|>"
TOKENIZER_FILE = "tokenizer.json"


def train_tokenizer(texts: Iterable[str], settings: TokenizerSettings) -> Tokenizer:
    """Train a byte-level BPE tokenizer: any text has an encoding, and decoding returns the text."""
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
    """Build a Qwen3 with random fp32 weights, the same for the same seed. Sets the seed of torch's global generator."""
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
    """Load the causal model of a checkpoint directory, in fp32, with the given implementation of its experts.

    Raises FileNotFoundError if there is none, ValueError if a weight is missing or a file is damaged, and for a model
    without experts if `experts` is given.
    """
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{path} is not a Hugging Face checkpoint (no config.json): name one, or make one with "
            "`tidemill documents` and `tidemill train --phase midtrain`"
        )
    options = {} if experts is None else {"experts_implementation": experts.value}
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True, **options
        )
    except SafetensorError as error:
        raise ValueError(f"a file of weights in {path} is damaged: {error}") from error
    if missing := sorted(found["missing_keys"]):
        # transformers gives them random values, others in each load.
        raise ValueError(f"{path} does not store {', '.join(missing[:5])} (missing weights: {len(missing)})")
    return model


def checkpoint_place(directory: str) -> Path:
    """Return the directory that a checkpoint can replace: `directory`, or the one that a link there leads to.

    Raises FileExistsError if it contains anything but a checkpoint.
    """
    final = Path(directory)
    if final.is_symlink():
        final = final.resolve()
    if final.exists() and not (final / "config.json").is_file() and (final.is_file() or any(final.iterdir())):
        raise FileExistsError(
            f"{final} exists and is no checkpoint (no config.json), so it is not replaced: name another directory"
        )
    return final


def save_checkpoint(
    directory: str,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    end_token: str,
    chat_template: str,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write a checkpoint, with weights rounded to bf16 and additional `files`, text by name.

    Raises as `checkpoint_place`.
    """
    final = checkpoint_place(directory)
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(partial)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end_token, pad_token=PADDING)
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(partial)
    tokenizer.save(str(partial / TOKENIZER_FILE))
    for name, text in (files or {}).items():
        (partial / name).write_text(text, "utf-8")
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)


PACKED_ATTENTION = "tidemill_packed"
"""Name of packed attention in transformers."""
AttentionInterface.register(PACKED_ATTENTION, packed_attention)
CHECK = "tidemill_check"
"""Method of a sharded model: `_seen_problem` with its weights gathered for the call."""
TOLERANCE = 2e-3
"""Largest difference of a logprob, in nats, that rounding in float32 explains."""
_STATED = {
    "alibi": "ALiBi, a position bias on the attention scores",
    "attn_logit_softcapping": "a soft cap on the attention scores",
    "final_logit_softcapping": "a soft cap on the logits",
}
_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")
"""Settings by which a model multiplies or divides its logits."""
_WAY_OUT = (
    "The trainer needs softmax attention over all earlier tokens in every layer, and logits that are the output of the "
    "head. Choose another model, or remove from the checkpoint's config.json what no context of the run reaches, such "
    "as a window (`sliding_window`, `layer_types`)."
)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make `model` accept a `tree` (see `attention.packed_attention`). For a sharded model, every rank calls this.

    On the `meta` device, where a model has no weights, only results are not compared.

    Raises UntrainableModelError, which names the reason, if the model gives wrong results in packed rows.
    """
    if model.config._attn_implementation == PACKED_ATTENTION:
        return
    training = model.training
    model.eval()
    seen_problem, sharded = partial(_seen_problem, model), isinstance(model, FSDPModule)
    if sharded:
        setattr(model, CHECK, MethodType(_seen_problem, model))
        register_fsdp_forward_method(model, CHECK)
        seen_problem = getattr(model, CHECK)
    with torch.no_grad():
        problem = _stated_problem(model.config.get_text_config()) or seen_problem()
    model.train(training)
    if problem:
        # FSDP2 gives the class of a sharded model a prefix.
        name = type(model).__name__.removeprefix("FSDP")
        raise UntrainableModelError(f"{name} cannot be trained: {problem}. {_WAY_OUT}")


def _stated_problem(config: PretrainedConfig) -> str:
    kinds: dict[str, list[str]] = {}
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        kinds.setdefault(kind, []).append(str(layer))
    kinds.pop("full_attention", None)
    if kinds:
        return "; ".join(f"`{kind}` in layers {', '.join(layers)}" for kind, layers in kinds.items())
    scales = {name: getattr(config, name, None) for name in _SCALES}
    found = [f"it has {what} (`{name}`)" for name, what in _STATED.items() if getattr(config, name, None)]
    found += [f"it scales its logits (`{name}` {scale})" for name, scale in scales.items() if scale not in (None, 1)]
    return "; ".join(found)


def _seen_problem(model: PreTrainedModel) -> str:
    """Compare a row with whole sequences: tokens 0-19, tokens 0-11 and 20-29, and tokens 30-38."""
    paths = [torch.arange(20), torch.cat([torch.arange(12), torch.arange(20, 30)]), torch.arange(30, 39)]
    parents = torch.arange(-1, 38)
    parents[20], parents[30] = 11, -1
    depths = torch.cat([torch.arange(20), torch.arange(12, 22), torch.arange(9)])
    ids = (7 * torch.arange(39) + 3) % model.config.get_text_config().vocab_size

    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model:
        return "it has no linear head over a base model"
    device, whole = head.weight.device, []
    ids, depths, tree = ids.to(device), depths.to(device), tree_calls(parents.numpy()).to(device)
    if device.type != "meta":
        # The weights of a sharded model are already gathered; calling the module would gather them again.
        sharded = isinstance(model, FSDPModule)
        forward = model.forward if sharded else model
        whole = [forward(input_ids=ids[path][None], use_cache=False).logits[0] for path in paths]
        if not all(logits.isfinite().all() for logits in whole):
            return "its logits are not finite numbers, so its weights are damaged"
        states = model.base_model(input_ids=ids[paths[0]][None], use_cache=False).last_hidden_state[0]
        if _apart(linear(states, head.weight, head.bias), whole[0]) > TOLERANCE:
            return "its logits are not the output of its head, but scaled or capped"

    layers: list[bool] = []

    def counted(*args: Any, **options: Any) -> tuple[Tensor, None]:  # noqa: ANN401 - passes on what it gets
        layers.append(options.get("tree") is not None)
        return packed_attention(*args, **options)

    AttentionInterface.register(PACKED_ATTENTION, counted)
    try:
        model.set_attn_implementation(PACKED_ATTENTION)
        row = model.base_model(
            input_ids=ids[None], position_ids=depths[None], tree=tree, use_cache=False
        ).last_hidden_state[0]
    except UntrainableModelError as error:
        return str(error)
    except (TypeError, ValueError) as error:
        return f"its forward pass does not take a packed row ({error})"
    finally:
        AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    expected = model.config.get_text_config().num_hidden_layers
    if sum(layers) < expected:
        return (
            f"{expected - sum(layers)} of its {expected} layers do not use transformers' attention interface with what "
            "the forward pass is given (recurrent layers, linear attention, or attention of the model's own)"
        )
    if not whole:
        return ""
    logits = linear(row, head.weight, head.bias)
    apart = max(_apart(logits[path], expected) for path, expected in zip(paths, whole, strict=True))
    if not apart <= TOLERANCE:
        return f"logprobs in a packed row are up to {apart:.2g} nats from those of whole sequences"
    return ""


def _apart(logits: Tensor, expected: Tensor) -> float:
    return float((log_softmax(logits, -1) - log_softmax(expected, -1)).abs().max())


def size_of_name(name: str) -> ModelSize:
    """Return the size of a model in a directory or on a hub, if the trainer takes it; no weights are loaded.

    A directory needs only the model's `config.json`. Raises UnknownModelError, and UntrainableModelError.
    """
    try:
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # torch's grouped product needs it
    except Exception as error:  # transformers checks few configurations: building a model of others raises any error
        # The first line names the cause, or the place of the cause; then comes advice about tokens and versions.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        raise UnknownModelError(
            f"no causal model {name!r}: it is no directory with a config.json that transformers knows, and the hub "
            f"gave none ({reason}). Name a directory that holds the model's config.json: no weights are needed"
        ) from error
    size = size_of(model)
    with suppress(RuntimeError):  # of a model that looks at its values, which are not there
        use_packed_attention(model)
    return size
