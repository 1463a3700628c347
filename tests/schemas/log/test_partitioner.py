"""Keys are in the partitions that Java's client, aiokafka and librdkafka compute."""

from __future__ import annotations

import random

import pytest
from aiokafka.partitioner import murmur2 as aiokafka_murmur2
from hypothesis import example, given
from hypothesis import strategies as st

from tidemill.schemas.catalogue import CATALOGUE, Topic
from tidemill.schemas.log.producer import RecordProducer, partition_of
from tidemill.schemas.records import Document

# From `UtilsTest.testMurmur2` of Apache Kafka's Java client.
JAVA = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}


@pytest.mark.parametrize("key", JAVA)
@pytest.mark.parametrize("partitions", [1, 7, 2**31 - 1])
def test_the_partition_is_that_of_the_java_client(key: str, partitions: int):
    assert partition_of(key, partitions) == (JAVA[key] & 0x7FFFFFFF) % partitions


@given(st.text(max_size=70), st.integers(1, 2**31 - 1))
@example("", 6)
@example("with\x00zero", 2**31 - 1)
def test_the_partition_is_that_of_aiokafka(key: str, partitions: int):
    assert partition_of(key, partitions) == (aiokafka_murmur2(key.encode()) & 0x7FFFFFFF) % partitions


def test_a_topic_without_partitions_is_an_error():
    with pytest.raises(ValueError, match="0 partitions"):
        partition_of("key", 0)


def test_librdkafka_puts_a_key_where_it_is_computed(kafka):
    settings = kafka.fresh(4, [Topic.DOCUMENTS])
    source = random.Random(11)
    keys = ["".join(source.choices("abcdef0123-é", k=source.randrange(1, 40))) for _ in range(300)]
    with RecordProducer(settings, "test-partitioner") as producer:
        written = producer.send_acked(Topic.DOCUMENTS, [(key, Document(key, "test", "")) for key in keys])
    partitions = CATALOGUE[Topic.DOCUMENTS].partitions
    assert [position.partition for position in written] == [partition_of(key, partitions) for key in keys]
    assert len({position.partition for position in written}) == partitions
