"""A member of a consumer group; offsets are committed by the caller, when the work is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from confluent_kafka import Consumer, TopicPartition

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.client_settings import consumer_settings, raise_lasting
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.located import Located, locate


class GroupConsumer:
    """A member of a consumer group; offsets are committed by the caller, when the work is done."""

    def __init__(
        self,
        kafka: KafkaSettings,
        group_id: str,
        topics: Iterable[Topic],
        *,
        client_id: str,
        codec: Codec | None = None,
    ) -> None:
        self._names = Names(kafka.topic_prefix)
        self._codec = codec or Codec(kafka.registry_url)
        self._consumer = Consumer(consumer_settings(kafka, client_id, kafka.topic_prefix + group_id))
        self._consumer.subscribe([self._names.of(topic) for topic in topics])

    def poll(self, timeout_s: float = 0.1, max_records: int = 100) -> list[Located]:
        """The next records of the partitions assigned to this member."""
        found = []
        for message in self._consumer.consume(max_records, timeout_s):
            error = message.error()
            if error is not None:
                raise_lasting(error)
                continue
            found.append(locate(message, self._names, self._codec))
        return found

    def commit(self, offsets: Mapping[tuple[Topic, int], int]) -> None:
        """Commit the next offsets to read, by (topic, partition); waits for the broker."""
        if offsets:
            places = [TopicPartition(self._names.of(topic), p, offset) for (topic, p), offset in offsets.items()]
            self._consumer.commit(offsets=places, asynchronous=False)

    def pause(self) -> None:
        """Fetch nothing more from the partitions owned now; polling goes on and keeps the membership alive."""
        self._consumer.pause(self._consumer.assignment())

    def resume(self) -> None:
        """Fetch again after `pause`."""
        self._consumer.resume(self._consumer.assignment())

    def assignment(self) -> set[tuple[Topic, int]]:
        """Partitions that this member owns now."""
        return {(self._names.parse(tp.topic), tp.partition) for tp in self._consumer.assignment()}

    def close(self) -> None:
        """Leave the group."""
        self._consumer.close()
