"""What a stream worker writes, as bytes with their place: outputs, dead letters, states and ticks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tidemill.schemas.catalogue import Names, Topic, is_compacted, tick_key
from tidemill.schemas.codec import Codec
from tidemill.schemas.log.dead_letter import dead_letter_headers
from tidemill.schemas.records import Tick
from tidemill.streams.machine import Emit, Output, Rejected
from tidemill.streams.runner.journal import Written


@dataclass(frozen=True, slots=True)
class Write:
    """One record to send."""

    topic: str
    key: bytes | None
    value: bytes | None
    partition: int | None
    """None: the partition of the key, by murmur2."""
    headers: Mapping[str, bytes] | None = None
    timestamp_s: float | None = None


@dataclass(frozen=True, slots=True)
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
