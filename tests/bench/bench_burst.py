"""Memory under a burst: peak memory of each role while it processes a backlog, and one ten and thirty times as long.

The log already contains the backlog when the role starts. The figure is the peak of the role's resident memory (VmHWM)
after the backlog, minus the peak of the same role on a few records. If ten times the backlog takes more memory than the
backlog, the thirty-fold backlog shows whether the memory is bounded or keeps growing. The output is one JSON line for
each role, and one line with the cost of a stopped sink for the writers:

    python tests/bench/bench_burst.py --bootstrap HOST:PORT [--megabytes 32] [--factors 10 30] [--role sink]

The bounds are settings: `kafka.read_ahead_bytes`, `stream.buffer_records`, `sink.flush_bytes`,
`trainer.read_ahead_bytes` and `trainer.max_waiting_batches`. The bench sets them low, so that a short backlog is far
above them. The feeder's backlog is the history of a run. It reads all of it and keeps only names.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "streams"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from join_support import feedback, interaction
from measuring import peak_bytes
from stream_support import RUN_ID, fresh_topics, rollout, stream_process

from tests.consumers.product_support import interaction as answer
from tests.consumers.product_support import outcome
from tests.consumers.sink_support import ack, manifest, step
from tests.records import member_of
from tests.trainer.conftest import make_group, make_rollout, make_segment, tiny_model
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.query import ask, read_state
from tidemill.schemas.catalogue import Topic, feedback_key
from tidemill.schemas.clock import now_us, to_ms
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.producer import RecordProducer, partition_of
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import AckStatus, Group, Mode, Segment, StepInput, Task, VersionSpan
from tidemill.streams.config import ProcessorName

PARTITIONS = 2
TOKENS = 7_000
RECORD_BYTES = 9 * TOKENS
READ_AHEAD = 8 * 2**20
NOISE = 2**20
"""Difference between the peaks of one role on one backlog, in bytes."""
SECOND_US = 1_000_000
DEADLINE_S = 240.0
JOIN: dict[str, Any] = {
    "map": {"rules": {"thumb": {"horizon_s": 60, "weight": 1.0}}},
    "settle_s": 0.0,
    "grace_s": 5.0,
    "early_wait_s": 30.0,
    "late_s": 300.0,
    "done_ttl_s": 100.0,
    "bot_max_events": 1_000_000,
}
"""Event times short enough for a bench; the state covers a hundred seconds."""
BATCHES = {"min_members": 8, "max_members": 8, "done_ttl_s": 100.0}
"""As many members as `BATCH_MEMBERS`; the state covers a hundred seconds."""
HANDFUL = 8
SINK = """
import json, sys
from tidemill.consumers.sink import run
from tidemill.consumers.sink.config import SinkSettings
from tidemill.schemas.config import KafkaSettings, RunSettings
kafka, sink = json.loads(sys.argv[1])
run(KafkaSettings(**kafka), RunSettings(), SinkSettings(**sink))
"""
READER = """
import json, sys
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.reader import LogReader
with LogReader(KafkaSettings(**json.loads(sys.argv[1])), [Topic.ROLLOUTS]) as reader:
    print(sum(1 for _ in reader.read_to_end(200)), flush=True)
    sys.stdin.read()
"""
TRAINER = """
import json, sys, threading
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.run import run
kafka, of, store, trainer = json.loads(sys.argv[1])
run(KafkaSettings(**kafka), RunSettings(**of), StoreSettings(root=store), TrainerSettings(**trainer), threading.Event())
print("done", flush=True)
sys.stdin.read()
"""
FEEDER = """
import json, sys, threading
from tidemill.producers.config import FeedSettings, RolloutSettings
from tidemill.producers.tasks.feeder import run
from tidemill.schemas.config import KafkaSettings, RunSettings
kafka, of, feed = json.loads(sys.argv[1])
assert run(KafkaSettings(**kafka), RunSettings(**of), FeedSettings(**feed), RolloutSettings(), threading.Event())
print("done", flush=True)
sys.stdin.read()
"""
STEP_GROUPS = 8
"""Groups of a step in the feeder's history."""
GROUP_ROLLOUTS = 2
"""Rollouts of a group in the trainer's backlog."""
TRAINED_TOKENS = 1_000
BATCH_MEMBERS = 8
TRAINER_STEPS = 6
Work = Callable[[KafkaSettings, int, Path], int]
"""Processes a backlog of this many records in an empty directory and returns the role's peak in bytes."""


@dataclass(frozen=True, slots=True)
class Role:
    """A role and the backlog that it processes."""

    work: Work
    per_megabyte: float = 2**20 / RECORD_BYTES
    """Records for each megabyte of `--megabytes`. For small records, fewer than would fit into a megabyte."""
    handful: int = HANDFUL


def main() -> None:
    """Measure the roles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", default=os.environ.get("TIDEMILL_KAFKA__BOOTSTRAP"))
    parser.add_argument("--megabytes", type=int, default=32, help="the shorter backlog")
    parser.add_argument("--factors", type=int, nargs="+", default=[10, 30], help="how much longer the others are")
    parser.add_argument("--role", choices=[*ROLES, "slow-sink"], action="append", help="only these; repeat")
    options = parser.parse_args()
    if not options.bootstrap:
        parser.error("give --bootstrap HOST:PORT or set TIDEMILL_KAFKA__BOOTSTRAP")
    for name in options.role or [*ROLES, "slow-sink"]:
        figures = slow_sink(options.bootstrap) if name == "slow-sink" else burst(ROLES[name], options)
        print(json.dumps({"figure": f"burst.{name}", **figures}), flush=True)


def burst(role: Role, options: argparse.Namespace) -> dict[str, Any]:
    """Return the peaks of one role in MiB: on a few records, and the increase for each backlog, also as a ratio to the
    next shorter backlog."""
    plain = int(options.megabytes * role.per_megabyte)
    counts = [plain, *(factor * plain for factor in options.factors)]
    base, *peaks = (peak(role, options.bootstrap, count) for count in (role.handful, *counts))
    return {
        "records": counts,
        "base_mb": round(base / 2**20, 1),
        "above_base_mb": [round((found - base) / 2**20, 1) for found in peaks],
        "ratios": ratios([found - base for found in peaks]),
        "ratios_with_base": ratios(peaks),
    }


def ratios(peaks: Sequence[int]) -> list[float | None]:
    """Return the ratio of each peak to the one before it; None if that one is too small to compare."""
    return [round(longer / shorter, 2) if shorter >= NOISE else None for shorter, longer in pairwise(peaks)]


def peak(role: Role, bootstrap: str, count: int) -> int:
    """Return the peak of a role that starts with `count` records in the log, in bytes."""
    kafka = fresh_topics(bootstrap, f"burst-{uuid.uuid4().hex[:8]}.", PARTITIONS)
    kafka = kafka.model_copy(update={"read_ahead_bytes": READ_AHEAD, "write_ahead_bytes": READ_AHEAD})
    with tempfile.TemporaryDirectory() as directory:
        return role.work(kafka, count, Path(directory))


def segment(number: int) -> Segment:
    """Make tokens that do not compress."""
    generator = np.random.default_rng(number)
    ids = generator.integers(0, 2**32, TOKENS, dtype=np.uint32).astype("<u4").tobytes()
    return Segment(TOKENS, ids, b"\x01" * TOKENS, ids, [VersionSpan(1, 0, TOKENS)])


def write_rollouts(kafka: KafkaSettings, numbers: range) -> None:
    """Write groups of one rollout, a second of event time apart, so that a longer backlog needs no larger state."""
    begun = now_us() - len(numbers) * SECOND_US
    with RecordProducer(kafka, "bench") as producer:
        for place, number in enumerate(numbers):
            made = rollout(f"g{number}", 0, group_size=1, segments=[segment(number)])
            producer.send(Topic.ROLLOUTS, made, key=made.group_id, timestamp_ms=to_ms(begun + place * SECOND_US))


def write_interactions(kafka: KafkaSettings, count: int) -> None:
    """Write answers, a second of event time apart, and thumbs: one topic is a thousand times denser than the other."""
    begun = now_us() - (count + 60) * SECOND_US
    with RecordProducer(kafka, "bench") as producer:
        for number in range(count):
            name, at = f"i{number}", begun + number * SECOND_US
            made = interaction(name, served_at=at, user_id=f"u{number % 50}", segments=[segment(number)])
            vote = feedback(name, "vote", user_id=made.user_id, observed_at=at)
            partition, ms = partition_of(name, PARTITIONS), to_ms(at)
            producer.send(Topic.INTERACTIONS, made, key=name, partition=partition, timestamp_ms=ms)
            producer.send(
                Topic.FEEDBACK, vote, key=feedback_key(name, "vote"), partition=partition, timestamp_ms=ms
            )  # fmt: skip


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[Any] | None) -> None:
    """Wait until the condition is true. Raises TimeoutError if the process ends or the deadline passes before."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if process is None or process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError("the role ended, or did not work its backlog off in time")
        time.sleep(0.05)


def of_stream(processor: ProcessorName, output: Topic, kafka: KafkaSettings, count: int, directory: Path) -> int:
    """Run a stream worker until it has written this many outputs, and return its peak."""
    seen: set[bytes | None] = set()
    rules = {"join": JOIN, "batches": BATCHES}
    options: dict[str, Any] = {"buffer_records": 100, "max_batch": 50, "done_ttl_s": 60.0}
    with LogReader(kafka, [output]) as reader, stream_process(
        kafka, directory, processor=processor, rules=rules, **options
    ) as worker:  # fmt: skip

        def done() -> bool:
            seen.update(located.key for located in reader.poll(0.1))
            return len(seen) >= count

        wait_for(done, worker.process)
        assert worker.process is not None
        return peak_bytes(worker.process.pid)


def of_assembly(kafka: KafkaSettings, count: int, directory: Path) -> int:
    """Measure group assembly."""
    write_rollouts(kafka, range(count))
    return of_stream(ProcessorName.ASSEMBLY, Topic.GROUPS, kafka, count, directory)


def of_join(kafka: KafkaSettings, count: int, directory: Path) -> int:
    """Measure the feedback join."""
    write_interactions(kafka, count)
    return of_stream(ProcessorName.JOIN, Topic.OUTCOMES, kafka, count, directory)


def of_batches(kafka: KafkaSettings, count: int, directory: Path) -> int:
    """Measure online batches, on outcomes one second of event time apart."""
    begun = now_us() - count * SECOND_US
    with RecordProducer(kafka, "bench") as producer:
        for number in range(count):
            at = begun + number * SECOND_US
            served = replace(answer(f"i{number}", f"u{number % 50}", served_at=at), run_id=RUN_ID)
            producer.send(Topic.OUTCOMES, outcome(served, 1.0), key=served.interaction_id, timestamp_ms=to_ms(at))
    return of_stream(ProcessorName.BATCHES, Topic.ONLINE_BATCHES, kafka, count // BATCH_MEMBERS, directory)


def of_feeder(kafka: KafkaSettings, count: int, _directory: Path) -> int:
    """Measure the task feeder on the history of a finished run of this many groups."""
    steps = count // STEP_GROUPS
    with RecordProducer(kafka, "bench") as producer:
        producer.send(Topic.MANIFESTS, manifest(0), key="main")
        for number in range(1, steps + 1):
            groups = [f"{RUN_ID}/train/{STEP_GROUPS * (number - 1) + place}" for place in range(STEP_GROUPS)]
            for name in groups:
                producer.send(Topic.TASKS, task(name), key=name)
                producer.send(Topic.GROUPS, closed(name), key=name)
            inputs = [StepInput(name, Topic.GROUPS.value, 0, 0) for name in groups]
            producer.send(Topic.STEPS, step(number, inputs, []), key=RUN_ID)
            producer.send(Topic.MANIFESTS, manifest(number), key="main")
            producer.send(Topic.ACKS, ack(number, AckStatus.PROVED), key="replica-0")
    of = {"run_id": RUN_ID, "groups_per_step": STEP_GROUPS, "max_steps": steps}
    return until_done(FEEDER, [kafka.model_dump(), of, {"eval_before": False, "eval_after": False}])


def task(name: str) -> Task:
    """Make a task with a payload of its own."""
    payload = json.dumps({"ledger": name, "entries": list(range(40))})
    return Task(name, name, RUN_ID, "ledger", payload, Mode.TRAIN, 2, 4, 0, 0, SECOND_US, issued_version=0)


def closed(name: str) -> Group:
    """Make the task's group, which can be trained on."""
    members = [member_of(make_rollout(name, place, float(place), size=2), 0, place) for place in range(2)]
    return make_group(name, members)


def of_trainer(kafka: KafkaSettings, count: int, directory: Path) -> int:
    """Measure the trainer on a backlog of groups that it can all train on, until it has taken its steps."""
    write_groups(kafka, range(count // GROUP_ROLLOUTS))
    return train(kafka, directory)


def of_trainer_unused(kafka: KafkaSettings, count: int, directory: Path) -> int:
    """Measure the trainer on a backlog of groups that it cannot train on, followed by the few that it can."""
    useless = count // GROUP_ROLLOUTS
    write_groups(kafka, range(useless), useless=True)
    write_groups(kafka, range(useless, useless + TRAINER_STEPS * GROUP_ROLLOUTS))
    return train(kafka, directory)


def write_groups(kafka: KafkaSettings, numbers: range, *, useless: bool = False) -> None:
    """Write groups of rollouts with different rewards, or with equal rewards if `useless`."""
    with RecordProducer(kafka, "bench") as producer, LogReader(kafka, [Topic.ROLLOUTS]) as reader:
        following = {partition: end for (_, partition), end in reader.end_offsets().items()}
        for number in numbers:
            name, members, partition = f"g{number}", [], number % PARTITIONS
            for place in range(GROUP_ROLLOUTS):
                segments = [make_segment(number, TRAINED_TOKENS)]
                reward = 1.0 if useless else float(place)
                made = make_rollout(name, place, reward, size=GROUP_ROLLOUTS, segments=segments)
                producer.send(Topic.ROLLOUTS, made, key=name, partition=partition)
                members.append(member_of(made, partition, following[partition]))
                following[partition] += 1
            producer.send(Topic.GROUPS, make_group(name, members, closed_at=number), key=name, partition=partition)


def train(kafka: KafkaSettings, directory: Path) -> int:
    """Run a trainer of a tiny model until it has taken its steps, with enough time between them to read ahead."""
    tiny_model().to(torch.bfloat16).save_pretrained(directory / "model")
    of = {"run_id": "run", "groups_per_step": GROUP_ROLLOUTS, "max_steps": TRAINER_STEPS, "max_policy_lag": 100}
    settings = {
        "model": str(directory / "model"),
        "read_ahead_bytes": READ_AHEAD,
        "max_waiting_batches": 4,
        "min_step_seconds": 1.0,
        "publish": {"skips": []},
    }
    return until_done(TRAINER, [kafka.model_dump(), of, str(directory / "store"), settings])


def until_done(program: str, settings: Sequence[Any]) -> int:
    """Run a role until it prints that it is done, and return the peak of its process in bytes."""
    command = [sys.executable, "-c", program, json.dumps(settings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the role ended before it had done")
        return peak_bytes(process.pid)


@contextmanager
def sink_process(kafka: KafkaSettings, directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], SinkSettings]]:
    """Run a sink and end it with SIGTERM."""
    options: dict[str, Any] = {"path": str(directory / "engine"), "http_port": 0, "flush_bytes": READ_AHEAD}
    process = subprocess.Popen([sys.executable, "-c", SINK, json.dumps([kafka.model_dump(), options])])
    try:
        yield process, SinkSettings(**options)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(60)


def rows(settings: SinkSettings) -> int:
    """Return the number of rollouts in the tables; 0 until the sink has published its address."""
    if read_state(settings.directory) is None:
        return 0
    return int(ask(settings, "SELECT count() FROM rollouts").rows[0][0])


def of_sink(kafka: KafkaSettings, count: int, directory: Path) -> int:
    """Measure the ClickHouse sink, with its embedded engine."""
    write_rollouts(kafka, range(count))
    with sink_process(kafka, directory) as (process, settings):
        wait_for(lambda: rows(settings) >= count, process)
        return peak_bytes(process.pid)


def of_reader(kafka: KafkaSettings, count: int, _directory: Path) -> int:
    """Measure a bare reader of the log, the part that every role contains."""
    write_rollouts(kafka, range(count))
    command = [sys.executable, "-c", READER, json.dumps(kafka.model_dump())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if int(process.stdout.readline()) != count:
            raise RuntimeError("the reader did not read every record once")
        return peak_bytes(process.pid)


ROLES: dict[str, Role] = {
    "reader": Role(of_reader),
    "assembly": Role(of_assembly),
    "join": Role(of_join),
    "batches": Role(of_batches, 100),
    "sink": Role(of_sink),
    "feeder": Role(of_feeder, 50),
    "trainer": Role(of_trainer, 100, 2 * TRAINER_STEPS * GROUP_ROLLOUTS),
    "trainer-unused": Role(of_trainer_unused, 100),
}


def slow_sink(bootstrap: str, count: int = 150, rounds: int = 4) -> dict[str, Any]:
    """Measure the seconds until this many rollouts are acknowledged, alternately with a running and a stopped sink."""
    kafka = fresh_topics(bootstrap, f"burst-{uuid.uuid4().hex[:8]}.", PARTITIONS)
    took: dict[int, list[float]] = {signal.SIGCONT: [], signal.SIGSTOP: []}
    written = HANDFUL
    with tempfile.TemporaryDirectory() as directory, sink_process(kafka, Path(directory)) as (process, settings):
        write_rollouts(kafka, range(written))
        wait_for(lambda: rows(settings) >= HANDFUL, process)
        for turn in range(2 * rounds):
            # A, B, B, A: neither one profits from the state that the round before it left.
            for number in sorted(took, reverse=bool(turn % 2)):
                process.send_signal(number)
                took[number].append(timed(kafka, range(written, written + count)))
                written += count
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: rows(settings) >= written, process)
    running, stopped = (statistics.median(took[number]) for number in (signal.SIGCONT, signal.SIGSTOP))
    return {
        "records": count,
        "rounds": 2 * rounds,
        "sink_running_s": round(running, 2),
        "sink_stopped_s": round(stopped, 2),
        "ratio": round(stopped / running, 2),
    }


def timed(kafka: KafkaSettings, numbers: range) -> float:
    """Return the seconds to write rollouts until all are acknowledged."""
    begun = time.monotonic()
    write_rollouts(kafka, numbers)
    return time.monotonic() - begun


if __name__ == "__main__":
    main()
