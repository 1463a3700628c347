"""Keys are in the partitions that Java's client, aiokafka and librdkafka compute."""

from __future__ import annotations

import random

import pytest
from aiokafka.partitioner import murmur2 as aiokafka_murmur2
from hypothesis import example, given
from hypothesis import strategies as st

from tidemill.schemas.catalogue import CATALOGUE, Topic
from tidemill.schemas.log.producer import RecordProducer, murmur2, partition_of
from tidemill.schemas.records import Document

# From `UtilsTest.testMurmur2` of Apache Kafka's Java client.
JAVA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize("data", JAVA)
def test_the_hash_is_that_of_the_java_client(data: bytes):
    assert murmur2(data) == JAVA[data] & 0xFFFFFFFF


@given(st.binary(max_size=70))
@example(b"")
def test_the_hash_is_that_of_aiokafka(data: bytes):
    assert murmur2(data) == aiokafka_murmur2(data) & 0xFFFFFFFF


def test_librdkafka_puts_a_key_where_it_is_computed(kafka):
    settings = kafka.fresh(4, [Topic.DOCUMENTS])
    source = random.Random(11)
    keys = ["".join(source.choices("abcdef0123-é", k=source.randrange(1, 40))) for _ in range(300)]
    with RecordProducer(settings, "test-partitioner") as producer:
        written = producer.send_acked(Topic.DOCUMENTS, [(key, Document(key, "test", "")) for key in keys])
    partitions = CATALOGUE[Topic.DOCUMENTS].partitions
    assert [position.partition for position in written] == [partition_of(key, partitions) for key in keys]
    assert len({position.partition for position in written}) == partitions
