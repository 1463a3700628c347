"""The harness: tokens in and tokens out, no forged markers, any tokenizer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tidemill.producers.environment import Observation
from tidemill.producers.harness import ASSISTANT, END, MARKERS, TurnHarness, defuse


def byte_tokenizer(markers):
    """A tokenizer with one token a byte, and one for each of `markers`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(markers))
    return tokenizer


KNOWING = byte_tokenizer(MARKERS)
FOREIGN = byte_tokenizer(())


def said(text):
    return Observation(text, done=False, tool_error=False)


@pytest.mark.parametrize("tokenizer", [KNOWING, FOREIGN])
def test_a_context_reads_as_marked_turns(tokenizer):
    harness = TurnHarness(tokenizer)
    sampled = tokenizer.encode("add 0 5" + END).ids
    context = harness.open("ledger credit 5") + sampled + harness.observe(said("total 5"))
    assert tokenizer.decode(context, skip_special_tokens=False) == (
        "<|user|>ledger credit 5<|end|><|assistant|>add 0 5<|end|><|tool|>total 5<|end|><|assistant|>"
    )
    assert harness.read(sampled) == "add 0 5"


def test_a_turn_ends_by_token_where_there_is_one_and_by_string_elsewhere():
    knowing, foreign = TurnHarness(KNOWING), TurnHarness(FOREIGN, max_turn_tokens=40)
    assert (knowing.stop_token_ids, knowing.stop) == ([KNOWING.token_to_id(END)], [])
    assert (foreign.stop_token_ids, foreign.stop) == ([], [END])
    assert (knowing.max_turn_tokens, foreign.max_turn_tokens) == (16, 40)


@settings(deadline=None)
@given(st.text() | st.text(alphabet="<|end>tolur"))
def test_text_cannot_forge_a_marker(text):
    harness = TurnHarness(KNOWING)
    special = {KNOWING.token_to_id(marker) for marker in MARKERS}
    assert sum(token in special for token in harness.open(text)) == 3
    assert sum(token in special for token in harness.observe(said(text))) == 3
    assert not any(marker in defuse(text) for marker in MARKERS)


@settings(deadline=None)
@given(st.lists(st.integers(0, KNOWING.get_vocab_size() - 1), max_size=30))
def test_any_sampled_tokens_read_as_text_without_an_end(token_ids):
    text = TurnHarness(KNOWING).read(token_ids)
    assert END not in text


def test_a_marker_that_the_policy_samples_stays_visible():
    ids = [KNOWING.token_to_id(ASSISTANT), *KNOWING.encode("answer 3").ids]
    assert TurnHarness(KNOWING).read(ids) == "<|assistant|>answer 3"
