"""A log for trainers: writes their input as other roles do, and reads the records that trainers wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from tests.documents import wait_for_ends
from tests.records import build, member_of
from tests.trainer.conftest import make_group, make_interaction, make_online_batch, make_online_member, make_rollout
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import (
    GateDecision,
    GateVerdict,
    Manifest,
    Mismatch,
    OnlineBatch,
    Rollout,
    Staleness,
    StepPlan,
    TrainStep,
    UserRequest,
    UserWish,
)

OfRun = TypeVar("OfRun", Manifest, Mismatch, Staleness, StepPlan, TrainStep)
TOPICS = {
    Manifest: Topic.MANIFESTS,
    Mismatch: Topic.MISMATCH,
    Staleness: Topic.STALENESS,
    StepPlan: Topic.STEPS,
    TrainStep: Topic.STEPS,
}
REWARDS = (1.0, 0.0, 0.5, 1.0)


class Killed(Exception):
    """Simulates that the process is killed at this point."""


def run_of(run_id: str = "run", max_steps: int = 100, **changes: object) -> RunSettings:
    """Return settings of a run that trains two groups per step."""
    given = {"seed": 7, "groups_per_step": 2, "max_policy_lag": 10} | changes
    return RunSettings(run_id=run_id, max_steps=max_steps, **given)


def write_group(
    producer: RecordProducer, rollouts: Sequence[Rollout], run_ids: Iterable[str] = ("run",), **changes: object
) -> None:
    """Write rollouts, then their group for each run, as the rollout workers and group assembly write them."""
    name = rollouts[0].group_id
    places = producer.send_acked(Topic.ROLLOUTS, [(name, rollout) for rollout in rollouts])
    members = [member_of(r, p.partition, p.offset) for r, p in zip(rollouts, places, strict=True)]
    groups = [make_group(name, members, run_id=run_id, **changes) for run_id in run_ids]
    producer.send_acked(Topic.GROUPS, [(name, group) for group in groups])


def write_groups(log: KafkaSettings, numbers: Iterable[int], run_ids: Iterable[str] = ("run",), size: int = 4) -> None:
    """Write groups that can be trained on; each is named after its number, which is also its closing time."""
    with RecordProducer(log, "test") as producer:
        for number in numbers:
            rollouts = [make_rollout(f"g{number}", i, float(i % 2)) for i in range(size)]
            write_group(producer, rollouts, run_ids, closed_at=number)


def serve(
    log: KafkaSettings, name: str, version: int, rewards: tuple[float, ...] = REWARDS, run_id: str = "run",
    **changes: object,
) -> OnlineBatch:  # fmt: skip
    """Write interactions and their online batch, as the router and the stream of online batches write them."""
    served = [make_interaction(f"{name}-{i}", version, run_id=run_id) for i in range(len(rewards))]
    with RecordProducer(log, "test") as producer:
        places = producer.send_acked(Topic.INTERACTIONS, [(r.interaction_id, r) for r in served])
        members = [make_online_member(r, reward, p.offset, p.partition)
                   for r, reward, p in zip(served, rewards, places, strict=True)]  # fmt: skip
        batch = make_online_batch(name, members, version, run_id=run_id, **changes)
        producer.send_acked(Topic.ONLINE_BATCHES, [(name, batch)])
    return batch


def decide(log: KafkaSettings, verdict: GateVerdict, version: int, run_id: str = "run") -> None:
    """Write the gate's decision on a version of a run."""
    with RecordProducer(log, "test") as producer:
        said = build(GateDecision, run_id=run_id, verdict=verdict, version=version, decided_by="test")
        producer.send_acked(Topic.GATE, [("main", said)])


def erase(log: KafkaSettings, user_id: str) -> None:
    """Write the request of a user to erase all their data."""
    with RecordProducer(log, "test") as producer:
        producer.send_acked(
            Topic.USER_REQUESTS, [(user_id, UserRequest("request", user_id, UserWish.ERASE, "", 10**9))]
        )


def written(log: KafkaSettings, kind: type[OfRun], run_id: str = "run") -> list[OfRun]:
    """Read the records of one type that trainers of a run have written."""
    wait_for_ends(log, TOPICS[kind])
    with LogReader(log, [TOPICS[kind]]) as reader:
        found = [located.record for located in reader.read_to_end()]
    return [record for record in found if isinstance(record, kind) and record.run_id == run_id]
