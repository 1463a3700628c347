"""Dead letters: a value that cannot be used is kept whole, with its place and the reason, and the stream goes on."""

from __future__ import annotations

from tidemill.schemas.catalogue import Names
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import RecordProducer

HEADER_TOPIC = "tidemill-source-topic"
HEADER_PARTITION = "tidemill-source-partition"
HEADER_OFFSET = "tidemill-source-offset"
HEADER_TIMESTAMP = "tidemill-source-timestamp-ms"
HEADER_REASON = "tidemill-reason"
HEADER_APPLICATION = "tidemill-application"


def dead_letter_headers(names: Names, located: ConsumedRecord, reason: str, application: str) -> dict[str, bytes]:
    """Headers that say where a dead letter came from and why it is one."""
    return {
        HEADER_TOPIC: names.of(located.topic).encode(),
        HEADER_PARTITION: str(located.partition).encode(),
        HEADER_OFFSET: str(located.offset).encode(),
        HEADER_TIMESTAMP: str(located.timestamp_ms).encode(),
        HEADER_REASON: reason.encode(),
        HEADER_APPLICATION: application.encode(),
    }


def send_dead_letter(
    producer: RecordProducer, names: Names, located: ConsumedRecord, reason: str, application: str
) -> None:
    """Write the original bytes of `located` to its topic's dead-letter topic.

    It has the time of its writing: with that of a record of long ago the log would drop it at once.
    """
    producer.send_bytes(
        names.dead_letter(located.topic),
        located.value,
        key=located.key,
        headers=dead_letter_headers(names, located, reason, application),
    )
