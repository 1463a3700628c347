"""Helpers of the sink's tests: generated records of every type, and a small run whose numbers are known."""

from __future__ import annotations

from contextlib import closing
from dataclasses import fields
from typing import Any, get_type_hints

import numpy as np
from hypothesis import strategies as st

from tests.records import build, member_of
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
from tidemill.consumers.sink.rows import Row
from tidemill.consumers.sink.writer import Writer
from tidemill.schemas import records as r
from tidemill.schemas.catalogue import CATALOGUE, Names, Topic

PREFIX = "tidemill."
START_US = 1_700_000_000_000_000
TIMES = st.integers(0, 4_000_000_000_000_000)
INTEGERS = st.integers(-(2**62), 2**62)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
PACKED = {"token_ids": "<u4", "loss_mask": "u1", "logprobs": "<f4"}
SCALARS: dict[Any, st.SearchStrategy[Any]] = {int: INTEGERS, float: FLOATS, str: TEXTS}


@st.composite
def segments(draw: st.DrawFn) -> r.Segment:
    n = draw(st.integers(0, 40))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    return r.Segment(
        n_tokens=n,
        token_ids=generator.integers(0, 2**32, n, dtype=np.uint32).astype("<u4").tobytes(),
        loss_mask=generator.integers(0, 2, n, dtype=np.uint8).tobytes(),
        logprobs=generator.normal(size=n).astype("<f4").tobytes(),
        spans=draw(st.lists(generated(r.VersionSpan), max_size=3)),
    )


def strategy_of(name: str, hint: Any) -> st.SearchStrategy[Any]:
    if name in PACKED and hint is bytes:
        # Arbitrary bytes would sometimes be a NaN, which is not equal to itself.
        return st.lists(st.integers(0, 2**20), max_size=20).map(lambda n: np.array(n, PACKED[name]).tobytes())
    if name == "at" or name.endswith("_at"):
        return TIMES
    if hint in SCALARS:
        return SCALARS[hint]
    if hint is r.Segment:
        return segments()
    if getattr(hint, "__origin__", None) is list:
        return st.lists(strategy_of("", hint.__args__[0]), max_size=4)
    if type(None) in getattr(hint, "__args__", ()):
        return st.none() | strategy_of(name, hint.__args__[0])
    if hasattr(hint, "__dataclass_fields__"):
        return generated(hint)
    return st.from_type(hint).filter(_storable)


def _storable(value: Any) -> bool:
    entries = value.items() if isinstance(value, dict) else []
    return all(name.isascii() and abs(number) < 2.0**62 for name, number in entries)


def generated(cls: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(cls, **{f.name: strategy_of(f.name, hints[f.name]) for f in fields(cls)})


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
