"""Memory under a burst: what each role holds at most while it works off a backlog, and off a ten times longer one.

A role is started on a backlog that lies in the log already, and asked for its peak of resident memory (VmHWM) when it
has done with it; the peak of the same role on a handful of records is taken off both. One JSON line a role, and one
that says what a sink that stands still costs those who write:

    python tests/bench/bench_burst.py --bootstrap HOST:PORT [--megabytes 32] [--factor 10] [--role sink]

The bounds are the settings': `kafka.read_ahead_bytes`, `stream.buffer_records`, `sink.flush_bytes`. The bench sets them
low, so that a short backlog passes them by far.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "streams"))

import numpy as np
from join_support import feedback, interaction
from stream_support import fresh_topics, rollout, stream_process

from tidemill.consumers.query import ask
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.state_file import read_state
from tidemill.schemas.catalogue import Topic, feedback_key
from tidemill.schemas.clock import now_us, to_ms
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.partitioner import partition_of
from tidemill.schemas.producer import RecordProducer
from tidemill.schemas.reader import LogReader
from tidemill.schemas.records import Segment, VersionSpan
from tidemill.streams.config import ProcessorName

PARTITIONS = 2
TOKENS = 7_000
RECORD_BYTES = 9 * TOKENS
READ_AHEAD = 8 * 2**20
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
"""Event times that a bench can wait for: what is remembered is a hundred seconds' worth."""
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
from tidemill.schemas.reader import LogReader
with LogReader(KafkaSettings(**json.loads(sys.argv[1])), [Topic.ROLLOUTS]) as reader:
    print(sum(1 for _ in reader.read_to_end(200)), flush=True)
    sys.stdin.read()
"""
Role = Callable[[KafkaSettings, int, Path], int]
"""Works off a backlog of so many records in an empty directory; its peak in bytes."""


def main() -> None:
    """Measure the roles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", default=os.environ.get("TIDEMILL_KAFKA__BOOTSTRAP"))
    parser.add_argument("--megabytes", type=int, default=32, help="the shorter backlog")
    parser.add_argument("--factor", type=int, default=10, help="how much longer the other one is")
    parser.add_argument("--role", choices=[*ROLES, "slow-sink"], action="append", help="only these; repeat")
    options = parser.parse_args()
    if not options.bootstrap:
        parser.error("give --bootstrap HOST:PORT or set TIDEMILL_KAFKA__BOOTSTRAP")
    count = options.megabytes * 2**20 // RECORD_BYTES
    for name in options.role or [*ROLES, "slow-sink"]:
        figures = slow_sink(options.bootstrap) if name == "slow-sink" else burst(name, options, count)
        print(json.dumps({"figure": f"burst.{name}", **figures}), flush=True)


def burst(name: str, options: argparse.Namespace, count: int) -> dict[str, Any]:
    """Peaks of one role, MiB: on a handful of records, and what the two backlogs add to that."""
    base, short, long = (peak(name, options.bootstrap, n) for n in (HANDFUL, count, options.factor * count))
    return {
        "records": [count, options.factor * count],
        "backlog_mb": [round(n * RECORD_BYTES / 2**20) for n in (count, options.factor * count)],
        "base_mb": round(base / 2**20, 1),
        "above_base_mb": [round((found - base) / 2**20, 1) for found in (short, long)],
        "ratio": round((long - base) / max(short - base, 1), 2),
        "ratio_with_base": round(long / short, 2),
    }


def peak(name: str, bootstrap: str, count: int) -> int:
    """Peak of a role that begins with `count` records in the log, in bytes."""
    kafka = fresh_topics(bootstrap, f"burst-{uuid.uuid4().hex[:8]}.", PARTITIONS)
    kafka = kafka.model_copy(update={"read_ahead_bytes": READ_AHEAD, "write_ahead_bytes": READ_AHEAD})
    with tempfile.TemporaryDirectory() as directory:
        return ROLES[name](kafka, count, Path(directory))


def high_water(pid: int) -> int:
    """Peak of a process's resident memory so far, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def segment(number: int) -> Segment:
    """Tokens that do not compress."""
    generator = np.random.default_rng(number)
    ids = generator.integers(0, 2**32, TOKENS, dtype=np.uint32).astype("<u4").tobytes()
    return Segment(TOKENS, ids, b"\x01" * TOKENS, ids, [VersionSpan(1, 0, TOKENS)])


def write_rollouts(kafka: KafkaSettings, numbers: range) -> None:
    """Groups of one, a second of event time apart, so that what a stage has to remember is the same for any backlog."""
    begun = now_us() - len(numbers) * SECOND_US
    with RecordProducer(kafka, "bench") as producer:
        for place, number in enumerate(numbers):
            made = rollout(f"g{number}", 0, group_size=1, segments=[segment(number)])
            producer.send(Topic.ROLLOUTS, made, key=made.group_id, timestamp_ms=to_ms(begun + place * SECOND_US))


def write_interactions(kafka: KafkaSettings, count: int) -> None:
    """Answers a second of event time apart, each with a thumb: one topic is a thousand times denser than the other."""
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
    """Raises when the process ends or time is up first."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if process is None or process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError("the role ended, or did not work its backlog off in time")
        time.sleep(0.05)


def of_stream(processor: ProcessorName, output: Topic, kafka: KafkaSettings, count: int, directory: Path) -> int:
    """A stream worker until it has written an output a record."""
    seen: set[bytes | None] = set()
    rules = {"join": JOIN}
    options: dict[str, Any] = {"buffer_records": 100, "max_batch": 50, "done_ttl_s": 60.0}
    with LogReader(kafka, [output]) as reader, stream_process(
        kafka, directory, processor=processor, rules=rules, **options
    ) as worker:  # fmt: skip

        def done() -> bool:
            seen.update(located.key for located in reader.poll(0.1))
            return len(seen) >= count

        wait_for(done, worker.process)
        assert worker.process is not None
        return high_water(worker.process.pid)


def of_assembly(kafka: KafkaSettings, count: int, directory: Path) -> int:
    """Group assembly."""
    write_rollouts(kafka, range(count))
    return of_stream(ProcessorName.ASSEMBLY, Topic.GROUPS, kafka, count, directory)


def of_join(kafka: KafkaSettings, count: int, directory: Path) -> int:
    """The feedback join."""
    write_interactions(kafka, count)
    return of_stream(ProcessorName.JOIN, Topic.OUTCOMES, kafka, count, directory)


@contextmanager
def sink_process(kafka: KafkaSettings, directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], SinkSettings]]:
    """A sink, ended with SIGTERM."""
    options: dict[str, Any] = {"path": str(directory / "engine"), "http_port": 0, "flush_bytes": READ_AHEAD}
    process = subprocess.Popen([sys.executable, "-c", SINK, json.dumps([kafka.model_dump(), options])])
    try:
        yield process, SinkSettings(**options)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(60)


def rows(settings: SinkSettings) -> int:
    """Rollouts in the tables; 0 before the sink has said where it answers."""
    if read_state(settings.directory) is None:
        return 0
    return int(ask(settings, "SELECT count() FROM rollouts").rows[0][0])


def of_sink(kafka: KafkaSettings, count: int, directory: Path) -> int:
    """The ClickHouse sink, with its embedded engine."""
    write_rollouts(kafka, range(count))
    with sink_process(kafka, directory) as (process, settings):
        wait_for(lambda: rows(settings) >= count, process)
        return high_water(process.pid)


def of_reader(kafka: KafkaSettings, count: int, _directory: Path) -> int:
    """A bare reader of the log: the part that every role has."""
    write_rollouts(kafka, range(count))
    command = [sys.executable, "-c", READER, json.dumps(kafka.model_dump())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if int(process.stdout.readline()) != count:
            raise RuntimeError("the reader did not read every record once")
        return high_water(process.pid)


ROLES: dict[str, Role] = {"reader": of_reader, "assembly": of_assembly, "join": of_join, "sink": of_sink}


def slow_sink(bootstrap: str, count: int = 150, rounds: int = 4) -> dict[str, Any]:
    """Seconds in which so many rollouts are acknowledged, in turn while a sink runs and while it stands still."""
    kafka = fresh_topics(bootstrap, f"burst-{uuid.uuid4().hex[:8]}.", PARTITIONS)
    took: dict[int, list[float]] = {signal.SIGCONT: [], signal.SIGSTOP: []}
    written = HANDFUL
    with tempfile.TemporaryDirectory() as directory, sink_process(kafka, Path(directory)) as (process, settings):
        write_rollouts(kafka, range(written))
        wait_for(lambda: rows(settings) >= HANDFUL, process)
        for turn in range(2 * rounds):
            # A, B, B, A: neither gains from what the one before it left behind.
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
    """Seconds of writing rollouts until all are acknowledged."""
    begun = time.monotonic()
    write_rollouts(kafka, numbers)
    return time.monotonic() - begun


if __name__ == "__main__":
    main()
