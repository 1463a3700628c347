"""Writing the results of a replayed stage beside the live log.

They go to topics under a prefix of their own, which must be empty, and carry the headers of a replay. Their timestamps
are those of the records by which they were decided, so that two replays write the same.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from tidemill.schemas.admin import create_topics
from tidemill.schemas.catalogue import CATALOGUE, Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.producer import RecordProducer
from tidemill.schemas.reader import LogReader
from tidemill.schemas.replayed import replay_headers
from tidemill.streams.offline_log import Emitted

CLIENT = "tidemill-replay"


def write_results(kafka: KafkaSettings, emitted: Sequence[Emitted], prefix: str) -> str:
    """Write results under `prefix`, whose topics are made where they are missing; the id of the replay.

    Raises ValueError for the prefix of the live topics, and for topics that hold records.
    """
    target = target_of(kafka, prefix)
    create_topics(target)
    topics = sorted({one.emit.topic for one in emitted})
    _require_empty(target, topics)
    replay_id, names = uuid.uuid4().hex[:12], Names(kafka.topic_prefix)
    with RecordProducer(target, CLIENT) as producer:
        for one in emitted:
            cause = one.cause
            producer.send(
                one.emit.topic,
                one.emit.record,
                key=one.emit.key,
                partition=one.emit.partition,
                timestamp_ms=one.at_ms,
                headers=replay_headers(replay_id, names.of(cause.topic), cause.partition, cause.offset),
            )
    return replay_id


def target_of(kafka: KafkaSettings, prefix: str) -> KafkaSettings:
    """The settings of a log under another prefix, with as many partitions. Raises ValueError for the live prefix."""
    if prefix == kafka.topic_prefix:
        raise ValueError(f"--into {prefix!r} is the prefix of the live topics, which a replay never writes to")
    sections = {**kafka.model_dump(), "topic_prefix": prefix, "partitions": _partitions(kafka)}
    return KafkaSettings(**sections)


def _partitions(kafka: KafkaSettings) -> int | None:
    """The partition count of the live keyed topics, where it is not the catalogue's."""
    with LogReader(kafka, [Topic.GROUPS], client_id=CLIENT) as reader:
        count = len(reader.partitions(Topic.GROUPS))
    return None if count == CATALOGUE[Topic.GROUPS].partitions else count


def _require_empty(kafka: KafkaSettings, topics: Sequence[Topic]) -> None:
    if not topics:
        return
    with LogReader(kafka, topics, client_id=CLIENT) as reader:
        filled = sorted({topic.value for (topic, _), end in reader.end_offsets().items() if end})
    if filled:
        raise ValueError(f"{', '.join(filled)} under {kafka.topic_prefix!r} hold records: give --into a new prefix")
