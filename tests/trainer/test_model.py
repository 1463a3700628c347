"""The small Qwen3, its tokenizer and its checkpoint."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tidemill.schemas.chat.format import chatml
from tidemill.schemas.config import CHATML_TOKENS
from tidemill.trainer.midtrain_config import ModelShape, TokenizerSettings
from tidemill.trainer.model import build_model, load_model, save_checkpoint, train_tokenizer

TINY = ModelShape(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1, max_positions=128)
END = CHATML_TOKENS[-1]
TEXT = "<|im_start|>user\ncredit 5<|im_end|>\n<|im_start|>assistant\n<tool_call>add 0 5</tool_call><|im_end|>"
TOKENIZER = train_tokenizer([TEXT] * 4, TokenizerSettings())


def tiny(seed=0):
    return build_model(TINY, TOKENIZER, END, seed)


def test_the_tokenizer_has_one_token_for_each_marker():
    for marker in TokenizerSettings().special_tokens:
        assert TOKENIZER.encode(marker).ids == [TOKENIZER.token_to_id(marker)]


def test_phrases_become_tokens_and_numbers_are_split():
    def pieces(tokenizer):
        return [tokenizer.decode([each], skip_special_tokens=False) for each in tokenizer.encode(TEXT).ids]

    assert pieces(TOKENIZER) == [
        "<|im_start|>", "user", "\n", "credit ", "5", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n",
        "<tool_call>", "add ", "0", " ", "5", "</tool_call>", "<|im_end|>",
    ]  # fmt: skip
    words = train_tokenizer([TEXT] * 4, TokenizerSettings(phrases=False))
    assert "credit" in pieces(words) and "credit " not in pieces(words)


@given(st.text())
def test_any_text_survives_the_tokenizer(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_the_same_seed_gives_the_same_weights():
    first, second, other = (dict(tiny(seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_checkpoint_opens_in_transformers(tmp_path):
    directory = tmp_path / "deep" / "model"
    model = tiny()
    save_checkpoint(str(directory), model, TOKENIZER, END, chatml(), files={"note": "kept"})
    assert (directory / "note").read_text() == "kept"
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert {tensor.dtype for tensor in load_file(directory / "model.safetensors").values()} == {torch.bfloat16}
    opened = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    named = dict(opened.named_parameters())
    assert all(torch.equal(p.bfloat16().float(), named[name]) for name, p in model.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.eos_token == END
    assert tokenizer.chat_template == chatml()
    text = "<|im_start|>user\ncredit 5<|im_end|>"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == TOKENIZER.encode(text).ids
    assert [path.name for path in directory.parent.iterdir()] == ["model"]


def test_a_checkpoint_loads_back_and_is_replaced(tmp_path):
    for seed in (0, 1):
        save_checkpoint(str(tmp_path / "model"), tiny(seed), TOKENIZER, END, chatml())
    loaded = load_model(str(tmp_path / "model"))
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded.lm_head.weight, tiny(1).lm_head.weight.bfloat16().float())
    assert Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).to_str() == TOKENIZER.to_str()


def test_a_link_to_a_checkpoint_is_followed(tmp_path):
    save_checkpoint(str(tmp_path / "disk" / "model"), tiny(0), TOKENIZER, END, chatml())
    link = tmp_path / "model"
    link.symlink_to(tmp_path / "disk" / "model")
    save_checkpoint(str(link), tiny(1), TOKENIZER, END, chatml())
    assert link.is_symlink()
    assert torch.equal(load_model(str(link)).lm_head.weight, tiny(1).lm_head.weight.bfloat16().float())


def test_only_a_checkpoint_is_replaced(tmp_path):
    for name in ("store", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "store" / "anchor").write_text("kept")
    for taken in ("store", "store/anchor"):
        with pytest.raises(FileExistsError, match=r"is no checkpoint \(no config\.json\), so it is not replaced"):
            save_checkpoint(str(tmp_path / taken), tiny(0), TOKENIZER, END, chatml())
    assert (tmp_path / "store" / "anchor").read_text() == "kept"
    save_checkpoint(str(tmp_path / "empty"), tiny(0), TOKENIZER, END, chatml())


def test_an_invalid_checkpoint_is_refused_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="midtrain"):
        load_model(str(tmp_path))


def test_a_checkpoint_without_a_weight_or_with_a_cut_file_is_refused(tmp_path):
    save_checkpoint(str(tmp_path / "model"), tiny(0), TOKENIZER, END, chatml())
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model does not store model\.norm\.weight"):
        load_model(str(tmp_path / "model"))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"weights in .*model is damaged"):
        load_model(str(tmp_path / "model"))


def test_a_tokenizer_without_a_token_that_ends_a_turn_is_refused():
    with pytest.raises(ValidationError, match="special_tokens"):
        TokenizerSettings(special_tokens=())


@pytest.mark.parametrize("wrong", [{"hidden_size": 48}, {"head_dim": 48}, {"heads": 3, "kv_heads": 2}, {"width": 1}])
def test_a_shape_that_cannot_be_served_is_refused(wrong):
    with pytest.raises(ValidationError):
        ModelShape(**wrong)
