"""The needs of every runner: topics and partitions before records flow, ticks for partitions that are idle, and the
bytes of outputs, dead letters, states and ticks with their place."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from tidemill.schemas.catalogue import Names, Topic, co_partitioned, is_compacted, tick_key
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.admin import admin_client
from tidemill.schemas.log.producer import dead_letter_headers
from tidemill.schemas.record_class import record
from tidemill.schemas.records import Tick
from tidemill.streams.machine import Emit, Machine, Output, Processor, Rejected
from tidemill.streams.runner.journal import Written

METADATA_TIMEOUT_S = 20.0
LEADER_POLL_S = 0.1
STATE_TOPIC_CONFIG = {"segment.ms": "3600000", "min.cleanable.dirty.ratio": "0.1"}
"""Short segments let compaction keep up, and with it the time that a recovery takes."""


class StreamFailure(RuntimeError):
    """The stream worker cannot go on; the message says why and what to do."""


def application_id(kafka: KafkaSettings, run: RunSettings, processor: Processor) -> str:
    """Consumer group, and prefix of the state topic: one a processor, run and topic prefix."""
    return f"{kafka.topic_prefix}{processor.name}.{run.run_id}"


def checked_partitions(kafka: KafkaSettings, processor: Processor) -> int:
    """Partition count of a processor's inputs; waits for the leaders of all its topics. Raises StreamFailure."""
    names = Names(kafka.topic_prefix)
    topics = [*processor.inputs, *processor.outputs]
    wanted = [*map(names.of, topics), *map(names.dead_letter, processor.inputs)]
    leaders = _leaders(kafka, wanted)
    # What lies in equal partitions by the catalogue must do so in the log: machines and their outputs go by number.
    aligned = [
        topic for topic in topics if topic in processor.inputs or co_partitioned(processor.inputs[0], topic, kafka)
    ]
    counts = {names.of(topic): leaders[names.of(topic)] for topic in aligned}
    if len(set(counts.values())) != 1:
        raise StreamFailure(f"records meet by partition number, so these topics need equal partition counts: {counts}")
    return next(iter(counts.values()))


def _leaders(kafka: KafkaSettings, wanted: Sequence[str]) -> dict[str, int]:
    """Partition count of each wanted topic, once all of their partitions have a leader."""
    client = admin_client(kafka)
    deadline = time.monotonic() + METADATA_TIMEOUT_S
    while True:
        topics = client.list_topics(timeout=METADATA_TIMEOUT_S).topics
        leaders = {n: [p.leader for p in topics[n].partitions.values()] if n in topics else [] for n in wanted}
        if all(found and min(found) >= 0 for found in leaders.values()):
            return {name: len(found) for name, found in leaders.items()}
        missing = " and ".join(name for name, found in leaders.items() if not found)
        if missing:
            raise StreamFailure(f"missing topics: {missing}. Create them with `tidemill topics --create`")
        if time.monotonic() > deadline:
            raise StreamFailure(f"partitions without a leader for {METADATA_TIMEOUT_S:g} s: {leaders}")
        # Leaders of new topics are elected within moments; a client that writes before would fail.
        time.sleep(LEADER_POLL_S)


def check_position(topic: str, partition: int, offset: int, end: int | None) -> None:
    """Raise StreamFailure for a state that goes further than the log."""
    if end is not None and offset > end:
        raise StreamFailure(
            f"the state of {topic}[{partition}] goes to offset {offset}, the log ends at {end}: the topic was "
            "deleted and created again. Give the processor another `application` name, or delete its state topic too"
        )


class IdleInputs:
    """Where deadlines pass that no record reaches: each is told once, by a tick record."""

    def __init__(self, inputs: Sequence[Topic]) -> None:
        self._inputs = inputs
        self._ticked_us: dict[tuple[Topic, int], int] = {}

    def due(self, machines: Mapping[int, Machine], now_us: int) -> Iterator[tuple[Topic, int]]:
        """The partitions, by topic, that need a tick of the time `now_us`; it counts as written."""
        for partition, machine in machines.items():
            deadline = machine.next_deadline_us()
            if deadline is None or deadline > now_us:
                continue
            for topic in self._inputs:
                # A tick that is in the log and not read yet is as good as a second one.
                if max(machine.clock_us(topic), self._ticked_us.get((topic, partition), 0)) < deadline:
                    self._ticked_us[topic, partition] = now_us
                    yield topic, partition

    def clear(self) -> None:
        """Forget the ticks that were written: the machines are new."""
        self._ticked_us.clear()


@record(frozen=True, slots=True)
class Write:
    """One record to send."""

    topic: str
    key: bytes | None
    value: bytes | None
    partition: int | None
    """None: the partition of the key, by murmur2."""
    headers: Mapping[str, bytes] | None = None
    timestamp_s: float | None = None


@record(frozen=True, slots=True)
class Writes:
    """Makes the records of one application."""

    names: Names
    codec: Codec
    application: str

    def output(self, output: Output) -> Write:
        """A record that a machine emits, or a dead letter."""
        match output:
            case Emit(topic, key, record, partition):
                return Write(self.names.of(topic), key.encode(), self.codec.encode(record), partition)
            case Rejected(located, reason):
                headers = dead_letter_headers(self.names, located, reason, self.application)
                topic_name = self.names.dead_letter(located.topic)
                # aiokafka refuses a record without key and value; the reason still says that the value was a tombstone.
                value = b"" if located.key is None and located.value is None else located.value
                return Write(topic_name, located.key, value, None, headers)

    def tick(self, topic: Topic, partition: int, at_ms: int) -> Write:
        """A record that only says how late it is in a partition."""
        value = self.codec.encode(Tick(source=self.application, at=at_ms * 1000))
        key = tick_key(partition).encode() if is_compacted(topic) else None
        return Write(self.names.of(topic), key, value, partition, None, at_ms / 1000)


def state_steps(changelog: str, changes: Mapping[int, Sequence[Written]]) -> Iterator[Sequence[Write]]:
    """The steps of each partition's changes as those of all: each is to be acknowledged before the next is sent."""
    for step in zip(*changes.values(), strict=True):
        writes = [
            Write(changelog, key.encode(), value, partition)
            for partition, written in zip(changes, step, strict=True)
            for key, value in written.items()
        ]
        if writes:
            yield writes
