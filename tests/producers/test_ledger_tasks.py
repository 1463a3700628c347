"""Drawn tasks: splits apart, queries deterministic, options checked."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.producers.environment import Split, TaskError, TaskQuery
from tidemill.producers.ledger.book import parse
from tidemill.producers.ledger.tasks import CEILING, draw, split_of

SEEDS = st.integers(0, 2**32)


@settings(max_examples=10, deadline=None)
@given(SEEDS, SEEDS, st.integers(2, 6))
def test_no_payload_is_on_both_sides(train_seed, eval_seed, entries):
    options = {"entries": entries}
    train = {draft.payload for draft in draw(TaskQuery(train_seed, 60, Split.TRAIN, options))}
    held_out = {draft.payload for draft in draw(TaskQuery(eval_seed, 30, Split.EVAL, options))}
    assert not train & held_out
    assert {split_of(payload) for payload in train} == {Split.TRAIN}
    assert {split_of(payload) for payload in held_out} == {Split.EVAL}


@settings(max_examples=10, deadline=None)
@given(SEEDS, st.sampled_from(Split))
def test_a_query_always_draws_the_same_distinct_tasks(seed, split):
    drafts = list(draw(TaskQuery(seed, 40, split)))
    assert list(draw(TaskQuery(seed, 40, split))) == drafts
    assert list(draw(TaskQuery(seed, 10, split))) == drafts[:10]
    assert len({draft.payload for draft in drafts}) == 40
    assert all(draft.split is split for draft in drafts)


@settings(max_examples=10, deadline=None)
@given(SEEDS, st.integers(2, 120), st.integers(0, 4), st.integers(4, CEILING // 2))
def test_difficulty_is_what_was_asked_for(seed, entries, spare, largest):
    options = {"entries": entries, "spare_turns": spare, "largest": largest}
    (draft,) = draw(TaskQuery(seed, 1, Split.TRAIN, options))
    ledger = parse(draft.payload)
    assert len(ledger.entries) == entries
    assert draft.max_turns == entries + 1 + spare
    assert all(0 <= balance <= CEILING for balance in ledger.running)
    assert all(1 <= abs(entry) <= largest for entry in ledger.entries)


def test_lengths_vary_when_asked_to():
    drafts = draw(TaskQuery(0, 100, Split.TRAIN, {"entries": 5, "fewest_entries": 3}))
    assert {len(parse(draft.payload).entries) for draft in drafts} == {3, 4, 5}


@pytest.mark.parametrize(
    "options",
    [{"entires": 4}, {"entries": 0}, {"entries": 100_000}, {"largest": 0}, {"largest": 26}, {"spare_turns": -1},
     {"entries": 3, "fewest_entries": 4}],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(TaskError, match="option"):
        next(draw(TaskQuery(0, 1, Split.TRAIN, options)))


def test_asking_for_more_tasks_than_there_are_says_so():
    with pytest.raises(TaskError, match="distinct ledgers"):
        list(draw(TaskQuery(0, 1_000, Split.TRAIN, {"entries": 1})))
