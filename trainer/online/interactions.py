"""The `interactions` topic by partition and offset: what the members of an online batch refer to.

A record may be gone, by a tombstone and compaction or by retention; what is read then is a gap, and never another
record. Each partition is read once, from the first wanted offset to the last.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from tidemill.schemas.catalogue import CATALOGUE, Names, Topic
from tidemill.schemas.claim import ClaimError, ForeignClaimError, claimed_interaction
from tidemill.schemas.codec import Codec, DecodeError
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import groupless_settings, raise_lasting
from tidemill.schemas.log.consumed import ConsumedRecord, locate
from tidemill.schemas.log.partitions import watermarks
from tidemill.schemas.records import Interaction, OnlineMember
from tidemill.trainer.batch import InvalidRolloutError, check, sampled_versions
from tidemill.trainer.batch_builder import Exclusion

CLIENT = "tidemill-trainer-interactions"
IDLE_DEADLINE_S = 60.0
"""Longest wait for the broker to deliver anything."""

Place = tuple[int, int]
"""Partition and offset."""

Found = Interaction | Exclusion
"""An interaction with its segments, or why it cannot be trained."""


class InteractionLog:
    """Fetches interactions by place.

    Args:
        accept_replays: replays whose interactions may be trained; None: whatever wrote them, since that was decided.
    """

    def __init__(self, kafka: KafkaSettings, vocab_size: int, accept_replays: frozenset[str] | None = None) -> None:
        self._accept_replays = accept_replays
        self._codec = Codec(kafka.registry_url)
        self._names = Names(kafka.topic_prefix)
        self._topic = self._names.of(Topic.INTERACTIONS)
        self._partitions = CATALOGUE[Topic.INTERACTIONS].partition_count(kafka)
        self._vocab_size = vocab_size
        # The end of a partition has to be told from a pause: what lies there may have been compacted away.
        self._consumer = Consumer(groupless_settings(kafka, CLIENT) | {"enable.partition.eof": True})

    def fetch(self, members: Iterable[OnlineMember]) -> dict[Place, Found]:
        """What lies where each member points to, checked.

        Raises TimeoutError when the broker does not deliver, KafkaException for an error that lasts.
        """
        listed = list(members)
        located = self._read({(m.partition, m.offset) for m in listed if m.topic == Topic.INTERACTIONS})
        return {(m.partition, m.offset): self._checked(m, located.get((m.partition, m.offset))) for m in listed}

    def close(self) -> None:
        """Give the connections back."""
        self._consumer.close()

    def _checked(self, member: OnlineMember, located: ConsumedRecord | None) -> Found:
        if member.topic != Topic.INTERACTIONS:
            return Exclusion.INVALID_INTERACTION
        if located is None or located.value is None:
            return Exclusion.MISSING_INTERACTION
        if located.replay_id and self._accept_replays is not None and located.replay_id not in self._accept_replays:
            return Exclusion.REPLAYED
        record = located.record
        if not isinstance(record, Interaction) or record.interaction_id != member.interaction_id:
            return Exclusion.INVALID_INTERACTION
        try:
            whole = claimed_interaction(record, self._codec)
            check(whole, self._vocab_size)
        except (ClaimError, DecodeError):
            return Exclusion.MISSING_INTERACTION
        except (ForeignClaimError, InvalidRolloutError):
            return Exclusion.INVALID_INTERACTION
        versions = sampled_versions(whole)
        said = (whole.version_min, whole.version_max)
        return whole if said == (versions.min(), versions.max()) else Exclusion.INVALID_INTERACTION

    def _read(self, places: set[Place]) -> dict[Place, ConsumedRecord]:
        last = self._assign(places)
        found: dict[Place, ConsumedRecord] = {}
        deadline = time.monotonic() + IDLE_DEADLINE_S
        while last:
            messages = self._consumer.consume(500, 0.1)
            if messages:
                deadline = time.monotonic() + IDLE_DEADLINE_S
            elif time.monotonic() > deadline:
                raise TimeoutError(f"{self._topic}: nothing delivered in {IDLE_DEADLINE_S:g} s")
            for message in messages:
                self._take(message, places, last, found)
        self._consumer.unassign()
        return found

    def _take(
        self, message: Message, places: set[Place], last: dict[int, int], found: dict[Place, ConsumedRecord]
    ) -> None:
        partition, offset, error = message.partition() or 0, message.offset() or 0, message.error()
        if error is not None:
            raise_lasting(error)
        ended = error is not None and error.code() == KafkaError._PARTITION_EOF
        if error is None and (partition, offset) in places:
            found[partition, offset] = locate(message, self._names, self._codec)
        if ended or (error is None and offset >= last.get(partition, offset)):
            last.pop(partition, None)

    def _assign(self, places: set[Place]) -> dict[int, int]:
        """Begin to read the partitions that hold some of `places`; the last wanted offset of each."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for partition in sorted({p for p, _ in places if 0 <= p < self._partitions}):
            low, high = watermarks(self._consumer, (self._topic, partition))
            kept = [offset for p, offset in places if p == partition and low <= offset < high]
            if kept:
                first[partition], last[partition] = min(kept), max(kept)
        self._consumer.assign([TopicPartition(self._topic, p, offset) for p, offset in first.items()])
        return last
