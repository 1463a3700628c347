"""The catalogue declares every topic as the design requires."""

from __future__ import annotations

import dataclasses

import pytest

from tidemill.schemas.catalogue import CATALOGUE, Names, Topic, co_partitioned
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import Tick, UserRequest


def test_every_topic_is_declared_once():
    assert set(CATALOGUE) == set(Topic)


@pytest.mark.parametrize("topic", Topic)
def test_keys_are_fields_of_the_records(topic: Topic):
    spec = CATALOGUE[topic]
    for cls in spec.values:
        # Ticks and copies of users' requests are control records, under separate keys.
        assert cls in (Tick, UserRequest) or spec.key in {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("partitions", [None, 1, 5])
@pytest.mark.parametrize("pair", [(Topic.ROLLOUTS, Topic.GROUPS), (Topic.INTERACTIONS, Topic.FEEDBACK)])
def test_what_is_joined_is_co_partitioned(partitions: int | None, pair: tuple[Topic, Topic]):
    assert co_partitioned(*pair, KafkaSettings(partitions=partitions))


ORDERED = [Topic.MANIFESTS, Topic.STEPS, Topic.ACKS, Topic.GATE, Topic.OUTCOMES, Topic.ONLINE_BATCHES]


@pytest.mark.parametrize("topic", ORDERED)
def test_chains_stay_totally_ordered(topic: Topic):
    assert CATALOGUE[topic].partition_count(KafkaSettings(partitions=9)) == 1


@pytest.mark.parametrize("topic", Topic)
def test_names_go_both_ways(topic: Topic):
    names = Names("shadow.")
    assert names.parse(names.of(topic)) is topic
    assert names.dead_letter(topic) == f"shadow.{topic.value}.dlq"


@pytest.mark.parametrize("full", ["other.rollouts", "shadow.unknown", "shadow.", ""])
def test_foreign_names_are_refused(full: str):
    with pytest.raises(ValueError):
        Names("shadow.").parse(full)


def test_a_prefix_that_kafka_would_refuse_is_refused_early():
    with pytest.raises(ValueError, match="letters"):
        KafkaSettings(topic_prefix="no spaces")


def test_a_missing_address_names_the_choices():
    with pytest.raises(ValueError, match="tidemill stack up"):
        KafkaSettings().address()
