"""Creating and checking topics against the catalogue, and waiting for a broker.

`create_topics` only ever adds. A topic that exists with other partitions or settings is drift: it is reported, never
changed, since partition counts decide where keys lie.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs re-export nothing
    AdminClient,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from tidemill.schemas.catalogue import CATALOGUE, DEAD_LETTER_RETENTION_MS, Names
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.access import check_access

REQUEST_TIMEOUT_S = 20.0
POLL_S = 0.05


class BrokerUnreachable(ConnectionError):
    """No broker answered."""


@dataclass(frozen=True, slots=True)
class WantedTopic:
    """A topic as the catalogue wants it, under its full name."""

    name: str
    partitions: int
    config: dict[str, str]


@dataclass(frozen=True, slots=True)
class TopicState:
    """What a check found of one topic."""

    name: str
    partitions: int
    drift: list[str]
    """Differences from the catalogue; empty when it is as declared."""


def admin_client(kafka: KafkaSettings) -> AdminClient:
    """An admin client on the configured brokers."""
    return AdminClient({"bootstrap.servers": kafka.address(), "client.id": "tidemill-admin", **kafka.client_options})


def wait_for_broker(kafka: KafkaSettings, deadline_s: float = 30.0) -> int:
    """Wait until the admin API answers; the number of brokers.

    Raises past the deadline: AccessRefused when they let nobody in with these settings, else BrokerUnreachable.
    """
    client = admin_client(kafka)
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            return len(client.list_topics(timeout=2.0).brokers)
        except KafkaException as error:
            if time.monotonic() > deadline:
                check_access(kafka)
                raise BrokerUnreachable(
                    f"no Kafka broker answered at {kafka.address()} within {deadline_s:g} s: is it running? "
                    "`tidemill stack up` starts a local one"
                ) from error


def wanted_topics(kafka: KafkaSettings) -> Iterator[WantedTopic]:
    """Every topic of the catalogue with its dead-letter topic."""
    names = Names(kafka.topic_prefix)
    for spec in CATALOGUE.values():
        partitions = spec.partition_count(kafka)
        yield WantedTopic(names.of(spec.topic), partitions, spec.topic_config())
        if spec.dead_letters:
            retention = {"cleanup.policy": "delete", "retention.ms": str(DEAD_LETTER_RETENTION_MS)}
            yield WantedTopic(names.dead_letter(spec.topic), partitions, retention)


def create_topics(kafka: KafkaSettings) -> list[str]:
    """Create what is missing and wait until it can be used; the names created.

    Raises KafkaException when the broker refuses, TimeoutError when partitions stay without a leader.
    """
    new = [
        NewTopic(t.name, t.partitions, replication_factor=kafka.replication_factor, config=t.config)
        for t in wanted_topics(kafka)
    ]
    client = admin_client(kafka)
    created = []
    for name, future in client.create_topics(new, request_timeout=REQUEST_TIMEOUT_S).items():
        try:
            future.result()
            created.append(name)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
    wait_until_led(client, {topic.topic for topic in new})
    return created


def wait_until_led(client: AdminClient, names: set[str]) -> None:
    """The broker acknowledges a topic before its partitions have leaders; a client that comes at once would fail."""
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    while not names <= _led(client):
        if time.monotonic() > deadline:
            missing = sorted(names - _led(client))
            raise TimeoutError(f"topics without leaders {REQUEST_TIMEOUT_S:g} s after their creation: {missing}")
        time.sleep(POLL_S)


def _led(client: AdminClient) -> set[str]:
    topics = client.list_topics(timeout=REQUEST_TIMEOUT_S).topics
    return {name for name, t in topics.items() if t.partitions and all(p.leader >= 0 for p in t.partitions.values())}


def check_topics(kafka: KafkaSettings) -> list[TopicState]:
    """Compare the broker's topics with the catalogue."""
    client = admin_client(kafka)
    existing = client.list_topics(timeout=REQUEST_TIMEOUT_S).topics
    wanted = list(wanted_topics(kafka))
    present = [t.name for t in wanted if t.name in existing]
    resources = {name: ConfigResource(ResourceType.TOPIC, name) for name in present}
    described = client.describe_configs(list(resources.values())) if resources else {}
    settings = {r.name: {k: e.value for k, e in f.result().items()} for r, f in described.items()}
    return [_state(t, len(existing[t.name].partitions) if t.name in existing else 0, settings) for t in wanted]


def _state(wanted: WantedTopic, partitions: int, settings: dict[str, dict[str, str]]) -> TopicState:
    if not partitions:
        return TopicState(wanted.name, 0, ["missing"])
    drift = [] if partitions == wanted.partitions else [f"partitions {partitions}, declared {wanted.partitions}"]
    actual = settings[wanted.name]
    drift += [f"{k} {actual.get(k)}, declared {v}" for k, v in wanted.config.items() if actual.get(k) != v]
    return TopicState(wanted.name, partitions, drift)
