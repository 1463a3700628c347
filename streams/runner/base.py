"""The common part of all runners: checks of topics and partitions at the start, machines, outputs and dead letters, and
ticks for idle partitions."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping

from tidemill.schemas.catalogue import Names, Topic, co_partitioned, is_compacted, tick_key
from tidemill.schemas.clock import now_us, to_ms
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.access import check_access
from tidemill.schemas.log.admin import admin_client, wait_until_led
from tidemill.schemas.log.client_settings import CREATE_TOPICS, METADATA_TIMEOUT_S, Partition
from tidemill.schemas.log.guard import RetentionGap
from tidemill.schemas.log.producer import dead_letter_of
from tidemill.schemas.record_class import record
from tidemill.schemas.records import Tick
from tidemill.streams.config import StreamSettings
from tidemill.streams.machine import Machine, Output, OutputRecord, Processor, Rejected
from tidemill.streams.runner.journal import Journal
from tidemill.streams.state import StateError

STATE_TOPIC_CONFIG = {"segment.ms": "3600000", "min.cleanable.dirty.ratio": "0.1"}
"""Short segments, so that compaction keeps up and a recovery stays short."""
LOG = logging.getLogger("tidemill.streams")


def checked_partitions(kafka: KafkaSettings, processor: Processor) -> int:
    """Return the partition count of a processor's inputs, once all its topics have leaders.

    Raises RuntimeError if they cannot be used, TimeoutError without leaders, and as `check_access`.
    """
    check_access(kafka)
    names = Names(kafka.topic_prefix)
    topics = [*processor.inputs, *processor.outputs]
    wanted = [*map(names.of, topics), *map(names.dead_letter, processor.inputs)]
    client = admin_client(kafka)
    existing = client.list_topics(timeout=METADATA_TIMEOUT_S).topics
    missing = " and ".join(name for name in wanted if name not in existing or not existing[name].partitions)
    if missing:
        raise RuntimeError(f"missing topics: {missing}; {CREATE_TOPICS}")
    # Leaders of new topics are elected within moments; a client that writes earlier would fail.
    wait_until_led(client, set(wanted))
    # Co-partitioned topics of the catalogue must have equal partition counts: machines and outputs go by number.
    aligned = [
        topic for topic in topics if topic in processor.inputs or co_partitioned(processor.inputs[0], topic, kafka)
    ]
    counts = {names.of(topic): len(existing[names.of(topic)].partitions) for topic in aligned}
    if len(set(counts.values())) != 1:
        raise RuntimeError(f"records are joined by partition number: these topics need the same number: {counts}")
    return next(iter(counts.values()))


def check_position(topic: str, partition: int, offset: int, end: int | None) -> None:
    """Raise RuntimeError if the state's offset is beyond the end of the log."""
    if end is not None and offset > end:
        raise RuntimeError(
            f"the state of {topic}[{partition}] goes to offset {offset}, the log ends at {end}: the topic was "
            "deleted and created again. Give the processor another `application` name, or delete its state topic too"
        )


@record(frozen=True, slots=True)
class Write:
    """One record to send."""

    topic: str
    key: bytes | None
    value: bytes | None
    partition: int | None
    """None: the partition is chosen from the key, by murmur2."""
    headers: Mapping[str, bytes] | None = None
    timestamp_ms: int | None = None


class Runner:
    """Base class of the runners: the machines of a worker, the records that it writes, and ticks."""

    def __init__(self, kafka: KafkaSettings, run: RunSettings, stream: StreamSettings, processor: Processor) -> None:
        self._kafka, self._stream, self._processor = kafka, stream, processor
        self._names = Names(kafka.topic_prefix)
        self._codec = Codec(kafka.registry_url)
        self._application = f"{kafka.topic_prefix}{processor.name}.{run.run_id}"
        """Consumer group, and prefix of the state topic."""
        self._changelog = f"{self._application}-{processor.table}-changelog"
        self._machines: dict[int, Machine] = {}
        self._journals: dict[int, Journal] = {}
        self._ready = False
        self._skipped = 0
        self._ticked_us: dict[tuple[Topic, int], int] = {}

    def ended(self, reason: object) -> str:
        """Return the message of a worker that ends for this reason."""
        if isinstance(reason, StateError):
            reason = (
                f"the state in the topic {self._changelog} cannot be used: {reason}. Give the processor another "
                "`application` name, or delete this topic, to start it again from the beginning of the log"
            )
        return f"{self._processor.name} ended: {reason}"

    def write_of(self, output: Output) -> Write:
        """Return the write of an output: a record that a machine emits, or a dead letter."""
        match output:
            case OutputRecord(topic, key, record, partition):
                return Write(self._names.of(topic), key.encode(), self._codec.encode(record), partition)
            case Rejected(located, reason):
                own_key, value, headers = dead_letter_of(self._names, located, reason, self._application)
                # aiokafka refuses a record without key and value; the reason still says that the value was a tombstone.
                value = b"" if own_key is None and value is None else value
                return Write(self._names.dead_letter(located.topic), own_key, value, None, headers)

    def due_ticks(self) -> Iterator[Write]:
        """Yield a tick for each partition whose clock is behind a passed deadline; each tick counts as written."""
        # Kafka stores milliseconds: a tick must not be earlier than the deadline for which it is sent.
        now_ms = to_ms(now_us())
        value = self._codec.encode(Tick(source=self._application, at=now_ms * 1000))
        for partition, machine in self._machines.items():
            deadline = machine.next_deadline_us()
            if deadline is None or deadline > now_ms * 1000:
                continue
            for topic in self._processor.inputs:
                # No second tick while the first one is in the log but not read yet.
                if max(machine.clock_us(topic), self._ticked_us.get((topic, partition), 0)) < deadline:
                    self._ticked_us[topic, partition] = now_ms * 1000
                    key = tick_key(partition).encode() if is_compacted(topic) else None
                    yield Write(self._names.of(topic), key, value, partition, timestamp_ms=now_ms)

    def owned(self, assigned: Collection[Partition]) -> set[int]:
        """Return the partitions of this worker. Raises RuntimeError if they are not the same for every input."""
        owned = [{p for topic, p in assigned if topic == self._names.of(t)} for t in self._processor.inputs]
        if any(partitions != owned[0] for partitions in owned):
            raise RuntimeError(f"the inputs' partitions are not assigned together: {sorted(assigned)}")
        return owned[0]

    def make_machines(self, written: Mapping[int, Iterable[tuple[str, bytes]]]) -> dict[Partition, int]:
        """Create the machines from keys and values of the state topic, by partition. Return their next offsets.

        Raises StateError.
        """
        self._ticked_us.clear()
        self._journals = {partition: Journal(partition, found) for partition, found in written.items()}
        self._machines = {p: self._processor.machine(p, journal.state) for p, journal in self._journals.items()}
        return {
            (self._names.of(topic), p): machine.next_offset(topic)
            for p, machine in self._machines.items()
            for topic in self._processor.inputs
        }

    def pass_over(self, gap: RetentionGap) -> None:
        """Count the missing records; raise the gap if gaps are not accepted."""
        if not self._stream.accept_gaps:
            raise gap
        self._skipped += gap.first - gap.wanted
        LOG.error("%s. It is accepted (`stream.accept_gaps`): %d offsets skipped so far", gap, self._skipped)
