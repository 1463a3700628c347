"""The completion layer: tokens in and out, recorded turns, and failures of a rollout."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.producers.conftest import END, solution
from tests.records import build
from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments.base import ContextFull, GenerationFailed
from tidemill.producers.environments.ledger import CALCULATOR, LedgerEnvironment, LedgerOptions, LedgerTask
from tidemill.producers.rollout.intake import NOTHING, StartedTasks, TaskProgress
from tidemill.producers.rollout.player import completed_rollout, failed_rollout
from tidemill.producers.rollout.policy import RolloutPolicy, context_digest, recorded_turns, turn_record
from tidemill.producers.sampling.completion import Completion, build_segment
from tidemill.producers.sampling.replicas import ReplicaIdentity
from tidemill.schemas.chat.contexts import SampledTurn
from tidemill.schemas.chat.messages import BadMessage
from tidemill.schemas.codec import Codec
from tidemill.schemas.records import (
    Dispatch,
    RolloutStatus,
    SamplingParameters,
    Task,
    Tick,
    Turn,
    VersionSpan,
    rollout_id,
)

pytestmark = pytest.mark.anyio

REPLICA = ReplicaIdentity("r1", "here")
LEDGER = LedgerEnvironment(LedgerOptions())
USER = {"role": "user", "content": "hello"}


def task(entries=(3, 4), max_turns=6) -> Task:
    payload = LedgerTask(entries=entries).payload()
    return build(
        Task, task_id="t", group_id="g", payload=payload, group_size=4, max_turns=max_turns, deadline_at=10**18
    )


TASK = task()


class Script:
    """A replica session that returns given turns, or solves the ledger; its n-th turn has version `n`."""

    def __init__(self, chat, *turns, skip=0, version=0, incarnation="one"):
        self.chat, self.turns, self.skip, self.version, self.incarnation = chat, turns, skip, version, incarnation
        self.identity = ReplicaIdentity("", "")
        self.prompts, self.max_tokens = [], []
        self.gate = None

    async def complete(self, prompt, sampling):
        self.identity = REPLICA
        self.prompts.append(list(prompt))
        self.max_tokens.append(sampling.max_tokens)
        number = len(self.prompts) - 1
        if self.gate is not None:
            await self.gate.wait()
        turn = self.turns[number] if self.turns else solution(self.chat.token_text(prompt))
        if isinstance(turn, Exception):
            raise turn
        ids = self.chat.encode(turn + END)[: sampling.max_tokens]
        spans = (VersionSpan(self.version + self.skip + number, 0, len(ids)),)
        logprobs = [-0.1 * (place + 1) for place in range(len(ids))]
        finish = "stop" if ids[-1] in sampling.stop_token_ids else "length"
        return Completion(ids, logprobs, spans, finish, self.incarnation)


def policy_of(session, recorded=(), max_context=4000, max_turns=6, written=None, a_task=TASK, **more):
    def on_turn(number, made):
        if written is not None:
            written.append(turn_record(a_task, 1, "w", number, made))

    limits = RolloutSettings(max_context_tokens=max_context, max_turn_tokens=200, **more)
    return RolloutPolicy(session.chat, session, limits, max_turns, recorded_turns(recorded), on_turn)


def play(session, recorded=(), a_task=TASK, temperature=1.0, **options):
    """Return the rollout's record, the recorded turns, and the policy."""
    written: list[Turn] = []
    policy = policy_of(session, recorded, written=written, a_task=a_task, temperature=temperature, **options)
    score = asyncio.run(LEDGER.play(a_task, policy))
    base = failed_rollout(a_task, 1, "", "w", policy.identity, 1)
    rollout = completed_rollout(base, policy.contexts.all, score, "v", {}, temperature)
    return replace(rollout, finished_at=2), written, policy


# -- segments -------------------------------------------------------------------------------------------------------

token = st.integers(0, 2**32 - 1)
read_piece = st.lists(token, max_size=6).map(lambda ids: (ids, [], []))
sampled_piece = st.lists(st.tuples(token, st.floats(-50, 0, width=32), st.integers(0, 3)), min_size=1, max_size=8).map(
    lambda rows: ([r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows])
)


@given(st.lists(read_piece | sampled_piece, max_size=12))
def test_a_segment_is_its_pieces_and_its_spans_cover_the_sampled_tokens(pieces):
    ids, mask, logprobs, versions, turns = [], [], [], [], []
    for piece, piece_logprobs, piece_versions in pieces:
        if piece_versions:
            spans = tuple(VersionSpan(version, place, place + 1) for place, version in enumerate(piece_versions))
            turns.append(SampledTurn(len(ids), len(ids) + len(piece), Completion(piece, piece_logprobs, spans, "stop")))
        ids += piece
        mask += [int(bool(piece_versions))] * len(piece)
        logprobs += piece_logprobs or [0.0] * len(piece)
        versions += piece_versions or [None] * len(piece)
    segment = build_segment(ids, turns)
    assert (segment.n_tokens, segment.ids().tolist(), segment.mask().tolist()) == (len(ids), ids, mask)
    assert segment.sampled_logprobs().tolist() == np.asarray(logprobs, "f4").tolist()
    covered: list[int | None] = [None] * len(ids)
    for span in segment.spans:
        covered[span.start : span.end] = [span.version] * (span.end - span.start)
    assert covered == versions
    joints = zip(segment.spans, segment.spans[1:], strict=False)
    assert all(a.end < b.start or (a.end == b.start and a.version != b.version) for a, b in joints)


# -- an episode -----------------------------------------------------------------------------------------------------


def test_an_episode_is_played_token_in_token_out(texts):
    session = Script(texts)
    rollout, _, policy = play(session)
    assert rollout.success and rollout.reward == pytest.approx(1.1) and rollout.turns == 3
    (segment,) = rollout.segments
    text = texts.token_text(segment.ids())
    assert text == texts.template.text(policy.conversation, CALCULATOR.schemas, prompt=False).rstrip("\n")
    sampled = texts.token_text(segment.ids()[segment.mask() == 1])
    assert sampled == (
        f'<tool_call>{{"name": "add", "arguments": {{"a": 0, "b": 3}}}}</tool_call>{END}'
        f'<tool_call>{{"name": "add", "arguments": {{"a": 3, "b": 4}}}}</tool_call>{END}answer 7{END}'
    ), "tool output is never in the loss"
    assert [span.version for span in segment.spans] == [0, 1, 2]
    assert all(b[: len(a)] == a for a, b in zip(session.prompts, session.prompts[1:], strict=False))
    assert rollout.prompt_tokens + rollout.sampled_tokens == segment.n_tokens


def test_the_record_of_a_failed_episode_has_a_reason_and_no_reward():
    record = failed_rollout(TASK, 1, "timeout", "w", REPLICA, 1)
    assert (record.status, record.failure, record.reward, record.success) == (
        RolloutStatus.FAILED, "timeout", None, None)  # fmt: skip
    assert record.segments == [] and record.rewards == [] and record.version_min == -1


async def test_a_changed_earlier_message_is_checked_again(texts):
    session = Script(texts, "a", "b", "c")
    policy, messages = policy_of(session), [dict(USER)]
    for said in ("go on", "on"):
        messages += [(await policy.chat(messages)).message, {"role": "user", "content": said}]
    for place in (1, 2):  # a reply, and a message of the caller
        held, messages[place]["content"] = messages[place]["content"], 7
        with pytest.raises(BadMessage, match=rf"messages\[{place}\]\.content"):
            await policy.chat(messages)
        messages[place]["content"] = held
    messages[0]["content"] = "other"
    await policy.chat(messages)
    assert "other" in texts.token_text(session.prompts[-1]) and "hello" not in texts.token_text(session.prompts[-1])


async def test_sampled_ids_are_kept_if_their_text_has_another_tokenisation(texts):
    session = Script(texts)
    odd = [*texts.encode("<tool_call>"), *texts.encode("x")]

    async def complete(prompt, sampling):
        session.prompts.append(list(prompt))
        return Completion([*odd, 300_000_000][:2], [-1.0] * 2, (VersionSpan(0, 0, 2),), "length", "one")

    session.complete = complete
    policy = policy_of(session)

    first = await policy.chat([USER])
    await policy.chat([USER, first.message, {"role": "user", "content": "again"}])
    (context,) = policy.contexts.all
    assert context.ids[: len(session.prompts[1])] == session.prompts[1]
    assert session.prompts[1][: len(session.prompts[0]) + 2] == [*session.prompts[0], *odd]


async def test_a_fork_shares_ids_and_masks_the_shared_turn_in_one_segment(texts):
    session = Script(texts, "one", "two", "three", "four")
    policy = policy_of(session)

    first = (await policy.chat([USER])).message
    await policy.chat([USER, first, {"role": "user", "content": "left"}])
    await policy.chat([USER, first, {"role": "user", "content": "right"}])
    await policy.chat([{"role": "user", "content": "else"}])
    segments = [build_segment(context.ids, context.turns) for context in policy.contexts.all]
    sampled = [texts.token_text(segment.ids()[segment.mask() == 1]) for segment in segments]
    assert sampled == [f"one{END}two{END}", f"three{END}", f"four{END}"]
    shared = len(session.prompts[0]) + len(texts.encode(f"one{END}"))
    assert segments[0].ids()[:shared].tolist() == segments[1].ids()[:shared].tolist()


async def test_concurrent_calls_extend_and_fork(texts):
    session = Script(texts, "one", "two", "three")
    policy = policy_of(session)

    first = (await policy.chat([USER])).message
    session.gate = asyncio.Event()
    asked = [USER, first, {"role": "user", "content": "both"}]
    calls = [asyncio.create_task(policy.chat(asked)) for _ in range(2)]
    while len(session.prompts) < 3:
        await asyncio.sleep(0)
    session.gate.set()
    await asyncio.gather(*calls)
    sampled = [sum(turn.end - turn.start for turn in context.turns) for context in policy.contexts.all]
    assert len(sampled) == 2 and session.prompts[1] == session.prompts[2]
    assert sum(len(context.turns) for context in policy.contexts.all) == 3, "every turn is in one segment"


# -- bounds ---------------------------------------------------------------------------------------------------------


def test_the_last_turn_gets_only_the_room_that_is_left(texts):
    prompt = len(texts.open([USER]))
    session = Script(texts, "a long answer")
    policy = policy_of(session, max_context=prompt + 3)
    reply = asyncio.run(policy.chat([USER]))
    assert session.max_tokens == [3] and reply.finish == "length" and policy.contexts.all[0].ids[prompt:]


@pytest.mark.parametrize(("asked", "given"), [(None, 200), (7, 7), (0, 1), (4096, 200)])
def test_a_turn_is_never_longer_than_the_setting(texts, asked, given):
    session = Script(texts, "a long answer")
    asyncio.run(policy_of(session).chat([USER], max_tokens=asked))
    assert session.max_tokens == [given]


def test_a_full_context_is_not_a_failure(texts):
    prompt = len(texts.open([USER]))
    policy = policy_of(Script(texts, "a long answer"), max_context=prompt + 3)

    async def converse():
        first = await policy.chat([USER])
        await policy.chat([USER, first.message, {"role": "user", "content": "more"}])

    with pytest.raises(ContextFull):
        asyncio.run(converse())
    assert not policy.failure and policy.full[-1]["content"] == "more"


def test_a_prompt_above_the_context_fails(texts):
    policy = policy_of(Script(texts), max_context=10)
    with pytest.raises(GenerationFailed, match="context: the prompt has"):
        asyncio.run(policy.chat([USER]))
    assert policy.failure.startswith("context: ")


def test_a_message_larger_than_any_context_fails_before_it_is_tokenised(texts):
    policy = policy_of(Script(texts))
    with pytest.raises(GenerationFailed, match="the last message has 100000000 characters"):
        asyncio.run(policy.chat([{"role": "user", "content": "x" * 100_000_000}]))


def test_a_rollout_has_one_incarnation_of_version_numbers(texts):
    for other in ("two", ""):
        session = Script(texts, "a", "b")
        policy = policy_of(session)

        async def converse(session=session, policy=policy, other=other):
            await policy.chat([USER])
            session.incarnation = other
            await policy.chat([USER])

        with pytest.raises(GenerationFailed, match=f"incarnation: turns of 'one' and of '{other}'"):
            asyncio.run(converse())
        assert not policy.other_incarnation, "nothing was recorded: it cannot begin anew"


@given(turns=st.lists(st.text(max_size=12), min_size=6, max_size=6))
def test_any_sampled_turns_end_in_a_score(texts, turns):
    rollout, _, _ = play(Script(texts, *turns))
    assert 1 <= rollout.turns <= 6 and rollout.reward is not None
    assert rollout.sampled_tokens == sum(int(segment.mask().sum()) for segment in rollout.segments)


# -- recorded turns -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(4))
def test_an_episode_continues_from_its_recorded_turns_bit_for_bit(texts, count):
    codec = Codec()
    whole, turns, _ = play(Script(texts))
    read = [codec.decode(codec.encode(turn)) for turn in turns]
    assert read == turns
    session = Script(texts, skip=count)
    resumed, written, policy = play(session, read[:count])
    assert resumed == whole
    assert [turn.turn for turn in written] == list(range(count, 3)), "what was recorded is not recorded again"
    assert (len(session.prompts), policy.resumed, policy.identity) == (3 - count, count, REPLICA)


def test_a_turn_is_used_only_after_the_context_it_was_sampled_in(texts):
    _, turns, _ = play(Script(texts))
    for kept, used in (
        (turns[1:], 2),
        (turns[:1] + turns[2:], 2),
        ([replace(turns[0], context=context_digest([1])), *turns[1:]], 2),
        ([replace(turn, context="") for turn in turns], 0),
    ):
        _, written, policy = play(Script(texts), kept)
        assert (policy.resumed, len(written), len(policy.unused)) == (used, 3 - used, len(kept) - used)


def test_a_rollout_records_its_temperature_and_uses_no_turn_of_another(texts):
    rollout, turns, _ = play(Script(texts))
    assert rollout.sampling == SamplingParameters()
    colder, written, policy = play(Script(texts), turns, temperature=0.5)
    assert colder.sampling == SamplingParameters(temperature=0.5) and colder.sampling.changes() == "temperature 0.5"
    assert (policy.resumed, len(written), len(policy.unused)) == (0, 3, 3)
    again, _, policy = play(Script(texts), written, temperature=0.5)
    assert (policy.resumed, again) == (3, colder)


def test_recorded_turns_are_not_used_in_a_different_context(texts):
    _, turns, _ = play(Script(texts))
    rollout, written, policy = play(Script(texts), turns, a_task=task((3, 5)))
    assert (policy.resumed, len(policy.unused), len(written)) == (0, 3, 3) and rollout.success


def test_equal_contexts_are_answered_in_order_of_recording(texts):
    written: list[Turn] = []
    policy = policy_of(Script(texts, "one", "two"), written=written)

    async def twice(policy):
        return [(await policy.chat([USER])).content for _ in range(2)]

    assert asyncio.run(twice(policy)) == ["one", "two"]
    assert asyncio.run(twice(policy_of(Script(texts, "three", "four"), written))) == ["one", "two"]


def test_the_turns_of_two_workers_may_be_interleaved(texts):
    _, first, _ = play(Script(texts))
    _, second, _ = play(Script(texts, version=40))
    mingled = [first[0], second[0], first[1], second[2], replace(first[2], context=context_digest([9])), second[1]]
    rollout, written, _ = play(Script(texts, skip=3), mingled)
    versions = [span.version for span in rollout.segments[0].spans]
    assert written == [] and versions == [0, 1, 42], "of those that contend, the first"


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
def test_an_invalid_turn_is_not_used(texts, changes):
    _, turns, _ = play(Script(texts))
    rollout, written, policy = play(Script(texts), [replace(turns[0], **changes), *turns[1:]])
    assert rollout.success and written and policy.resumed == 2


def test_turns_of_two_incarnations_are_not_mixed(texts):
    _, turns, _ = play(Script(texts))
    policy = policy_of(Script(texts, skip=2, incarnation="two"), turns[:2])
    with pytest.raises(GenerationFailed, match="turns of 'one' and of 'two'"):
        asyncio.run(LEDGER.play(TASK, policy))
    assert policy.other_incarnation
    mixed = [turns[0], replace(turns[1], incarnation="two"), turns[2]]
    rollout, written, policy = play(Script(texts, skip=1), mixed)
    assert policy.resumed == 2 and rollout.incarnation == "one" and len(written) == 1


hostile_spans = st.lists(st.builds(VersionSpan, *[st.integers(-1, 4)] * 3), max_size=3)
hostile_arrays = st.binary(max_size=12)


@given(st.lists(st.tuples(st.integers(-1, 3), hostile_arrays, hostile_arrays, st.integers(-1, 4), hostile_spans)))
def test_hostile_turns_are_ignored_or_consistent(texts, rows):
    opening = context_digest(texts.open([{"role": "user", "content": LedgerTask(entries=(3, 4)).prompt()}],
                                        CALCULATOR.schemas))  # fmt: skip
    hostile = [
        build(
            Turn,
            rollout_id="g/1",
            group_id="g",
            task_id="t",
            region="",
            incarnation="one",
            turn=number,
            n_tokens=count,
            token_ids=ids,
            logprobs=logprobs,
            spans=spans,
            context=opening,
        )
        for number, ids, logprobs, count, spans in rows
    ]
    session = Script(texts)
    rollout, _, policy = play(session, hostile)
    sampled = sum(int(segment.mask().sum()) for segment in rollout.segments)
    assert sampled == rollout.sampled_tokens
    assert rollout.turns == policy.resumed + len(session.prompts)


# -- the records of a task in the log -------------------------------------------------------------------------------


def dispatch(a_task=TASK, **changes) -> Dispatch:
    made = Dispatch(a_task.task_id, a_task.group_id, a_task.run_id, "w", [0, 1, 2, 3], [0, 0, 0, 0], 10, 5)
    return replace(made, **changes)


def turn(index, number, **changes) -> Turn:
    name = rollout_id(TASK.group_id, index)
    made = build(Turn, rollout_id=name, group_id="g", task_id="t", region="", turn=number, n_tokens=1,
                 token_ids=bytes(4), logprobs=bytes(4), spans=[VersionSpan(0, 0, 1)])  # fmt: skip
    return replace(made, **changes)


def ended(index, a_task=TASK):
    return failed_rollout(a_task, index, "no reason", "w", REPLICA, 0)


def test_the_records_of_a_task_in_the_log():
    begun = StartedTasks("run")
    assert not begun.tasks
    other = replace(TASK, run_id="other")
    for record in (
        None, Tick("t", 0), dispatch(other), ended(3), dispatch(), dispatch(at=2), turn(0, 0), turn(0, 1), turn(0, 1),
        turn(1, 0), turn(2, 1), turn(3, 0, run_id="other"), ended(1), ended(2, other),
    ):  # fmt: skip
        begun.observe(record)
    assert begun.tasks == {TASK.task_id} and begun.groups == {"g"} and begun.first_at == 2
    progress = begun.progress(TASK)
    assert progress.ended == {1}
    assert {index: [one.turn for one in turns] for index, turns in progress.turns.items()} == {0: [0, 1, 1], 2: [1]}
    assert [progress.resumable(index) for index in range(4)] == [2, 0, 1, 0]
    assert begun.progress(TASK) == TaskProgress(frozenset({1}), {}), "turns are handed out once"
    assert TaskProgress() == NOTHING
