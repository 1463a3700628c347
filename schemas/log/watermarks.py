"""Where partitions begin and end, asked over a connection that carries nothing else.

A broker answers the requests of one connection in their order. Behind a fetch the answer would come after all that the
fetch brings, over a slow link many seconds later; and a request that is not answered in time costs librdkafka the whole
connection, with what had come of the fetch.
"""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka import Consumer

from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import groupless_settings
from tidemill.schemas.log.partitions import watermarks
from tidemill.schemas.log.stall import Place


class LogEnds:
    """Asks for the ends of partitions; connects at the first question.

    Args:
        client_id: under which it connects.
    """

    def __init__(self, kafka: KafkaSettings, client_id: str) -> None:
        self._kafka, self._client_id = kafka, client_id
        self._client: Consumer | None = None

    def bounds(self, places: Iterable[Place], timeout_s: float) -> dict[Place, tuple[int, int]]:
        """First offset that each partition keeps, and its end for readers of what is committed.

        Args:
            timeout_s: how long the answer for one partition may take.

        Raises KafkaException when the log does not answer for all of them in time.
        """
        if self._client is None:
            # The admin client's own request is not used: after a time-out it gives offsets that mean nothing, and after
            # a new election of the leader it asks with the old epoch for ever (librdkafka 2.16).
            self._client = Consumer(groupless_settings(self._kafka, self._client_id))
        return {place: watermarks(self._client, place, timeout_s) for place in places}

    def close(self) -> None:
        """Give the connection back."""
        if self._client is not None:
            self._client.close()
            self._client = None
