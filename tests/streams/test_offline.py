"""A stream processor offline: the outputs of its workers, in any order of reading, and the outputs of other rules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from generated_logs import TURNS, timed_logs, two_logs
from hypothesis import given, settings
from hypothesis import strategies as st
from join_support import TwoLogs, settings_of
from machine_log import MachineLog, said, work_through_kills
from stream_support import RUN_ID, located, rollout

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import RunSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Group, RewardComponent, Tick
from tidemill.streams import offline as offline_streams
from tidemill.streams.config import StreamSettings
from tidemill.streams.machine import Machine, Output, OutputRecord, Processor
from tidemill.streams.offline import Change, DecidedOutput, ReweightRewards, deadline_shift, decided_outputs
from tidemill.streams.runner.worker import feedback_join, group_assembly
from tidemill.streams.state import MachineState

RUN = RunSettings(run_id=RUN_ID)


def assembly(**settings) -> Processor:
    return group_assembly(RUN, StreamSettings(**settings))


def offline(processor: Processor, records: Sequence[ConsumedRecord], *changes: Change) -> list[DecidedOutput]:
    """Run over all records, with the partitions in any order."""
    places = {(record.topic, record.partition) for record in records}
    partitions = {partition for _, partition in places} or {0}
    spans = {
        (topic, partition): range(0, 1 + max((r.offset for r in records if _at(r, topic, partition)), default=-1))
        for topic in processor.inputs
        for partition in partitions
    }
    return list(decided_outputs(processor, spans, records, changes))


def _at(record: ConsumedRecord, topic: Topic, partition: int) -> bool:
    return (record.topic, record.partition) == (topic, partition)


def outputs_of(decided: Sequence[DecidedOutput]) -> list[Output]:
    return [one.output for one in decided]


def groups_of(decided: Sequence[DecidedOutput]) -> list[Group]:
    emitted = (one.output.record for one in decided if isinstance(one.output, OutputRecord))
    return [record for record in emitted if isinstance(record, Group)]


@given(timed_logs(), st.lists(st.integers(0, 40), max_size=5), st.integers(1, 7))
def test_assembly_offline_gives_the_outputs_of_a_worker_with_any_kills(records, kills, batch):
    log = MachineLog({Topic.ROLLOUTS: records})
    work_through_kills(log, lambda state: assembly().machine(0, state), [(writes, ()) for writes in kills], batch)
    decided = offline(assembly(), records)
    assert said(outputs_of(decided)) == said(log.outputs)
    assert len(said(outputs_of(decided))) == len(decided)


def merged(logs: TwoLogs, turns: Sequence[int]) -> list[ConsumedRecord]:
    """Return the records of both topics, each topic in its order, alternating by `turns`."""
    left = [list(records) for records in logs.inputs.values()]
    found = []
    for turn in [*turns, *(0, 1) * sum(map(len, left))]:
        if left[turn]:
            found.append(left[turn].pop(0))
    return found


@settings(max_examples=60)
@given(two_logs(), TURNS, st.lists(st.tuples(st.integers(0, 40), TURNS), max_size=4), st.integers(1, 7))
def test_the_join_offline_gives_the_outputs_of_a_worker_in_any_order_of_reading(logs, turns, kills, batch):
    rules = settings_of()
    processor = feedback_join(RUN, rules)
    log = MachineLog(logs.inputs)
    work_through_kills(log, lambda states: processor.machine(0, states), kills, batch)
    decided = offline(processor, merged(logs, turns))
    assert said(outputs_of(decided)) == said(log.outputs)
    assert len(said(outputs_of(decided))) == len(decided)


@given(two_logs(), TURNS)
def test_the_order_does_not_depend_on_how_the_topics_were_read(logs, turns):
    def order(records: Sequence[ConsumedRecord]) -> list[ConsumedRecord]:
        given: list[ConsumedRecord] = []
        offline(feedback_join(RUN, settings_of()), records, lambda r: given.append(r) or r)
        return given

    one, other = order(merged(logs, turns)), order(merged(logs, [1] * 30))
    assert one == other and len(one) == sum(map(len, logs.inputs.values()))
    for topic, records in logs.inputs.items():
        assert [record for record in one if record.topic is topic] == list(records)


def test_each_partition_has_its_own_machine():
    records = [located(rollout("g", i // 2, group_size=2), i // 2, partition=i % 2, at_ms=1_000 + i) for i in range(4)]
    found = offline(assembly(), records)
    assert [(d.output.partition, d.cause.partition, d.cause.offset) for d in found] == [(0, 0, 1), (1, 1, 1)]
    assert [d.at_ms for d in found] == [1_002, 1_003]


def test_the_changes_of_every_machine_are_discarded(monkeypatch):
    monkeypatch.setattr(offline_streams, "CHANGES_EVERY", 2)
    made: dict[int, Machine] = {}

    def machine(partition: int, state: MachineState) -> Machine:
        return made.setdefault(partition, assembly().machine(partition, state))

    records = [located(rollout(f"g{i}", 0, group_size=2), i // 2, partition=i % 2, at_ms=1_000 + i) for i in range(8)]
    offline(replace(assembly(), machine=machine), records)
    assert [len(made[partition].take_changes().entries) for partition in (0, 1)] == [0, 0]


def test_records_outside_the_span_are_ignored():
    records = [located(rollout("g", i, group_size=2), i) for i in range(4)]
    assert not list(decided_outputs(assembly(), {(Topic.ROLLOUTS, 0): range(0, 1)}, records))


def test_deadlines_after_the_end_of_the_log_decide_nothing():
    waiting = [located(rollout("g", 0, deadline_at=5_000_000), 0, at_ms=4_000)]
    assert offline(assembly(), waiting) == []
    tick = located(Tick("s", 0), 1, at_ms=5_000)
    assert [g.closed_at for g in groups_of(offline(assembly(), [*waiting, tick]))] == [5_000_000]


def test_another_deadline_changes_the_members_of_the_group():
    records = [
        located(rollout("g", i, group_size=2, deadline_at=5_000_000), i, at_ms=4_000 + 2_000 * i) for i in (0, 1)
    ]
    closed = [(g.closed_by, len(g.members)) for g in groups_of(offline(assembly(), records))]
    assert closed == [("deadline", 1), ("late", 1)]
    for changes in ([deadline_shift(2_000_000)], [deadline_shift(3_000_000), deadline_shift(-1_000_000)]):
        later = groups_of(offline(assembly(), records, *changes))
        assert [(g.closed_by, len(g.members)) for g in later] == [("size", 2)]


def scored(index: int, *values: float, version: str = "1", **changes: object) -> ConsumedRecord:
    names = ("answer", "tool_use")
    parts = [RewardComponent(name, value, 1.0) for name, value in zip(names, values, strict=True)]
    made = rollout("g", index, group_size=2, reward=sum(values), rewards=parts, reward_version=version)
    return located(replace(made, **changes), index)


def test_another_formula_gives_other_advantages():
    records = [scored(0, 1.0, 0.0), scored(1, 0.0, 1.0)]
    (plain,) = groups_of(offline(assembly(), records))
    assert [m.advantage for m in plain.members] == [0.0, 0.0]
    what_if = ReweightRewards({"tool_use": 0.5})
    (group,) = groups_of(offline(assembly(), records, what_if))
    assert [m.reward for m in group.members] == [1.0, 0.5]
    assert [m.advantage for m in group.members] == [0.25, -0.25]
    what_if.check()


def test_a_formula_applies_to_its_version_and_to_rollouts_with_a_reward():
    records = [scored(0, 1.0, 1.0, version="old"), scored(1, 1.0, 1.0, version="new")]
    what_if = ReweightRewards({"answer": 3.0}, "old")
    (group,) = groups_of(offline(assembly(), records, what_if))
    assert [m.reward for m in group.members] == [4.0, 2.0]
    failed = located(rollout("g", 0, reward=None), 0)
    assert what_if(failed) is failed
    tick = located(Tick("s", 0), 0)
    assert what_if(tick) is deadline_shift(5)(tick) is tick


@pytest.mark.parametrize(
    ("what_if", "told"),
    [
        (ReweightRewards({"manners": 1.0}), "no rollout has a reward component manners; there is answer, tool_use"),
        (ReweightRewards({"answer": 1.0}, "9"), r"no rollout has a reward of version '9'; there is \['1'\]"),
    ],
)
def test_a_formula_without_a_matching_reward_is_an_error(what_if, told):
    offline(assembly(), [scored(0, 1.0, 0.0)], what_if)
    with pytest.raises(ValueError, match=told):
        what_if.check()


def test_the_same_weights_give_the_recorded_reward_bit_for_bit():
    """The sum has the order of the scorer's sum; another order would give a different last bit."""
    chance = random.Random(5)
    for _ in range(200):
        values = [chance.uniform(-1, 1) for _ in range(2)]
        record = scored(0, *values)
        assert ReweightRewards({"answer": 1.0})(record).record == record.record


def test_the_rules_of_the_settings_decide():
    records = [located(rollout("g", i, reward=r, group_size=2), i) for i, r in enumerate((1.0, None))]
    for least, mean in ((1, 1.0), (2, None)):
        assert [g.mean_reward for g in groups_of(offline(assembly(min_completed=least), records))] == [mean]
