"""Helpers of the sink's tests: records as rows of the tables, and a small run whose numbers are known."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np

from tests.records import build, member_of
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
from tidemill.consumers.sink.rows import Row
from tidemill.consumers.sink.writer import Writer
from tidemill.schemas import records as r
from tidemill.schemas.catalogue import CATALOGUE, Names, Topic

PREFIX = "tidemill."
START_US = 1_700_000_000_000_000


def topic_of(record: object) -> Topic:
    return next(topic for topic, spec in CATALOGUE.items() if isinstance(record, spec.values))


def rows_of(records: list[Any], partition: int = 0, first: int = 0) -> list[Row]:
    """Return records as rows of their topics, with offsets from `first` within each topic."""
    reached: dict[Topic, int] = {}
    rows = []
    for record in records:
        topic = topic_of(record)
        offset = reached.setdefault(topic, first)
        reached[topic] += 1
        rows.append(Row(Names(PREFIX).of(topic), partition, offset, 1_700_000_000_123, b"key", record, 100))
    return rows


def fill(sink: SinkSettings, records: list[Any]) -> None:
    """Write records to the tables of a sink."""
    with closing(connect(sink)) as client:
        Writer(client, sink.database, sink.table_engine).write(rows_of(records), {})


def segment(versions: list[int]) -> r.Segment:
    n = 2 * len(versions)
    spans = [r.VersionSpan(version, 2 * i, 2 * i + 2) for i, version in enumerate(versions)]
    ids, mask, logprobs = np.arange(n, dtype="<u4"), np.ones(n, "u1"), np.full(n, -0.5, "<f4")
    return r.Segment(n, ids.tobytes(), mask.tobytes(), logprobs.tobytes(), spans)


def rollout(
    name: str, group: str, mode: r.Mode = r.Mode.TRAIN, versions: tuple[int, ...] = (1,), success: bool | None = True
) -> r.Rollout:
    """Return a rollout that ran in the second after START_US; `success=None` makes a failed one."""
    failed = success is None
    return build(
        r.Rollout, rollout_id=name, group_id=group, task_id=f"task-{group}", mode=mode, group_size=2,
        deadline_at=START_US + 60_000_000, status=r.RolloutStatus.FAILED if failed else r.RolloutStatus.COMPLETED,
        failure="replica gone" if failed else "", segments=[] if failed else [segment(list(versions))],
        reward=None if failed else float(success or False), success=success, turns=1, prompt_tokens=3,
        sampled_tokens=2 * len(versions), version_min=min(versions), version_max=max(versions),
        replica_id="replica-0", worker_id="worker", started_at=START_US, finished_at=START_US + 1_000_000,
    )  # fmt: skip


def group(name: str, members: list[r.Rollout]) -> r.Group:
    return build(
        r.Group, group_id=name, task_id=f"task-{name}", mode=members[0].mode, closed_by=r.CloseReason.SIZE,
        expected_size=2, mean_reward=0.5, opened_at=START_US, closed_at=START_US + 1_500_000,
        members=[member_of(m, offset=i, advantage=m.reward, sampled_tokens=2) for i, m in enumerate(members)],
    )  # fmt: skip


def task(name: str, mode: r.Mode) -> r.Task:
    return r.Task(
        f"task-{name}", name, "run", "ledger", "{}", mode, 2, 4, 0, START_US, START_US + 60_000_000, issued_version=0
    )


def step(number: int, inputs: list[r.StepInput], exclusions: list[r.StepExclusion]) -> r.TrainStep:
    """Return a step that ran from 0.5 to 1.5 seconds after START_US."""
    return build(
        r.TrainStep, step=number, inputs=inputs, exclusions=exclusions, config_hash="c", objective="composer2",
        learning_rate=0.001, metrics={"policy_lag_bound": 4.0}, lag=[r.LagCount(0, 30), r.LagCount(2, 10)], rollouts=2,
        tokens=40, fingerprint="f", parent_fingerprint="e", started_at=START_US + 500_000,
        finished_at=START_US + 1_500_000,
    )  # fmt: skip


def manifest(version: int) -> r.Manifest:
    tensors = [r.TensorInfo("w", "bfloat16", [2, 3], "ab")]
    shards = [r.ShardPosition(0, "weights.deltas", 0, [0, 1], 20, "d")]
    return build(
        r.Manifest, version=version, parent=version - 1, learning_rate=0.001, n_elements=1000, n_changed=100,
        delta_bytes=300, shards=shards, tensors=tensors, fingerprint="f", trained_at=START_US, published_at=START_US,
    )  # fmt: skip


def ack(version: int, status: r.AckStatus) -> r.WeightAck:
    proved = status is r.AckStatus.PROVED
    return build(
        r.WeightAck, replica_id="replica-0", incarnation="i", pid=7, version=version,
        serving_version=version if proved else version - 1, status=status, reason="" if proved else "digest",
        fingerprint="f", expected_fingerprint="f", fetch_ms=1.0, decode_ms=1.0, pause_ms=4.0, apply_ms=1.0,
        proof_ms=1.0, step_to_served_ms=2000.0, decode_step_ms=1.0, requests_in_flight=1, at=START_US,
    )  # fmt: skip


def small_run() -> list[Any]:
    """Two trained rollouts (one over two versions), an excluded group, and a failed, an open and a held-out rollout."""
    trained = [rollout("a", "g0"), rollout("b", "g0", versions=(1, 2), success=False)]
    excluded = [rollout("c", "g1"), rollout("d", "g1", success=None)]
    held_out = [rollout("e", "g2", r.Mode.EVAL, versions=(1,))]
    return [
        *(task(name, r.Mode.EVAL if name == "g2" else r.Mode.TRAIN) for name in ("g0", "g1", "g2")),
        *trained,
        *excluded,
        *held_out,
        rollout("f", "g3"),
        group("g0", trained),
        group("g1", excluded),
        group("g2", held_out),
        step(
            1,
            [r.StepInput("g0", "groups", 0, 0)],
            [r.StepExclusion("g1", "groups", 0, 1, "stale", 2), r.StepExclusion("g2", "groups", 0, 2, "eval", 1)],
        ),
        manifest(1),
        ack(1, r.AckStatus.PROVED),
        ack(2, r.AckStatus.REFUSED),
    ]
