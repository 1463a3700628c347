"""Writing the results of a replayed stage beside the live log.

They go to topics under a prefix of their own, which must be empty and read by nobody, and carry the headers of a
replay. Their timestamps are those of the records by which they were decided, so that two replays write the same; and
the topics keep them at any age.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # its stubs re-export nothing

from tidemill.consumers.operate.replay.target import Target
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.admin import REQUEST_TIMEOUT_S, admin_client, wait_until_led
from tidemill.schemas.log.consumed import replay_headers
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.streams.offline import CLIENT, Emitted

KEPT = {"cleanup.policy": "delete", "retention.ms": "-1"}


def write_results(kafka: KafkaSettings, topic: Topic, emitted: Sequence[Emitted], prefix: str) -> str:
    """Write results into `topic` under `prefix`, as partitioned as the live one; the id of the replay.

    Raises Refused when the prefix is that of live topics, when records lie under it, or a consumer group reads there.
    """
    Target(kafka, prefix).check(None)
    target = kafka.model_copy(update={"topic_prefix": prefix})
    _create(kafka, target, topic)
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
                headers=replay_headers(replay_id, names.of(Topic(cause.topic)), cause.partition, cause.offset),
            )
    return replay_id


def _create(kafka: KafkaSettings, target: KafkaSettings, topic: Topic) -> None:
    with LogReader(kafka, [topic], client_id=CLIENT) as reader:
        partitions = len(reader.partitions(topic))
    client, full = admin_client(target), Names(target.topic_prefix).of(topic)
    if full in client.list_topics(timeout=REQUEST_TIMEOUT_S).topics:
        return
    new = NewTopic(full, partitions, replication_factor=target.replication_factor, config=KEPT)
    client.create_topics([new], request_timeout=REQUEST_TIMEOUT_S)[full].result()
    wait_until_led(client, {full})
