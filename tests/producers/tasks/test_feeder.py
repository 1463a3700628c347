"""The feeder: which tasks it issues and when, its restart from the log, and the whole role on a real Kafka."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace

import pytest
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.records import build
from tests.waiting import until
from tidemill.producers.config import FeedSettings, RolloutSettings
from tidemill.producers.environments.base import Split, TaskDraft, TaskError, split_of
from tidemill.producers.environments.find import UnknownEnvironment
from tidemill.producers.environments.ledger import LedgerEnvironment, LedgerOptions
from tidemill.producers.tasks import feeder
from tidemill.producers.tasks.feeder import FeederState
from tidemill.producers.tasks.source import Questions, Stage, TaskName, TaskSource, parse_task_name, take_turns
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import EnvironmentEntry, KafkaSettings, RunSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import (
    AckStatus,
    CloseReason,
    Group,
    GroupMember,
    Manifest,
    Mode,
    RolloutStatus,
    StepInput,
    StepPlan,
    Task,
    TrainStep,
    WeightAck,
)

SECOND = 1_000_000
DEADLINE_S = 180.0
LEDGER = (EnvironmentEntry(name="ledger"), LedgerEnvironment(LedgerOptions()))
RUN = RunSettings(run_id="run", seed=3, groups_per_step=2, max_policy_lag=1, max_steps=3)
FEED = FeedSettings(
    group_size=4,
    eval_tasks=3,
    eval_every=2,
    eval_during_tasks=1,
    eval_group_size=2,
    deadline_s=50,
    eval_deadline_s=80,
    overdue_s=10,
)


def closed(task: Task, reason=CloseReason.SIZE) -> Group:
    name, version = task.group_id, task.issued_version
    members = [
        GroupMember(
            f"{name}/{i}", "rollouts", 0, i, RolloutStatus.COMPLETED, 1.0 * i, i - 0.5, True, 5, version, version
        )
        for i in range(2)
    ]
    at = task.issued_at
    return build(Group, group_id=name, run_id=task.run_id, mode=task.mode, closed_by=reason,
                 expected_size=len(members), members=members, mean_reward=0.5, opened_at=at,
                 closed_at=at)  # fmt: skip


def unsolved(task: Task) -> Group:
    group = closed(task)
    return replace(group, members=[replace(group.members[0], success=False), group.members[1]])


def step(number, groups) -> TrainStep:
    inputs = [StepInput(name, "groups", 0, 0) for name in groups]
    return build(TrainStep, step=number, inputs=inputs, learning_rate=0.1, rollouts=8, tokens=40)


def plan(number, groups) -> StepPlan:
    inputs = [StepInput(name, "groups", 0, 0) for name in groups]
    return build(StepPlan, step=number, parent_version=number - 1, inputs=inputs, trainer="trainer")


def manifest(version) -> Manifest:
    return build(Manifest, version=version, parent=None, learning_rate=0.1)


def ack(version, at=0) -> WeightAck:
    status = AckStatus.PROVED
    return build(WeightAck, replica_id="a", region="", incarnation="i", version=version, status=status, at=at)


class World:
    """The rest of the loop, played by hand: all records of the log, and a feeder that has read them."""

    def __init__(self, feed=FEED, run=RUN):
        self.feed, self.run, self.log, self.now = feed, run, [], 1000 * SECOND
        self.restart()

    def restart(self):
        self.state = FeederState(self.run, self.feed)
        self.source = TaskSource([LEDGER], self.run, self.feed)
        for record in self.log:
            self._observe(record)

    def _observe(self, record):
        self.state.observe(record)
        if isinstance(record, Task):
            self.source.observe(record)

    def write(self, *records):
        for record in records:
            self.log.append(record)
            self._observe(record)

    def issue(self, limit=None) -> list[Task]:
        names = self.state.decide(self.now)[0][:limit]
        tasks = [self.source.task(name, self.now, self.state.admission.newest_version) for name in names]
        self.write(*tasks)
        return tasks

    def done(self) -> bool:
        return self.state.decide(self.now)[1]

    def train(self, number, tasks):
        self.write(step(number, [task.group_id for task in tasks]), manifest(number))


def stages(tasks) -> list[str]:
    return [str(task.task_id).split("/", 1)[1] for task in tasks]


names = st.builds(
    TaskName,
    run_id=st.from_regex(r"[A-Za-z0-9._-]+", fullmatch=True),
    stage=st.sampled_from(Stage),
    version=st.integers(0, 10**17),
    index=st.integers(0, 10**17),
).map(lambda name: replace(name, version=0) if name.stage is Stage.TRAIN else name)


@given(names)
def test_a_task_name_is_read_back(name):
    assert parse_task_name(str(name)) == name


@given(st.text(max_size=40))
def test_an_invalid_task_name_is_none(text):
    found = parse_task_name(text)
    assert found is None or int(str(found).rsplit("/", 1)[1]) == int(text.rsplit("/", 1)[1])


def test_a_run_from_the_first_evaluation_to_the_last():
    world = World()
    assert world.issue() == [], "no replica serves yet"
    world.write(manifest(0), ack(0))
    before = world.issue()
    assert stages(before) == [f"eval-before/v0/{i}" for i in range(3)]
    assert world.issue() == [], "training waits for the evaluation"
    world.write(*map(closed, before))

    first = world.issue()
    assert stages(first) == [f"train/{i}" for i in range(4)]
    assert world.issue() == []
    world.write(*map(closed, first))
    world.train(1, first[:2])
    assert world.issue() == [], "version 1 is not served yet"
    world.write(ack(1, 1))
    second = world.issue()
    assert stages(second) == ["train/4", "train/5"], "the last step's groups, and no more"
    world.write(*map(closed, second))
    world.train(2, first[2:])
    world.write(ack(2, 2))
    during = world.issue()
    assert stages(during) == ["eval-during/v2/0"]
    world.train(3, second)
    assert world.issue() == [], "the last version is not served yet"
    world.write(ack(3, 3))
    after = world.issue()
    assert stages(after) == [f"eval-after/v3/{i}" for i in range(3)]
    assert not world.done()
    world.write(*map(closed, after))
    assert not world.done(), "an evaluation during training is still open"
    world.write(closed(during[0]))
    assert world.done()


def test_held_out_tasks_compare_and_are_never_trained():
    world = World()
    world.write(manifest(0), ack(0))
    before = world.issue()
    world.write(*map(closed, before))
    trained = world.issue()
    world.write(*map(closed, trained))
    assert len({task.payload for task in trained}) == 4
    assert not {task.payload for task in trained} & {task.payload for task in before}
    assert {task.mode for task in before} == {Mode.EVAL} and {task.group_size for task in before} == {2}
    assert [task.deadline_at - task.issued_at for task in (before[0], trained[0])] == [80 * SECOND, 50 * SECOND]
    name = TaskName("run", Stage.EVAL_AFTER, 9, 1)
    assert world.source.task(name, 0, 9).payload == before[1].payload


def test_a_synchronous_run_waits_for_each_version():
    world = World(FEED.model_copy(update={"sync": True, "eval_before": False, "eval_every": 0}))
    world.write(manifest(0), ack(0))
    first = world.issue()
    assert stages(first) == ["train/0", "train/1"]
    world.write(*map(closed, first))
    assert world.issue() == []
    world.train(1, first)
    assert world.issue() == []
    world.write(ack(1, 1))
    assert stages(world.issue()) == ["train/2", "train/3"]


def test_a_restart_continues_in_the_middle_of_an_evaluation():
    world = World()
    world.write(manifest(0), ack(0))
    begun = world.issue(limit=2)
    world.write(ack(1, 1))
    world.restart()
    assert stages(world.issue()) == ["eval-before/v0/2"], "under the version that it began with"
    assert stages(begun) == ["eval-before/v0/0", "eval-before/v0/1"]


def test_a_restart_never_issues_a_prompt_again():
    world = World(
        FEED.model_copy(update={"eval_before": False}), RUN.model_copy(update={"max_policy_lag": 9, "max_steps": 10})
    )
    world.write(manifest(0), ack(0))
    for limit in (3, 4, 5):
        world.issue(limit)
        world.restart()
    tasks = [record for record in world.log if isinstance(record, Task)]
    assert stages(tasks) == [f"train/{i}" for i in range(12)]
    assert len({task.payload for task in tasks}) == 12
    assert len({task.seed for task in tasks}) == 12


@given(st.lists(st.integers(0, 2**6 - 1), min_size=1, max_size=5))
def test_a_feeder_killed_between_its_sends_skips_no_task_and_issues_none_twice(arrived):
    """The bits of each number say which tasks of a decision were on the log before the feeder was killed."""
    feed = FEED.model_copy(update={"eval_before": False, "eval_every": 0})
    run = RUN.model_copy(update={"max_policy_lag": 9, "max_steps": 10})
    world, undisturbed = World(feed, run), World(feed, run)
    for one in (world, undisturbed):
        one.write(manifest(0), ack(0))
    for bits in arrived:
        names, _ = world.state.decide(world.now)
        tasks = [world.source.task(name, world.now, 0) for name in names]
        world.log += [task for place, task in enumerate(tasks) if bits >> place & 1]
        world.restart()
    world.issue()
    issued = {task.task_id: task for task in world.log if isinstance(task, Task)}
    assert len(issued) == sum(isinstance(record, Task) for record in world.log)
    assert issued == {task.task_id: task for task in undisturbed.issue()}, (
        "and each is the task that it would have been"
    )


@given(st.randoms(use_true_random=False))
def test_the_state_is_a_function_of_the_records(rng):
    world = World()
    world.write(manifest(0), ack(0))
    world.write(*map(closed, world.issue()))
    first = world.issue()
    world.write(*map(closed, first))
    world.write(plan(1, [task.group_id for task in first[:2]]))
    world.train(1, first[:2])
    decided = world.state.decide(world.now)
    rng.shuffle(world.log)
    world.log += rng.choices(world.log, k=5)
    world.restart()
    assert world.state.decide(world.now) == decided
    assert world.state.waiting_for() == {Topic.ACKS, Topic.STEPS}


def test_records_of_other_runs_and_branches_are_ignored():
    world = World()
    world.write(replace(manifest(0), branch="other"), replace(ack(0), run_id="other"))
    assert world.issue() == []
    world.write(ack(0))
    world.write(*[replace(closed(task), run_id="other") for task in world.issue()])
    assert world.issue() == []


def test_the_feeder_waits_for_and_follows_only_the_named_replicas():
    world = World(FEED.model_copy(update={"replica_ids": ["canary"], "eval_every": 1}))
    world.write(manifest(0), replace(ack(0), replica_id="stable"))
    assert world.issue() == []
    world.write(replace(ack(0), replica_id="canary"))
    before = world.issue()
    world.write(*map(closed, before))
    trained = world.issue()
    world.train(1, trained[:2])
    world.write(replace(ack(1), replica_id="canary"))
    assert "eval-during/v1/0" in stages(world.issue())


def test_the_feeder_does_not_wait_for_an_evaluation_that_never_closes(caplog):
    world = World()
    world.write(manifest(0), ack(0))
    before = world.issue()
    world.write(*map(closed, before[1:]))
    world.now += 91 * SECOND
    names, _ = world.state.decide(world.now)
    assert caplog.messages == [f"group {before[0].group_id} never closed; it no longer counts as unfinished"]
    assert len(names) == 4


def failing(task: Task) -> Group:
    group = closed(task)
    last = replace(group.members[-1], status=RolloutStatus.FAILED, reward=None, success=None)
    return replace(group, members=[*group.members[:-1], last])


def test_a_held_out_task_whose_rollout_failed_is_issued_again_while_its_version_is_served():
    world = World(FEED.model_copy(update={"eval_before": False, "eval_every": 1, "eval_during_tasks": 2}))
    world.write(manifest(0), ack(0))
    world.train(1, world.issue()[:2])
    world.write(ack(1, 1))
    (first, second) = [task for task in world.issue() if task.mode is Mode.EVAL]
    world.write(closed(first), failing(second))
    asked, waited_s = [second], []
    for _ in range(3):
        began = world.now
        while not (again := [task for task in world.issue() if task.mode is Mode.EVAL]):
            world.now += SECOND
            world.restart()
        assert len(again) == 1 and again[0].payload == second.payload and again[0].seed != asked[-1].seed
        waited_s.append((world.now - began) // SECOND)
        asked += again
        world.write(failing(replace(again[0], issued_at=world.now)))
    assert [task.task_id for task in asked] == [f"run/eval-during/v1/{index}" for index in (1, 3, 5, 7)]
    assert waited_s == [10, 20, 40]
    world.train(2, [])
    world.write(ack(2, 2))
    world.now += 1000 * SECOND
    assert not [name for name in stages(world.issue()) if "/v1/" in name], "another version is served"


def test_evaluation_only():
    world = World(FEED.model_copy(update={"eval_after": False}), RUN.model_copy(update={"max_steps": 0}))
    world.write(manifest(0), ack(0))
    before = world.issue()
    assert not world.done()
    world.write(*map(closed, before))
    assert world.done()


def test_the_topics_that_the_feeder_waits_for():
    world = World()
    assert world.state.waiting_for() == {Topic.MANIFESTS, Topic.ACKS}
    world.write(manifest(0))
    assert world.state.waiting_for() == {Topic.ACKS}
    world.write(ack(0))
    before = world.issue()
    assert world.state.waiting_for() == {Topic.GROUPS}
    world.write(*map(closed, before))
    first = world.issue()
    world.write(closed(first[0]))
    assert world.state.waiting_for() == {Topic.GROUPS, Topic.STEPS}
    world.write(step(1, [first[0].group_id, first[1].group_id]))
    assert world.state.waiting_for() == {Topic.GROUPS, Topic.MANIFESTS}


def test_a_silent_topic_is_named_once_per_timeout(monkeypatch, caplog):
    now_s = [0]
    monkeypatch.setattr(feeder, "now_us", lambda: now_s[0] * SECOND)
    feeding = feeder.Feeder(RUN, FEED, TaskSource([LEDGER], RUN, FEED), None)

    def named_at(*seconds) -> set[str]:
        caplog.clear()
        for now_s[0] in seconds:
            feeding.advance()
        return set(re.findall(r"nothing on topic (\S+)\. Look at", "\n".join(caplog.messages)))

    assert named_at(0, 59) == set()
    feeding.observe(ConsumedRecord(Topic.ACKS, 0, 0, 0, None, None, replace(ack(0), branch="other")))
    assert named_at(60) == {Topic.MANIFESTS}
    assert named_at(61, 118) == set()
    assert named_at(119) == {Topic.ACKS}


class Few(LedgerEnvironment):
    """An environment with the given numbers of training and held-out questions, repeated forever or drawn once."""

    def __init__(self, training, held_out, forever=True, name="few"):
        super().__init__(LedgerOptions())
        names = (f"{name} {number}" for number in itertools.count())
        found = {split: [] for split in Split}
        while len(found[Split.TRAIN]) < training or len(found[Split.EVAL]) < held_out:
            asks = next(names)
            found[split_of(asks)].append(asks)
        self.asked = [*found[Split.TRAIN][:training], *found[Split.EVAL][:held_out]]
        self.forever = forever

    def tasks(self, query):
        drafts = [TaskDraft(json.dumps(asks), asks, 3) for asks in self.asked]
        return itertools.cycle(drafts) if self.forever else iter(drafts)


def source_of(*environments, feed=FEED, run=RUN, **entries):
    opened = [
        (EnvironmentEntry(name=f"e{n}", **{k: v[n] for k, v in entries.items()}), environment)
        for n, environment in enumerate(environments)
    ]
    return TaskSource(opened, run, feed)


def drawn(source, count, start=0):
    return [source.task(TaskName("run", Stage.TRAIN, 0, index), 0, 0) for index in range(start, start + count)]


def evaluated(source, count):
    return [source.task(TaskName("run", Stage.EVAL_BEFORE, 0, index), 0, 0) for index in range(count)]


def test_a_payload_that_does_not_fit_into_a_record_is_refused_by_name(monkeypatch):
    source = source_of(Few(4, 8))
    monkeypatch.setattr(Questions, "unused", lambda _questions: TaskDraft("x" * 900_001, "asks"))
    with pytest.raises(TaskError, match=r"^e0: the payload of a task has 900001 bytes, .* room for 900000"):
        drawn(source, 1)


def test_an_environment_for_practice_is_never_evaluated():
    source = source_of(Few(8, 8), Few(8, 0, name="practice"), evaluate=[True, False])
    assert [task.environment for task in drawn(source, 4)] == ["e0", "e1", "e0", "e1"]
    assert [task.environment for task in evaluated(source, FEED.eval_tasks)] == ["e0"] * FEED.eval_tasks
    with pytest.raises(ValidationError, match="no environment is evaluated"):
        RunSettings(environments=[EnvironmentEntry(name="ledger", evaluate=False)])


@given(st.integers(2, 12))
def test_the_run_sets_the_share_of_held_out_questions(one_in):
    questions = Few(350, 50)
    sides = {asks: split_of(asks, one_in) for asks in questions.asked}
    held_out = sum(side is Split.EVAL for side in sides.values())
    feed = FEED.model_copy(update={"eval_tasks": held_out, "eval_during_tasks": 1})
    source = source_of(questions, feed=feed, run=RUN.model_copy(update={"held_out_one_in": one_in}))
    asked = {json.loads(task.payload) for task in drawn(source, len(sides) - held_out)}
    assert asked == {asks for asks, side in sides.items() if side is Split.TRAIN}
    assert len({task.payload for task in evaluated(source, held_out)}) == held_out


@pytest.mark.parametrize("forever", [True, False])
def test_a_source_without_more_questions_raises_an_error(forever):
    source = source_of(Few(5, 3, forever))
    assert len({task.payload for task in drawn(source, 5)}) == 5
    with pytest.raises(TaskError, match=r"no unused training question left after 5.*feed.epochs"):
        drawn(source, 1, 5)
    with pytest.raises(TaskError, match="e0 has 2 held-out questions"):
        source_of(Few(5, 2, forever))


def test_only_evaluations_of_the_run_need_held_out_questions():
    def source(held_out, **feed):
        return source_of(Few(5, held_out), feed=FEED.model_copy(update={"eval_during_tasks": 16, **feed}))

    source(3, eval_every=0)
    source(0, eval_every=0, eval_before=False, eval_after=False)
    with pytest.raises(TaskError, match=r"3 held-out questions.*lower feed.eval_tasks or feed.eval_during_tasks"):
        source(3, eval_every=1)
    with pytest.raises(TaskError):
        source(2, eval_every=0, eval_before=False)


@pytest.mark.parametrize("forever", [True, False])
def test_questions_are_asked_again_for_the_set_number_of_epochs(forever):
    source = source_of(Few(5, 3, forever), feed=FEED.model_copy(update={"epochs": 3}))
    tasks = drawn(source, 15)
    assert [Counter(task.payload for task in tasks[:n]).most_common()[0][1] for n in (5, 10, 15)] == [1, 2, 3]
    with pytest.raises(TaskError):
        drawn(source, 1, 15)
    endless = source_of(Few(5, 3, forever), feed=FEED.model_copy(update={"epochs": 0}))
    assert len(drawn(endless, 60)) == 60


@given(st.integers(0, 14), st.booleans())
def test_a_source_continues_after_a_restart_with_unused_questions(issued, forever):
    feed = FEED.model_copy(update={"epochs": 3})
    before = drawn(source_of(Few(5, 3, forever), feed=feed), issued)
    source = source_of(Few(5, 3, forever), feed=feed)
    for task in before:
        source.observe(task)
    after = drawn(source, 15 - issued, issued)
    assert set(Counter(task.payload for task in (*before, *after)).values()) == {3}


def test_a_task_that_its_own_feeder_reads_back_is_counted_once():
    source = source_of(Few(5, 3), feed=FEED.model_copy(update={"epochs": 3}))
    for index in range(15):
        (task,) = drawn(source, 1, index)
        source.observe(task)
    with pytest.raises(TaskError):
        drawn(source, 1, 15)


def times_asked(one_in: int, epochs: int) -> int:
    """Return how often a question that is always solved is asked in `epochs` epochs."""
    at, times = 0, 0
    while at < epochs:
        times += 1
        at += min(one_in**times, 16)
    return times


@given(st.integers(1, 4), st.booleans(), st.sets(st.integers(0, 5)))
def test_a_solved_question_is_left_out_of_more_and_more_epochs(one_in, forever, easy):
    feed = FEED.model_copy(update={"epochs": 0, "solved_one_in": one_in})
    questions = Few(6, 3, forever)
    source, asked = source_of(questions, feed=feed), Counter()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tidemill.producers.tasks.source.PATIENCE", 40)  # drafts; all nine occur within them
        for index in range(90):
            (task,) = drawn(source, 1, index)
            number = questions.asked.index(json.loads(task.payload))
            asked[number] += 1
            source.observe(closed(task) if number in easy else unsolved(task))
    often = [asked[number] for number in range(6) if number not in easy]
    if often:
        assert max(often) - min(often) <= 1
        assert all(abs(asked[number] - times_asked(one_in, max(often))) <= 1 for number in easy)


def test_a_question_that_is_no_longer_solved_is_asked_in_each_epoch_again():
    feed = FEED.model_copy(update={"epochs": 0, "solved_one_in": 3})
    source = source_of(Few(1, 3), Few(1, 3, name="other"), feed=feed)
    first, second = drawn(source, 2)
    left_out = []
    for number, end in enumerate((closed, closed, closed, closed, unsolved, closed), 10):
        again = replace(first, task_id=f"{RUN.run_id}/train/{number}", group_id=f"{RUN.run_id}/train/{number}")
        # A restarted feeder may read the group before its task, and the log may have a record twice.
        records = [again, end(again)][:: 1 if number % 2 else -1]
        # A rollout that comes after its group was closed has a group of its own.
        for record in (*records, *records, replace(closed(again), closed_by=CloseReason.LATE)):
            source.observe(record)
        left_out.append(source._questions[0]._left_out.total())
    assert left_out == [2, 8, 15, 15, 0, 2]
    assert source._closed == {} and list(source._issued) == [first.group_id, second.group_id], "only open groups"
    source.observe(closed(replace(second, run_id="another")))
    assert source._questions[1]._left_out.total() == 0
    half = closed(second, CloseReason.DEADLINE)
    source.observe(replace(half, members=half.members[:1]))
    assert second.group_id not in source._issued and source._questions[1]._left_out.total() == 0, "one did not arrive"


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4))
def test_environments_take_turns_by_their_weights(weights):
    turns = list(itertools.islice(take_turns(weights), 400))
    assert turns == list(itertools.islice(take_turns(weights), 400)), "the same way at every start"
    for upto in (10, 100, 400):
        counts = Counter(turns[:upto])
        assert all(abs(counts[n] - upto * weight / sum(weights)) <= len(weights) for n, weight in enumerate(weights))


def test_a_run_mixes_environments_with_their_own_sizes_and_options():
    source = source_of(Few(50, 9, name="a"), Few(50, 9, name="b"), weight=[3, 1], group_size=[None, 7], label=["", "b"])
    tasks = drawn(source, 8)
    assert Counter((task.environment, task.group_size) for task in tasks) == {("e0", 4): 6, ("b", 7): 2}
    assert all(task.options == "{}" for task in tasks)
    ledger = LedgerEnvironment(LedgerOptions(entries=2, largest=9))
    (task,) = drawn(source_of(ledger), 1)
    assert task.options == '{"entries":2,"largest":9}' and task.max_turns == 5


@pytest.mark.parametrize(
    ("entry", "error", "reason"),
    [
        (EnvironmentEntry(name="nope"), UnknownEnvironment, "unknown environment 'nope'"),
        (EnvironmentEntry(name="ledger", options={"colour": 1}), TaskError, "colour.*its options are entries"),
        (EnvironmentEntry(name="no_such_module:ENV"), UnknownEnvironment, "no_such_module"),
    ],
)
def test_unknown_environments_and_options_are_refused(entry, error, reason):
    run = RUN.model_copy(update={"environments": [entry]})
    with pytest.raises(error, match=reason):
        asyncio.run(feeder.opened(run, RolloutSettings()))


def test_two_environments_with_one_name_are_refused():
    with pytest.raises(ValueError, match="two environments are named 'ledger'"):
        RunSettings(environments=[{"name": "ledger"}, {"name": "ledger"}])
    assert len(RunSettings(environments=[{"name": "ledger"}, {"name": "ledger", "label": "hard"}]).environments) == 2


class Loop:
    """The rest of the loop on a real Kafka: closes every group, trains in order, acknowledges every version."""

    def __init__(self, kafka: KafkaSettings, run=RUN):
        self.kafka, self.run, self.tasks, self.waiting, self.steps = kafka, run, [], [], 0
        self._trainer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": kafka.topic_prefix + "run"})

    def serve(self, stop: threading.Event) -> None:
        self._trainer.init_transactions()
        with RecordProducer(self.kafka, "test-loop") as producer, LogReader(self.kafka, [Topic.TASKS]) as reader:
            producer.send_acked(Topic.MANIFESTS, [("main", manifest(0))])
            producer.send_acked(Topic.ACKS, [("a", ack(0))])
            while not stop.is_set():
                for located in reader.poll(0.05):
                    if isinstance(located.record, Task):
                        self._close(producer, located.record)

    def _close(self, producer, task) -> None:
        self.tasks.append(task)
        producer.send_acked(Topic.GROUPS, [(task.group_id, closed(task))])
        if task.mode is Mode.TRAIN:
            self.waiting.append(task.group_id)
        if len(self.waiting) == 2:
            self.steps += 1
            self._write_step(plan(self.steps, self.waiting))
            self._write_step(step(self.steps, self.waiting))
            producer.send_acked(Topic.MANIFESTS, [("main", manifest(self.steps))])
            producer.send_acked(Topic.ACKS, [("a", ack(self.steps, at=now_us()))])
            self.waiting = []

    def _write_step(self, record) -> None:
        """Write as a trainer does: in a transaction, whose marker has its own offset."""
        self._trainer.begin_transaction()
        topic = Names(self.kafka.topic_prefix).of(Topic.STEPS)
        self._trainer.produce(topic, Codec().encode(record), key=b"run")
        self._trainer.commit_transaction()


@pytest.fixture
def log(kafka) -> KafkaSettings:
    return kafka.fresh(1, feeder.TOPICS)


def poison(log: KafkaSettings) -> None:
    names = Names(log.topic_prefix)
    with RecordProducer(log, "poisoner") as producer:
        for topic in feeder.TOPICS:
            for value in (b"", b"\xc3\x01garbage", b"\x00" * 50, None):
                producer.send_bytes(names.of(topic), value, key=b"x")


PROCESS = """
import json, sys
from tidemill.producers.config import FeedSettings, RolloutSettings
from tidemill.producers.tasks import feeder
from tidemill.schemas.config import KafkaSettings, RunSettings
sections = zip((KafkaSettings, RunSettings, FeedSettings), json.loads(sys.argv[1]))
sys.exit(0 if feeder.run(*[section(**values) for section, values in sections], RolloutSettings()) else 1)
"""


def feeder_process(*sections) -> subprocess.Popen:
    document = json.dumps([section.model_dump(mode="json") for section in sections])
    return subprocess.Popen([sys.executable, "-c", PROCESS, document])


def test_a_run_whose_feeder_is_killed_anywhere_ends_and_every_task_is_issued_once(log):
    poison(log)
    run = RUN.model_copy(update={"max_steps": 8, "max_policy_lag": 2})
    # A restart on a slow machine may take as long as `FEED` allows a step; further tasks would then be issued.
    feed = FEED.model_copy(update={"deadline_s": 600, "eval_deadline_s": 600, "overdue_s": 600})
    loop, loop_stop, rng = Loop(log, run), threading.Event(), random.Random(7)
    other_side = threading.Thread(target=loop.serve, args=(loop_stop,))
    other_side.start()
    running = None
    try:
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
            running = feeder_process(log, run, feed)
            wanted = len(loop.tasks) + rng.randrange(1, 5)
            until(lambda wanted=wanted: len(loop.tasks) >= wanted, "the next tasks", pause_s=0.002)
            running.send_signal(number)
            assert running.wait(DEADLINE_S) == (1 if number == signal.SIGTERM else -number)
            poison(log)
        running = feeder_process(log, run, feed)
        assert running.wait(DEADLINE_S) == 0, "the run is over"
    finally:
        running.kill()
        running.wait()
        loop_stop.set()
        other_side.join(DEADLINE_S)
    issued = stages(loop.tasks)
    assert len(issued) == len(set(issued))
    assert {name for name in issued if name.startswith("train")} == {f"train/{i}" for i in range(16)}
    assert set(issued[:3]) == {f"eval-before/v0/{i}" for i in range(3)}
    assert set(issued[-3:]) == {f"eval-after/v8/{i}" for i in range(3)}
    assert len({task.payload for task in loop.tasks if task.mode is Mode.TRAIN}) == 16
