"""Group assembly: throughput and latency of both runners, of quixstreams and of a bare consume-produce loop.

One broker, one run, the same rollouts; each contender is one process pinned to one core. One JSON line per figure:

    python tests/bench/bench_assembly.py --bootstrap HOST:PORT

The contenders read the same records and write one record for each group of 8. In the throughput run, the whole backlog
is in the log before they read. `transactional` and `faust` are the whole worker with that runner: decoding, checks,
state in a changelog, acknowledged groups, group records with advantages. `quixstreams` keeps the same decoded members
in its RocksDB state with a changelog, at least once. `loop` keeps a dict in memory and commits after a flush: the lower
bound, without state that survives a crash.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.streams.stream_support import CODEC, FAR_AWAY_US, RUN_ID, fresh_topics, rollout
from tests.waiting import until
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.client_settings import consumer_settings, producer_settings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Rollout
from tidemill.streams.config import RunnerName, StreamSettings
from tidemill.streams.machine import Processor
from tidemill.streams.runner.worker import group_assembly, run

GROUP_SIZE = 8
PARTITIONS = 4
CONTENDERS = ("transactional", "quixstreams", "loop", "faust")
READY = "warm-up"
SESSION_S = 60.0
"""Longer than the writing of the backlog, and shorter than Faust's request timeout."""


def main() -> None:
    """Measure every contender, or run as one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2500, help="groups of the throughput run")
    parser.add_argument("--latency-groups", type=int, default=200, help="groups of the latency run")
    parser.add_argument("--rate", type=float, default=200.0, help="rollouts a second of the latency run")
    options = contended(parser, CONTENDERS, contend)
    for contender in options.only or CONTENDERS:
        for line in measure(contender, options):
            print(json.dumps(line), flush=True)


def contended(
    parser: argparse.ArgumentParser, contenders: Sequence[str], contend: Callable[[str, KafkaSettings], None]
) -> argparse.Namespace:
    """Return the options of a bench of contenders. In a contender's process, run it on one core until terminated."""
    parser.add_argument("--bootstrap", default=os.environ.get("TIDEMILL_KAFKA__BOOTSTRAP"))
    parser.add_argument("--only", nargs="*", choices=contenders, help="these contenders alone")
    parser.add_argument("--contender", choices=contenders, help=argparse.SUPPRESS)
    parser.add_argument("--prefix", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.bootstrap:
        parser.error("give --bootstrap HOST:PORT or set TIDEMILL_KAFKA__BOOTSTRAP")
    if options.contender:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})
        contend(options.contender, KafkaSettings(bootstrap=options.bootstrap, topic_prefix=options.prefix))
        sys.exit()
    return options


def measure(contender: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one contender on its own topics."""
    kafka = fresh_topics(options.bootstrap, f"bench-{uuid.uuid4().hex[:8]}.", PARTITIONS)
    producer = RecordProducer(kafka, "bench")
    full_topic = Names(kafka.topic_prefix).of(Topic.ROLLOUTS)
    with LogReader(kafka, [Topic.GROUPS]) as reader, started(__file__, contender, kafka) as pid:
        send_group(producer, READY)
        await_keys(reader, 1)
        records = [rollout(f"t{n}", i, group_size=GROUP_SIZE) for i in range(GROUP_SIZE) for n in range(options.groups)]
        encoded = [(record.group_id.encode(), CODEC.encode(record)) for record in records]

        def write() -> None:
            for key, value in encoded:
                producer.send_bytes(full_topic, value, key=key)
            producer.flush()

        throughput = worked_off(pid, write, lambda: await_keys(reader, options.groups), "rollout", len(records))
        latency = measure_latency(producer, reader, options.latency_groups, options.rate)
    figures = {**throughput, **latency}
    return [{"figure": f"group_assembly.{name}", "contender": contender, "value": v} for name, v in figures.items()]


@contextmanager
def started(script: str, contender: str, kafka: KafkaSettings) -> Iterator[int]:
    """Run a contender of a bench in its own process; yields the process id."""
    arguments = ["--bootstrap", kafka.bootstrap, "--prefix", kafka.topic_prefix, "--contender", contender]
    worker = subprocess.Popen([sys.executable, script, *arguments])
    try:
        yield worker.pid
    finally:
        worker.terminate()
        worker.wait(30)


def send_group(producer: RecordProducer, group_id: str) -> None:
    for index in range(GROUP_SIZE):
        record = rollout(group_id, index, group_size=GROUP_SIZE, deadline_at=FAR_AWAY_US)
        producer.send(Topic.ROLLOUTS, record, key=group_id)
    producer.flush()


def await_keys(reader: LogReader, count: int) -> None:
    """Read until this many distinct keys have been seen."""
    seen: set[bytes | None] = set()
    until(
        lambda: seen.update(located.key for located in reader.poll(0.005)) or len(seen) >= count,
        lambda: f"{len(seen)} of {count} keys",
        pause_s=0.0,
    )


def cpu_s(pid: int) -> float:
    """Return the user and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def held(pid: int) -> Iterator[None]:
    """Stop a process meanwhile. It remains a member of its consumer group for `SESSION_S`."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def worked_off(
    pid: int, write: Callable[[], None], read: Callable[[], None], name: str, count: int
) -> dict[str, float]:
    """Return the rate at which a worker processes the records that `write` wrote while it was stopped, from its first
    read until `read` returns, and its CPU time."""
    with held(pid):
        write()
        cpu, begun = cpu_s(pid), time.monotonic()
    read()
    elapsed, spent = time.monotonic() - begun, max(cpu_s(pid) - cpu, 1e-9)
    return {
        f"{name}s_per_s": round(count / elapsed, 1),
        f"{name}s_per_cpu_s": round(count / spent, 1),
        f"cpu_us_per_{name}": round(spent / count * 1e6, 1),
    }


def measure_latency(producer: RecordProducer, reader: LogReader, groups: int, rate: float) -> dict[str, float]:
    """Measure milliseconds from writing a group's last rollout to reading the group, at a steady rate of rollouts."""
    sent: dict[str, float] = {}
    seen: dict[str, float] = {}
    begun, count = time.monotonic(), 0
    for group in range(groups):
        group_id = f"l{group}"
        for index in range(GROUP_SIZE):
            producer.send(Topic.ROLLOUTS, rollout(group_id, index, group_size=GROUP_SIZE), key=group_id)
            sent[group_id] = time.monotonic()
            count += 1
            while time.monotonic() < begun + count / rate:
                seen.update(read_once(reader, seen))
    producer.flush()
    end = time.monotonic() + 60
    while len(seen) < groups and time.monotonic() < end:
        seen.update(read_once(reader, seen))
    delays = sorted((seen[name] - at) * 1000 for name, at in sent.items() if name in seen)
    return {
        "last_rollout_to_group_ms_p50": round(delays[len(delays) // 2], 1),
        "last_rollout_to_group_ms_p99": round(delays[int(len(delays) * 0.99)], 1),
    }


def read_once(reader: LogReader, seen: dict[str, float]) -> dict[str, float]:
    found = [(located.key or b"").decode() for located in reader.poll(0.001)]
    return {name: time.monotonic() for name in found if name not in seen}


def contend(contender: str, kafka: KafkaSettings) -> None:
    match contender:
        case "quixstreams":
            contend_quixstreams(kafka)
        case "loop":
            contend_loop(kafka)
        case _:
            contend_tidemill(kafka, contender, group_assembly)


def contend_tidemill(
    kafka: KafkaSettings, runner: str, processor_of: Callable[[RunSettings, StreamSettings], Processor]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        settings = RunSettings(run_id=RUN_ID)
        stream = StreamSettings(
            data_dir=directory, runner=RunnerName(runner), session_timeout_s=SESSION_S, stall_timeout_s=0
        )
        run(kafka, settings, stream, processor_of(settings, stream))


def member(record: Rollout) -> dict[str, Any]:
    return {"id": record.rollout_id, "reward": record.reward}


def contend_quixstreams(kafka: KafkaSettings) -> None:
    from quixstreams import Application, State

    names = Names(kafka.topic_prefix)
    with tempfile.TemporaryDirectory() as directory:
        application = Application(
            broker_address=kafka.bootstrap,
            consumer_group=f"{kafka.topic_prefix}quix",
            auto_offset_reset="earliest",
            state_dir=directory,
            loglevel="ERROR",
            auto_create_topics=True,
            producer_extra_config={"partitioner": "murmur2_random", "linger.ms": 5},
            consumer_extra_config={"fetch.wait.max.ms": 20, "session.timeout.ms": int(SESSION_S * 1000)},
            request_timeout=30,
        )
        rollouts = application.topic(names.of(Topic.ROLLOUTS), value_deserializer="bytes", key_deserializer="bytes")
        groups = application.topic(names.of(Topic.GROUPS), value_serializer="json", key_serializer="bytes")

        def assemble(value: bytes, state: State) -> list[dict[str, Any]] | None:
            record = CODEC.decode(value)
            members = state.get("members") or {}
            members[record.rollout_id] = member(record)
            state.set("members", members)
            return list(members.values()) if len(members) == record.group_size else None

        frame = application.dataframe(rollouts).apply(assemble, stateful=True)
        frame[frame.apply(lambda members: members is not None)].to_topic(groups)
        application.run()


def contend_loop(kafka: KafkaSettings) -> None:
    groups: dict[str, dict[str, Any]] = {}

    def assemble(record: Any) -> tuple[str, Any] | None:
        group = groups.setdefault(record.group_id, {})
        group[record.rollout_id] = member(record)
        if len(group) < record.group_size:
            return None
        return record.group_id, list(groups.pop(record.group_id).values())

    consume_and_produce(kafka, [Topic.ROLLOUTS], Topic.GROUPS, assemble)


def consume_and_produce(
    kafka: KafkaSettings, inputs: Sequence[Topic], output: Topic, step: Callable[[Any], tuple[str, Any] | None]
) -> None:
    """Call `step` with each record for ever, write the keys and values that it returns, and commit after a flush."""
    from confluent_kafka import Consumer, Producer

    names, session = Names(kafka.topic_prefix), {"session.timeout.ms": int(SESSION_S * 1000)}
    consumer = Consumer(consumer_settings(kafka, "loop", f"{kafka.topic_prefix}loop") | session)
    producer = Producer(producer_settings(kafka, "loop"))
    consumer.subscribe([names.of(topic) for topic in inputs])
    while True:
        messages = [m for m in consumer.consume(500, 0.01) if m.error() is None]
        for message in messages:
            if (made := step(CODEC.decode(message.value()))) is not None:
                key, value = made
                producer.produce(names.of(output), json.dumps(value), key.encode())
        if messages:
            producer.flush()
            consumer.commit(asynchronous=True)


if __name__ == "__main__":
    main()
