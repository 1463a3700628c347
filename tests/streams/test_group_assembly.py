"""The state machine of group assembly, over an in-memory log: any interleaving, duplication and kill."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest
from generated_logs import timed_logs
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_log import MachineLog, check_kills, said, work
from stream_support import CODEC, RUN_ID, located, rollout

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import CloseReason, Document, Group, Rollout, Tick
from tidemill.streams.assembly import DoneGroup, GroupAssembler, GroupBytes, GroupHeader, OpenGroup
from tidemill.streams.config import StreamSettings
from tidemill.streams.machine import Output, OutputRecord, Rejected
from tidemill.streams.state import NO_IDENTIFIER, MachineState


def assembly(state: MachineState | None = None, **settings) -> GroupAssembler:
    return GroupAssembler(0, RUN_ID, StreamSettings(**settings), state)


def observe_all(records: list[ConsumedRecord], **settings) -> list[Output]:
    assembler = assembly(**settings)
    return [output for record in records for output in assembler.observe(record)]


def groups_of(outputs: list[Output]) -> list[Group]:
    groups = []
    for output in outputs:
        assert isinstance(output, OutputRecord)
        assert isinstance(output.record, Group)
        assert (output.topic, output.key, output.partition) == (Topic.GROUPS, output.record.group_id, 0)
        groups.append(output.record)
    return groups


def test_closes_when_every_member_is_there():
    records = [located(rollout("g", i, reward=float(i)), offset) for offset, i in enumerate((2, 0, 3, 1))]
    assert groups_of(observe_all(records[:3])) == []
    (group,) = groups_of(observe_all(records))
    assert group.closed_by is CloseReason.SIZE
    assert [m.rollout_id for m in group.members] == [f"g/{i:03d}" for i in range(4)]
    assert [m.offset for m in group.members] == [1, 3, 0, 2]
    assert group.mean_reward == 1.5
    assert [m.advantage for m in group.members] == [-1.5, -0.5, 0.5, 1.5]


@pytest.mark.parametrize(
    ("rewards", "least", "mean", "advantages"),
    [
        ((1.0, None, 0.0, None), 1, 0.5, [0.5, None, -0.5, None]),
        ((None,) * 4, 1, None, [None] * 4),
        ((1.0, None, None, None), 2, None, [None] * 4),
    ],
    ids=["a failure is no reward", "failures have no mean", "too few completed"],
)
def test_failed_members_count_without_a_reward(rewards, least, mean, advantages):
    records = [located(rollout("g", i, reward=r), i) for i, r in enumerate(rewards)]
    (group,) = groups_of(observe_all(records, min_completed=least))
    assert group.mean_reward == mean
    assert [m.advantage for m in group.members] == advantages
    assert tuple(m.reward for m in group.members) == rewards


def test_deadline_by_another_groups_rollout():
    first = located(rollout("g", 0, deadline_at=5_000_000), 0, at_ms=4_000)
    other = located(rollout("h", 0), 1, at_ms=4_999)
    after = located(rollout("h", 1), 2, at_ms=5_000)
    assert observe_all([first, other]) == []
    (group,) = groups_of(observe_all([first, other, after]))
    assert (group.group_id, group.closed_by, len(group.members)) == ("g", CloseReason.DEADLINE, 1)
    assert (group.opened_at, group.closed_at) == (4_000_000, 5_000_000)


def test_deadline_by_a_tick_in_an_idle_partition():
    first = located(rollout("g", 0, deadline_at=5_000_000), 0, at_ms=4_000)
    tick = located(Tick(source="s", at=6_000_000), 1, at_ms=6_000)
    assembler = assembly()
    assert assembler.observe(first) == []
    assert assembler.next_deadline_us() == 5_000_000
    (group,) = groups_of(assembler.observe(tick))
    assert group.closed_by is CloseReason.DEADLINE
    assert assembler.next_deadline_us() is None


def test_clock_never_goes_back():
    assembler = assembly()
    assembler.observe(located(Tick(source="s", at=0), 0, at_ms=9_000))
    assembler.observe(located(Tick(source="s", at=0), 1, at_ms=1_000))
    assert assembler.clock_us(Topic.ROLLOUTS) == 9_000_000


def test_late_rollout_is_a_group_of_one_and_written_once():
    records = [located(rollout("g", 0, deadline_at=5_000_000), 0, at_ms=4_000)]
    records.append(located(rollout("g", 1, deadline_at=5_000_000), 1, at_ms=7_000))
    records.append(located(rollout("g", 1, deadline_at=5_000_000), 2, at_ms=7_001))
    records.append(located(rollout("g", 0, deadline_at=5_000_000), 3, at_ms=7_002))
    deadline, late = groups_of(observe_all(records))
    assert (deadline.closed_by, late.closed_by) == (CloseReason.DEADLINE, CloseReason.LATE)
    assert [m.rollout_id for m in late.members] == ["g/001"]


def test_a_closed_group_has_no_more_rollouts_than_its_size():
    first, second = (rollout("g", index, group_size=2) for index in (0, 1))
    another = replace(second, rollout_id="g/another")
    records = [located(one, at) for at, one in enumerate([first, second, another, second])]
    closed, refused = observe_all(records)
    assert closed.record.closed_by is CloseReason.SIZE
    assert refused.located is records[2] and "has 2 rollouts already" in refused.reason


def test_a_group_that_opens_past_its_deadline_closes_at_once():
    (group,) = groups_of(observe_all([located(rollout("g", 0, deadline_at=5_000_000), 0, at_ms=6_000)]))
    assert (group.closed_by, len(group.members)) == (CloseReason.DEADLINE, 1)


def test_markers_are_forgotten_after_their_time():
    assembler = assembly(done_ttl_s=1)
    assembler.observe(located(rollout("g", 0, group_size=1), 0, at_ms=1_000))
    assert list(assembler.take_changes().entries) == ["g"]
    assembler.observe(located(Tick(source="s", at=0), 1, at_ms=1_999))
    assert assembler.take_changes().entries == {}
    assembler.observe(located(Tick(source="s", at=0), 2, at_ms=2_000))
    assert assembler.take_changes().entries == {"g": None}


def test_other_runs_are_left_alone():
    assert observe_all([located(rollout("g", 0, group_size=1, run_id="other"), 0)]) == []


def test_shuffled_rewards_are_the_same_values_in_a_deterministic_order():
    rewards = [0.0, 1.0, 2.0, None, 4.0, 5.0, 6.0, 7.0]
    records = [located(rollout("g", i, group_size=8, reward=r), i) for i, r in enumerate(rewards)]
    (group,) = groups_of(observe_all(records, shuffle_rewards=True))
    drawn = [m.reward for m in group.members]
    assert group.rewards_shuffled
    assert sorted(r for r in drawn if r is not None) == [0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0]
    assert drawn[3] is None
    assert drawn != rewards
    assert groups_of(observe_all(records, shuffle_rewards=True)) == [group]


BROKEN = {
    "key": located(rollout("g", 0), 0, key=b"h"),
    "no key": located(rollout("g", 0), 0, key=None),
    "index": located(rollout("g", 4), 0),
    "negative index": located(rollout("g", -1), 0),
    "group size": located(rollout("g", 0, group_size=0), 0),
    "too large for a record": located(rollout("g", 0, group_size=100_000), 0),
    "rollout ids too long for a record": located(rollout("g", 0, rollout_id="r" * 300_000), 0),
    "task id too long for a record": located(rollout("g", 0, task_id="t" * 600_000), 0),
    "empty id": located(rollout("", 0), 0),
    "reserved id": located(rollout(f"{NO_IDENTIFIER}head/0", 0), 0),
    "nan": located(rollout("g", 0, reward=math.nan), 0),
    "infinite": located(rollout("g", 0, reward=math.inf), 0),
    "overflowing": located(rollout("g", 0, reward=1e308), 0),
    "extreme": located(rollout("g", 0, reward=-2e9), 0),
    "completed without reward": located(replace(rollout("g", 0), reward=None), 0),
    "failed with reward": located(replace(rollout("g", 0, reward=None), reward=0.0), 0),
    "undecodable": located(None, 0),
    "wrong type": located(Document(document_id="d", source="s", text="t"), 0),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_records_are_rejected_and_the_stream_continues(name):
    assembler = assembly()
    (rejected,) = assembler.observe(BROKEN[name])
    assert isinstance(rejected, Rejected)
    assert rejected.reason
    assert rejected.located is BROKEN[name]
    (group,) = groups_of(assembler.observe(located(rollout("ok", 0, group_size=1), 1)))
    assert group.group_id == "ok"


@pytest.mark.parametrize(
    "second",
    [rollout("g", 1, group_size=5), rollout("g", 1, deadline_at=7), rollout("g", 0, rollout_id="another")],
    ids=["size", "deadline", "index taken"],
)
def test_rollouts_that_disagree_with_their_group_are_rejected(second):
    outputs = observe_all([located(rollout("g", 0), 0), located(second, 1)])
    assert [type(o) for o in outputs] == [Rejected]


def oracle(records: list[ConsumedRecord]) -> dict[str, set[str]]:
    """Return the members of each group from all records, independent of their order."""
    members: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if isinstance(record.record, Rollout):
            members[record.record.group_id].add(record.record.rollout_id)
    return dict(members)


@st.composite
def shuffled_logs(draw):
    """Draw up to four complete groups of up to four rollouts, with duplicates, in any order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    rewards = st.one_of(st.none(), st.floats(-10, 10))
    unique = [
        rollout(f"g{g}", i, group_size=size, reward=draw(rewards)) for g, size in enumerate(sizes) for i in range(size)
    ]
    again = draw(st.lists(st.sampled_from(unique), max_size=8))
    return [located(r, offset) for offset, r in enumerate(draw(st.permutations(unique + again)))]


@given(shuffled_logs())
def test_any_interleaving_and_duplication_gives_the_oracles_groups(records):
    groups = groups_of(observe_all(records))
    assert {g.group_id: {m.rollout_id for m in g.members} for g in groups} == oracle(records)
    assert len(groups) == len(oracle(records))
    assert {g.closed_by for g in groups} == {CloseReason.SIZE}
    for group in groups:
        advantages = [m.advantage for m in group.members if m.advantage is not None]
        assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
        first = {m.rollout_id: m.offset for m in group.members}
        assert all(first[r.record.rollout_id] <= r.offset for r in records if r.record.group_id == group.group_id)


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_output_bytes_do_not_depend_on_arrival_order(one, other):
    members = [located(rollout("g", i, reward=i / 3), i, at_ms=1_000 + i) for i in range(4)]

    def assembled(order):
        # Resets the guard against old offsets, so that the same records can arrive in any order.
        assembler = assembly()
        outputs = []
        for i in order:
            assembler._head.offset = -1
            outputs += assembler.observe(members[i])
        return [CODEC.encode(output.record) for output in outputs]

    assert assembled(one) == assembled(other)


@settings(max_examples=200)
@given(timed_logs(), st.lists(st.integers(0, 40), max_size=6), st.integers(1, 7), st.floats(10, 14), st.booleans())
def test_a_worker_killed_anywhere_repeats_groups_but_changes_none(records, kills, batch, ttl_s, atomic):
    inputs = {Topic.ROLLOUTS: records}
    check_kills(inputs, lambda state: assembly(state, done_ttl_s=ttl_s), [(n, ()) for n in kills], batch, atomic)


@given(timed_logs(), st.integers(0, 24), st.integers(0, 24))
def test_a_state_in_the_old_format_continues(records, head_at, entries_at):
    """The old format: bare values under the groups' keys. The worker may have been killed before it wrote the head."""
    head_at, entries_at = sorted((head_at % (len(records) + 1), entries_at % (len(records) + 1)))
    assembler = assembly()
    written: dict[str, bytes] = {}
    before: list[Output] = []
    for done, record in enumerate(records[:entries_at], 1):
        before += assembler.observe(record)
        changes = assembler.take_changes()
        # The old format wrote deletions after the head.
        written |= {key: body for key, body in changes.entries.items() if body is not None}
        if done <= head_at:
            written["\x00head/0"] = b"h" + changes.head
            for key in [key for key, body in changes.entries.items() if body is None]:
                written.pop(key, None)
    log = MachineLog({Topic.ROLLOUTS: records}, list(before), written)
    work(log, assembly)
    assert said(log.outputs) == said(observe_all(records))


@given(timed_logs())
def test_no_rollout_is_lost_and_none_is_in_two_groups(records):
    last = located(Tick(source="s", at=0), len(records), at_ms=100_000)
    groups = groups_of([o for o in observe_all([*records, last]) if isinstance(o, OutputRecord)])
    named = [m.rollout_id for group in groups for m in group.members]
    assert sorted(named) == sorted({name for names in oracle(records).values() for name in names})
    for group_id in oracle(records):
        assert [g.closed_by is CloseReason.LATE for g in groups if g.group_id == group_id].count(False) == 1


def test_states_survive_their_bytes():
    group_bytes = GroupBytes(7)
    open_group = OpenGroup("g", 3, GroupHeader.of(rollout("g", 0)))
    for entry in (open_group, DoneGroup("h", 1, 2, {"a", "b"}, 7)):
        assert group_bytes.decode(entry.key, group_bytes.encode(entry)) == entry
    assembler = assembly()
    assembler.observe(located(rollout("g", 0), 0))
    assembler.observe(located(rollout("h", 0, group_size=1, reward=None), 1))
    for key, data in assembler.take_changes().entries.items():
        assert data is not None
        assert group_bytes.encode(group_bytes.decode(key, data)) == data
