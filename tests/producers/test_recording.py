"""Recorded turns: what a rollout goes on from, bit for bit, and what of the log is not believed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.producers.test_episode import Inline, Script
from tidemill.producers.episode import Episode, EpisodeLimits
from tidemill.producers.ledger import LEDGER
from tidemill.producers.progress import Begun, Progress
from tidemill.producers.recording import OtherIncarnation, RecordingSampler, context_digest, recorded_turn
from tidemill.producers.replica_client import ReplicaIdentity
from tidemill.producers.rollout import Provenance, failed_rollout, rollout_id
from tidemill.schemas.codec import Codec
from tidemill.schemas.records import Dispatch, Mode, Task, Tick, Turn, VersionSpan

TASK = Task("t", "g", "run", "ledger", '{"entries":[3,4]}', Mode.TRAIN, 4, 6, 0, 0, 10**18, 0)
TURNS = ("add 0 3<|end|>", "add 3 4<|end|>", "answer 7<|end|>")
REPLICA = ReplicaIdentity("r1", "here")


class Session(Script):
    """A script whose replica has a name."""

    identity = ReplicaIdentity("", "")
    incarnation = "one"

    def __init__(self, tokenizer, skip=0, version=0):
        super().__init__(tokenizer, *TURNS)
        self.skip, self.version = skip, version

    async def complete(self, prompt, sampling):
        self.identity = REPLICA
        self.turns = list(TURNS[self.skip :])
        found = await super().complete(prompt, sampling)
        spans = (VersionSpan(self.version + self.skip + len(self.prompts) - 1, 0, len(found.token_ids)),)
        logprobs = [-0.1 * (place + 1) for place in range(len(found.token_ids))]
        return replace(found, spans=spans, logprobs=logprobs, incarnation=self.incarnation)


def play(session, recorded=()):
    """The result, the turns that were recorded, and the sampler."""
    written: list[Turn] = []

    def record(number, context, made):
        written.append(recorded_turn(TASK, 1, "w", session.identity, number, context, made))

    sampler = RecordingSampler(session, recorded, record)
    harness = LEDGER.harness(session.tokenizer)
    episode = Episode(TASK, LEDGER, harness, EpisodeLimits(1000, 1.0), Inline())
    return asyncio.run(episode.play(sampler)), written, sampler


@pytest.mark.parametrize("count", range(4))
def test_an_episode_goes_on_from_its_recorded_turns_bit_for_bit(tokenizer, count):
    codec = Codec()
    whole, turns, _ = play(Session(tokenizer))
    read = [codec.decode(codec.encode(turn)) for turn in turns]
    assert read == turns
    session = Session(tokenizer, skip=count)
    resumed, written, sampler = play(session, read[:count])
    assert resumed == whole
    assert [turn.turn for turn in written] == list(range(count, 3)), "what was recorded is not recorded again"
    assert (len(session.prompts), sampler.resumed, sampler.identity) == (3 - count, count, REPLICA)


def test_a_turn_is_used_only_after_the_tokens_that_it_was_sampled_after(tokenizer):
    _, turns, _ = play(Session(tokenizer))
    for kept in (turns[1:], turns[:1] + turns[2:], [replace(turns[0], context=context_digest([1])), *turns[1:]],
                 [replace(turn, context="") for turn in turns]):  # fmt: skip
        usable = 1 if kept[0] == turns[0] else 0
        _, written, sampler = play(Session(tokenizer, skip=usable), kept)
        assert (sampler.resumed, len(written)) == (usable, 3 - usable)


def test_the_turns_of_two_workers_may_mingle(tokenizer):
    _, first, _ = play(Session(tokenizer))
    _, second, _ = play(Session(tokenizer, version=40))
    mingled = [first[0], second[0], first[1], second[2], replace(first[2], context=context_digest([9])), second[1]]
    result, written, _ = play(Session(tokenizer, skip=3), mingled)
    assert written == [] and [span.version for span in result.spans] == [0, 1, 42], "of those that contend, the first"


@pytest.mark.parametrize(
    "changes",
    [
        {"n_tokens": 7},
        {"n_tokens": -1},
        {"token_ids": b""},
        {"token_ids": b"\0"},
        {"token_ids": bytes(4 * 1000), "n_tokens": 1000, "logprobs": bytes(4 * 1000)},
        {"logprobs": b"\0\0"},
        {"logprobs": bytes(4)},
        {"logprobs": b"\0\0\xc0\x7f" * 8},
        {"spans": []},
        {"spans": [VersionSpan(0, 0, 2)]},
        {"spans": [VersionSpan(-1, 0, 8)]},
        {"finish_reason": "abort"},
        {"incarnation": "x" * 300},
    ],
)
def test_a_turn_that_cannot_be_is_not_used(tokenizer, changes):
    whole, turns, _ = play(Session(tokenizer))
    result, _, sampler = play(Session(tokenizer), [replace(turns[0], **changes), *turns[1:]])
    assert sampler.resumed == 0 and result == whole


def test_another_incarnation_than_is_served_begins_anew(tokenizer):
    _, turns, _ = play(Session(tokenizer))
    session = Session(tokenizer, skip=2)
    session.incarnation = "two"
    with pytest.raises(OtherIncarnation, match="'one' is recorded, 'two' is served"):
        play(session, turns[:2])
    session = Session(tokenizer, skip=1)
    mixed = [turns[0], replace(turns[1], incarnation="two"), turns[2]]
    result, written, sampler = play(session, mixed)
    assert sampler.resumed == 1 and result.incarnation == "one" and len(written) == 2


hostile_spans = st.lists(st.builds(VersionSpan, *[st.integers(-1, 4)] * 3), max_size=3)
hostile_arrays = st.binary(max_size=12)


@given(st.lists(st.tuples(st.integers(-1, 3), hostile_arrays, hostile_arrays, st.integers(-1, 4), hostile_spans)))
def test_hostile_turns_are_ignored_or_consistent(tokenizer, rows):
    opening = context_digest(LEDGER.harness(tokenizer).open("ledger credit 3 credit 4"))
    hostile = [
        Turn("g/1", "g", "t", "run", "w", "r", "", "one", number, count, ids, logprobs, spans, "stop", 0, opening)
        for number, ids, logprobs, count, spans in rows
    ]
    session = Session(tokenizer)
    result, _, sampler = play(session, hostile)
    sampled = int(result.segment.mask().sum())
    assert sampled == result.sampled_tokens == sum(span.end - span.start for span in result.spans)
    assert result.turns == sampler.resumed + len(session.prompts)


# -- what the log has of a task -------------------------------------------------------------------------------------


def dispatch(task=TASK, **changes) -> Dispatch:
    made = Dispatch(task.task_id, task.group_id, task.run_id, "w", [0, 1, 2, 3], [0, 0, 0, 0], 10, 5)
    return replace(made, **changes)


def turn(index, number, **changes) -> Turn:
    name = rollout_id(TASK, index)
    made = Turn(
        name, "g", "t", "run", "w", "r", "", "", number, 1, bytes(4), bytes(4), [VersionSpan(0, 0, 1)], "stop", 0
    )
    return replace(made, **changes)


def ended(index, task=TASK):
    return failed_rollout(task, index, "no reason", Provenance("w", "r", "", 0, 0))


def test_what_the_log_has_of_a_task():
    progress = Progress("run")
    assert not progress.was_begun(TASK)
    other = replace(TASK, run_id="other")
    for record in (
        None, Tick("t", 0), dispatch(other), ended(3), dispatch(), dispatch(at=2), turn(0, 0), turn(0, 1), turn(0, 3),
        turn(1, 0), turn(2, 1), turn(3, 0, run_id="other"), ended(1), ended(2, other),
    ):  # fmt: skip
        progress.observe(record)
    assert progress.was_begun(TASK) and progress.groups == {"g"} and progress.first_at == 2
    begun = progress.begun(TASK)
    assert begun.ended == {1}
    assert {index: [one.turn for one in turns] for index, turns in begun.turns.items()} == {0: [0, 1, 3], 2: [1]}
    assert [begun.resumable(index) for index in range(4)] == [2, 0, 0, 0]
    assert progress.begun(TASK) == Begun(frozenset({1}), {}), "turns are handed out once"
