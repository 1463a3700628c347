"""The feedback join: joins a second of both runners, compared with a bare consume-produce loop.

One broker, one run, the same records; each contender is one process pinned to one core. One JSON line per figure:

    python tests/bench/bench_join.py --bootstrap HOST:PORT

A join is one interaction, without tokens, with one thumb; all of them are in the log before the contenders read.
`transactional` and `faust` are the whole worker with that runner: both topics processed in one order of event time,
state in a changelog, acknowledged outcomes. `loop` keeps a dict in memory, joins in the order of arrival and commits
after a flush: the lower bound, without state that survives a crash or an order that a replay repeats.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench_assembly import await_keys, consume_and_produce, contend_tidemill, contended, started, worked_off

from tests.streams.join_support import SECOND_US, feedback, interaction
from tests.streams.stream_support import fresh_topics
from tidemill.schemas.catalogue import Topic, feedback_key
from tidemill.schemas.clock import now_us, to_ms
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.producer import RecordProducer, partition_of
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Interaction, Record
from tidemill.streams.join.config import JoinSettings
from tidemill.streams.join.feedback_join import INPUTS
from tidemill.streams.runner.worker import feedback_join

PARTITIONS = 4
WARM_UP = 50
CONTENDERS = ("transactional", "loop", "faust")
SETTINGS = JoinSettings(settle_s=0.0, bot_max_events=1_000_000)


def main() -> None:
    """Measure every contender, or run as one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joins", type=int, default=5000, help="interactions, each with one thumb")
    options = contended(parser, CONTENDERS, contend)
    contenders = options.only or CONTENDERS
    figures = {contender: measure(contender, options.bootstrap, options.joins) for contender in contenders}
    for contender, found in figures.items():
        for name, value in found.items():
            print(json.dumps({"figure": f"feedback_join.{name}", "contender": contender, "value": value}))
    if {"transactional", "loop"} <= figures.keys():
        ratio = figures["transactional"]["joins_per_cpu_s"] / figures["loop"]["joins_per_cpu_s"]
        print(json.dumps({"figure": "feedback_join.joins_per_cpu_s_to_loop", "value": round(ratio, 4)}))


def measure(contender: str, bootstrap: str, joins: int) -> dict[str, float]:
    """Measure joins a second from the first record read to the last outcome, and the worker's CPU time per join."""
    kafka = fresh_topics(bootstrap, f"bench-{uuid.uuid4().hex[:8]}.", PARTITIONS)
    producer = RecordProducer(kafka, "bench")
    with started(__file__, contender, kafka) as pid, LogReader(kafka, [Topic.OUTCOMES]) as reader:
        send(producer, list(records("warm", WARM_UP)))
        await_keys(reader, WARM_UP)
        written = list(records("join", joins))
        return worked_off(pid, lambda: send(producer, written), lambda: await_keys(reader, joins), "join", joins)


def records(name: str, count: int) -> Iterator[tuple[Topic, str, str, Record, int]]:
    """Yield topic, interaction, key, record and event time in µs: answers one millisecond apart, each with a vote."""
    begun = now_us() - 60 * SECOND_US
    for number in range(count):
        interaction_id, served_at = f"{name}-{number}", begun + 1_000 * number
        made = interaction(interaction_id, served_at=served_at, user_id=f"u-{number % 100}")
        yield Topic.INTERACTIONS, interaction_id, interaction_id, made, served_at
        vote = feedback(interaction_id, "vote", user_id=made.user_id, observed_at=served_at)
        yield Topic.FEEDBACK, interaction_id, feedback_key(interaction_id, "vote"), vote, served_at


def send(producer: RecordProducer, written: list[tuple[Topic, str, str, Record, int]]) -> None:
    """Write the records to the partitions that the product would use."""
    for topic, interaction_id, key, record, at_us in written:
        partition = partition_of(interaction_id, PARTITIONS)
        producer.send(topic, record, key=key, partition=partition, timestamp_ms=to_ms(at_us))
    producer.flush()


def contend(contender: str, kafka: KafkaSettings) -> None:
    if contender == "loop":
        contend_loop(kafka)
    else:
        contend_tidemill(kafka, contender, lambda run, _: feedback_join(run, SETTINGS))


def contend_loop(kafka: KafkaSettings) -> None:
    halves: dict[str, Any] = {}

    def join(record: Any) -> tuple[str, Any] | None:
        other = halves.pop(record.interaction_id, None)
        if other is None:
            halves[record.interaction_id] = record
            return None
        made, vote = (record, other) if isinstance(record, Interaction) else (other, record)
        return made.interaction_id, {"id": made.interaction_id, "version": made.version_min, "reward": vote.value}

    consume_and_produce(kafka, INPUTS, Topic.OUTCOMES, join)


if __name__ == "__main__":
    main()
