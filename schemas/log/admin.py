"""Functions that create topics, compare them with the catalogue, and wait for a broker.

`create_topics` only adds topics. An existing topic with other partitions or settings is drift: it is reported, never
changed, because the partition count decides in which partition a key is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs re-export nothing
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from tidemill.schemas.catalogue import CATALOGUE, DEAD_LETTER_RETENTION_MS, Names
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.access import check_access
from tidemill.schemas.log.client_settings import MAX_LETTER_BYTES

REQUEST_TIMEOUT_S = 20.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class TopicState:
    """The result of the check of one topic."""

    name: str
    partitions: int
    drift: list[str]
    """Differences from the catalogue; empty if there are none."""


def admin_client(kafka: KafkaSettings) -> AdminClient:
    """Return an admin client of the configured brokers."""
    return AdminClient({"bootstrap.servers": kafka.address(), "client.id": "tidemill-admin", **kafka.client_options})


def wait_for_broker(kafka: KafkaSettings, deadline_s: float = 30.0) -> int:
    """Wait until the admin API answers, and return the number of brokers.

    Raises after the deadline: AccessRefused if the brokers refuse these settings, otherwise ConnectionError.
    """
    client = admin_client(kafka)
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            return len(client.list_topics(timeout=2.0).brokers)
        except KafkaException as error:
            if time.monotonic() > deadline:
                check_access(kafka)
                raise ConnectionError(
                    f"no Kafka broker answered at {kafka.address()} within {deadline_s:g} s: is it running? "
                    "`tidemill stack up` starts a local one"
                ) from error


def wanted_topics(kafka: KafkaSettings) -> list[NewTopic]:
    """Return the definitions of all topics of the catalogue and of their dead-letter topics."""
    names = Names(kafka.topic_prefix)
    wanted = [(names.of(spec.topic), spec, spec.topic_config()) for spec in CATALOGUE.values()]
    letters = {
        "cleanup.policy": "delete",
        "retention.ms": str(DEAD_LETTER_RETENTION_MS),
        "max.message.bytes": str(MAX_LETTER_BYTES),
    }
    wanted += [(names.dead_letter(spec.topic), spec, letters) for spec in CATALOGUE.values()]
    return [
        NewTopic(name, spec.partition_count(kafka), replication_factor=kafka.replication_factor, config=config)
        for name, spec, config in wanted
    ]


def create_topics(kafka: KafkaSettings) -> list[str]:
    """Create the missing topics of the catalogue, and return their names. Raises as `create_missing`."""
    return create_missing(admin_client(kafka), wanted_topics(kafka))


def create_missing(client: AdminClient, new: list[NewTopic]) -> list[str]:
    """Create the topics that do not exist, wait until all can be used, and return the names of the created ones.

    Raises RuntimeError if the broker refuses, TimeoutError if partitions still have no leader.
    """
    created = []
    for name, future in client.create_topics(new, request_timeout=REQUEST_TIMEOUT_S).items():
        try:
            future.result()
            created.append(name)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise RuntimeError(f"topic {name} cannot be created: {error.args[0].str()}") from error
    wait_until_led(client, {topic.topic for topic in new})
    return created


def wait_until_led(client: AdminClient, names: set[str]) -> None:
    """Wait until all partitions have leaders that serve them.

    A topic is acknowledged earlier, and a client would then fail. If a broker refuses a producer's first batch because
    it does not serve the partition yet, and accepts the second one, the first one is lost (KAFKA-15591).
    """
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    while missing := names - _led(client, names):
        if time.monotonic() > deadline:
            raise TimeoutError(f"topics without leaders for {REQUEST_TIMEOUT_S:g} s: {sorted(missing)}")
        time.sleep(POLL_S)


def _led(client: AdminClient, names: set[str]) -> set[str]:
    """Return the topics in `names` whose partitions all have a leader that answers with the first offset."""
    topics = client.list_topics(timeout=REQUEST_TIMEOUT_S).topics
    found = {name: topics[name].partitions for name in names & topics.keys()}
    led = {name for name, parts in found.items() if parts and all(part.leader >= 0 for part in parts.values())}
    first = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
    wanted = {TopicPartition(name, number): first for name in led for number in found[name]}
    answers = client.list_offsets(wanted, request_timeout=REQUEST_TIMEOUT_S) if wanted else {}
    for place, answer in answers.items():
        try:
            answer.result()
        except KafkaException:
            led.discard(place.topic)
    return led


def check_topics(kafka: KafkaSettings) -> list[TopicState]:
    """Compare the broker's topics with the catalogue, and return the state of each."""
    client = admin_client(kafka)
    existing = client.list_topics(timeout=REQUEST_TIMEOUT_S).topics
    wanted = wanted_topics(kafka)
    resources = [ConfigResource(ResourceType.TOPIC, topic.topic) for topic in wanted if topic.topic in existing]
    described = client.describe_configs(resources) if resources else {}
    settings = {r.name: {k: e.value for k, e in f.result().items()} for r, f in described.items()}
    states = []
    for topic in wanted:
        declared = {
            "partitions": str(topic.num_partitions),
            "replication factor": str(topic.replication_factor),
            **(topic.config or {}),
        }
        found = existing[topic.topic].partitions.values() if topic.topic in existing else ()
        partitions, factors = len(found), sorted({len(one.replicas) for one in found})
        actual = settings.get(topic.topic, {}) | {
            "partitions": str(partitions),
            "replication factor": " or ".join(map(str, factors)),
        }
        drift = [f"{key} {actual.get(key)}, declared {v}" for key, v in declared.items() if actual.get(key) != v]
        states.append(TopicState(topic.topic, partitions, drift if partitions else ["missing"]))
    return states
