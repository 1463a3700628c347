"""Admission control: the formula, its independence of order and repeats, and the bound on policy lag."""

from __future__ import annotations

import pickle
import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import build
from tidemill.producers.config import FeedSettings
from tidemill.producers.tasks.admission import AdmissionController, trainable
from tidemill.producers.tasks.source import IndexSet
from tidemill.schemas.config import RunSettings
from tidemill.schemas.records import (
    AckStatus,
    CloseReason,
    Group,
    GroupMember,
    Mode,
    Record,
    RolloutStatus,
    StepExclusion,
    StepInput,
    Task,
    TrainStep,
    WeightAck,
)

SECOND = 1_000_000


def new(replicas=1, **run) -> AdmissionController:
    limits = {"run_id": "run", "groups_per_step": 2, "max_policy_lag": 1, "max_steps": 1000, **run}
    feed = FeedSettings(replicas=replicas, replica_silence_s=10, overdue_s=5)
    return AdmissionController(RunSettings(**limits), feed)


def task(index, mode=Mode.TRAIN, deadline_at=100 * SECOND) -> Task:
    name = f"run/{mode}/{index}"
    return build(Task, task_id=name, mode=mode, group_size=4, max_turns=5, deadline_at=deadline_at)


def member(reward, version=0) -> GroupMember:
    status = RolloutStatus.FAILED if reward is None else RolloutStatus.COMPLETED
    return build(GroupMember, rollout_id="r", topic="rollouts", status=status, reward=reward, sampled_tokens=1,
                 version_min=version, version_max=version)  # fmt: skip


def group(index, rewards=(1.0, 0.1), closed_by=CloseReason.SIZE, mode=Mode.TRAIN, version=0) -> Group:
    members = [member(reward, version) for reward in rewards]
    name = f"run/{mode}/{index}"
    return build(Group, group_id=name, mode=mode, closed_by=closed_by, members=members, mean_reward=0.0)


def step(number, trained=(), excluded=()) -> TrainStep:
    inputs = [StepInput(f"run/train/{i}", "groups", 0, i) for i in trained]
    exclusions = [StepExclusion(name, "groups", 0, 0, reason, 4) for name, reason in excluded]
    return build(TrainStep, step=number, inputs=inputs, exclusions=exclusions)


def ack(version, replica="a", at=0, status=AckStatus.PROVED) -> WeightAck:
    return build(WeightAck, replica_id=replica, region="", incarnation="i", version=version, status=status, at=at)


def controller(**changes) -> AdmissionController:
    made = new(**changes)
    for replica in range(changes.get("replicas", 1)):
        made.observe(ack(0, replica="abc"[replica]))
    return made


def after(made: AdmissionController, record: Record) -> int:
    """Return the capacity after a record is observed."""
    made.observe(record)
    return made.capacity()


def test_nothing_is_issued_before_enough_replicas_serve():
    made = new(replicas=2)
    assert after(made, ack(0, "a")) == 0
    assert after(made, ack(-1, "b", status=AckStatus.REFUSED)) == 0
    assert after(made, ack(0, "b", at=1)) == 4


def test_capacity_is_the_formula():
    made = controller()
    assert made.capacity() == 4
    assert [after(made, task(i)) for i in range(5)] == [3, 2, 1, 0, 0]


def test_a_trained_group_frees_its_place_when_its_version_is_served():
    made = controller()
    for i in range(4):
        made.observe(task(i))
    assert after(made, step(1, trained=[0, 1])) == 0
    assert made.untrained == 2
    assert after(made, ack(1, at=1)) == 2


def test_every_replica_must_serve_the_version():
    made = controller(replicas=2)
    for i in range(4):
        made.observe(task(i))
    made.observe(step(1, trained=[0, 1]))
    assert after(made, ack(1, "a", at=1)) == 0
    assert after(made, ack(1, "b", at=2)) == 2


def test_a_refused_version_frees_nothing_and_an_anchored_one_does():
    made = controller()
    for i in range(4):
        made.observe(task(i))
    made.observe(step(1, trained=[0, 1]))
    refused = ack(0, at=1, status=AckStatus.REFUSED)
    assert after(made, refused) == 0
    assert after(made, ack(1, at=2, status=AckStatus.ANCHORED)) == 2


def test_excluded_groups_free_their_place_at_once_and_stragglers_free_none():
    made = controller()
    for i in range(4):
        made.observe(task(i))
    excluded = [("run/train/2", "stale"), ("run/train/3", "late"), ("run/train/1", "duplicate"), ("run/eval/0", "eval")]
    assert after(made, step(1, trained=[0, 1], excluded=excluded)) == 1


@pytest.mark.parametrize("step_first", [True, False])
def test_a_group_that_the_trainer_will_find_stale_frees_its_place_before_that_is_recorded(step_first):
    made = controller()
    for i in range(4):
        made.observe(task(i))
    records = [group(2, version=0), group(3, version=1)]
    steps = [step(1, trained=[0]), step(2, trained=[1])]
    for record in [*steps, *records] if step_first else [*records, *steps]:
        made.observe(record)
    assert made.untrained == 1
    assert after(made, ack(2, at=1)) == 3
    made.observe(step(3, excluded=[("run/train/2", "stale"), ("run/train/3", "stale")]))
    assert made.untrained == 0


def test_groups_that_the_trainer_could_not_use_do_not_wedge_the_run():
    made = controller()
    for i in range(4):
        made.observe(task(i))
        made.observe(group(i))
    made.expire(4 * SECOND)
    assert made.capacity() == 0
    made.expire(6 * SECOND)
    assert made.capacity() == 2
    made.observe(task(4))
    made.observe(task(5))
    made.expire(60 * SECOND)
    assert made.capacity() == 0
    missing = [(f"run/train/{i}", "missing_rollout") for i in range(3)]
    assert after(made, step(1, trained=[3, 4], excluded=missing)) == 1
    assert after(made, ack(1, at=1)) == 3


def test_evaluation_uses_no_capacity():
    made = controller()
    assert after(made, task(0, Mode.EVAL)) == 4
    assert after(made, group(0, rewards=(), mode=Mode.EVAL)) == 4


@pytest.mark.parametrize(
    ("closed", "capacity"),
    [
        (group(0), 3),
        (group(0, rewards=(0.0, 0.0)), 4),
        (group(0, rewards=(None, None), closed_by=CloseReason.DEADLINE), 4),
        (group(0, rewards=(0.0,), closed_by=CloseReason.LATE), 3),
    ],
)
def test_a_group_without_signal_frees_its_place_when_it_closes(closed, capacity):
    made = controller()
    made.observe(task(0))
    assert after(made, closed) == capacity


@pytest.mark.parametrize(
    ("rewards", "min_completed", "skip_no_signal", "expected"),
    [
        ((1.1, 0.1), 2, True, True),
        ((1.1,) * 16, 2, True, False),
        ((1.1,) * 16, 2, False, True),
        ((1.1, None), 2, False, False),
        ((1.1, 0.1, None), 3, True, False),
        ((None, None), 1, True, False),
        ((), 1, True, False),
    ],
)
def test_what_the_trainer_can_train_on(rewards, min_completed, skip_no_signal, expected):
    rules = RunSettings(min_completed=min_completed, skip_no_signal=skip_no_signal)
    assert trainable(group(0, rewards), rules) is expected


def test_no_more_is_issued_than_the_last_steps_need():
    made = controller(max_steps=2, max_policy_lag=4)
    assert made.capacity() == 4
    for i in range(4):
        made.observe(task(i))
    made.observe(step(1, trained=[0, 1]))
    assert after(made, ack(1, at=1)) == 0
    assert after(made, group(2, rewards=(0.0,))) == 1
    made.observe(step(2, trained=[3, 4]))
    assert (made.finished, made.capacity()) == (True, 0)


def test_a_group_that_did_not_close_by_its_deadline_frees_its_place():
    made = controller()
    made.observe(task(0, deadline_at=100 * SECOND))
    made.observe(task(1, deadline_at=100 * SECOND))
    made.observe(group(1))
    assert made.expire(104 * SECOND) == ([], [])
    assert made.expire(106 * SECOND) == (["run/train/0"], [])
    assert made.capacity() == 3, "the closed one waits for the trainer, however long"


def test_admission_does_not_wait_for_a_silent_replica_behind_the_others():
    made = controller(replicas=2)
    for i in range(4):
        made.observe(task(i))
    made.observe(step(1, trained=[0, 1]))
    made.observe(ack(1, "a", at=20 * SECOND))
    assert made.expire(29 * SECOND)[1] == []
    assert made.expire(31 * SECOND)[1] == ["b"]
    assert made.capacity() == 2
    assert after(made, ack(0, "b", at=32 * SECOND)) == 2
    assert made.served_version == 0, "it counts again when it speaks again"


def test_admission_waits_for_a_single_replica():
    made = controller()
    made.observe(task(0))
    made.observe(step(1, trained=[0]))
    assert made.expire(10_000 * SECOND)[1] == []
    assert made.served_version == 0


def test_the_state_does_not_grow_with_the_run():
    """The ends of 2,000 groups need no more memory than those of 200, except for the digits of their numbers."""
    made, sizes = controller(max_steps=2_000), []
    batch_of_users = StepInput("batch-1", "online-batches", 0, 0)
    not_groups = [StepExclusion("user-1", "interactions", 0, 0, "erased", 1)]
    not_groups.append(StepExclusion("run/eval-during/v1/1", "groups", 0, 0, "eval", 2))
    for number in range(1, 1_001):
        first, second = 2 * number - 2, 2 * number - 1
        for index in (first, second):
            made.observe(task(index))
            made.observe(group(index, version=number - 1))
        done = step(number, trained=[second], excluded=[(f"run/train/{first}", "missing_rollout")])
        users = [replace(entry, group_id=f"{entry.group_id}-{number}") for entry in not_groups]
        done = replace(
            done,
            inputs=[*done.inputs, replace(batch_of_users, group_id=f"batch-{number}")],
            exclusions=[*done.exclusions, *users],
        )
        made.observe(done)
        assert after(made, ack(number, at=number)) == 4
        if number in (100, 1_000):
            sizes.append(len(pickle.dumps(made)))
    assert (made.steps, made.untrained, made.unclosed) == (1_000, 0, 0)
    assert sizes[1] < sizes[0] + 50
    assert after(made, task(7)) == 4, "a repeated record of a group that has ended uses no capacity"
    assert after(made, build(Task, task_id="a task of another program", mode=Mode.TRAIN)) == 3


@given(st.lists(st.integers(0, 30)))
def test_an_index_set_is_a_set(added):
    made, plain = IndexSet(), set()
    for index in added:
        made.add(index)
        plain.add(index)
        assert [index for index in range(40) if index in made] == sorted(plain) and len(made) == len(plain)
        assert made.first_missing == min(set(range(40)) - plain)


RECORDS = [
    *(task(i) for i in range(6)),
    *(group(i) for i in range(6)),
    group(4, rewards=(0.0,)),
    group(5, closed_by=CloseReason.LATE, rewards=(0.0,)),
    step(1, trained=[0, 1], excluded=[("run/train/5", "stale")]),
    step(2, trained=[2, 3]),
    ack(1, at=10),
    ack(0, "b", at=11),
    ack(1, "b", at=12),
]


@given(st.permutations(RECORDS), st.lists(st.sampled_from(RECORDS)))
def test_order_and_repeats_do_not_matter(ordered, repeated):
    straight, shuffled = new(max_policy_lag=4), new(max_policy_lag=4)
    for record in RECORDS:
        straight.observe(record)
    for record in [*ordered, *repeated]:
        shuffled.observe(record)
    for view in ("unclosed", "untrained", "steps", "newest_version", "served_version"):
        assert getattr(straight, view) == getattr(shuffled, view)
    assert straight.capacity() == shuffled.capacity() == 8


@given(
    seed=st.integers(0, 2**32),
    groups_per_step=st.integers(1, 5),
    max_policy_lag=st.integers(0, 4),
    serve_chance=st.sampled_from([0.05, 0.5, 1.0]),
)
def test_trained_in_order_no_token_is_older_than_the_bound(seed, groups_per_step, max_policy_lag, serve_chance):
    """The purpose of admission: trained in the order issued, lag never exceeds eta, also if serving is slow."""
    rng = random.Random(seed)
    made = controller(groups_per_step=groups_per_step, max_policy_lag=max_policy_lag)
    queue: deque[tuple[int, int]] = deque()
    trained = served = issued = at = 0
    while at < 200 or (trained < 2 and at < 10_000):  # chance may serve the first version late
        at += 1
        for _ in range(made.capacity()):
            made.observe(task(issued))
            queue.append((issued, served))
            issued += 1
        if len(queue) >= groups_per_step and rng.random() < 0.5:
            batch = [queue.popleft() for _ in range(groups_per_step)]
            assert all(trained - version <= max_policy_lag for _, version in batch)
            trained += 1
            made.observe(step(trained, trained=[index for index, _ in batch]))
        if served < trained and rng.random() < serve_chance:
            served += 1
            made.observe(ack(served, at=at))
    assert trained > 1, "the loop runs"
