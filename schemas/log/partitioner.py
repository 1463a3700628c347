"""The partition of a key, as Java's client, Faust and librdkafka's `murmur2_random` choose it.

For records whose key is longer than what they are joined by: their partition is computed, and given to the client.
Source: `Utils.murmur2` and `BuiltInPartitioner.partitionForKey` of Apache Kafka's Java client.
"""

from __future__ import annotations

import struct

_SEED = 0x9747B28C
_MULTIPLIER = 0x5BD1E995
_MASK = 0xFFFFFFFF
_POSITIVE = 0x7FFFFFFF


def murmur2(data: bytes) -> int:
    """The 32-bit murmur2 hash of Kafka's clients, unsigned (Java prints the same bits signed)."""
    length = len(data)
    state = _SEED ^ length
    whole = length & ~3
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        mixed = word * _MULTIPLIER & _MASK
        state = (state * _MULTIPLIER ^ (mixed ^ mixed >> 24) * _MULTIPLIER) & _MASK
    if length & 3:
        state = (state ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER & _MASK
    state = (state ^ (state >> 13)) * _MULTIPLIER & _MASK
    return state ^ (state >> 15)


def partition_of(key: str, partitions: int) -> int:
    """The partition, from 0, of a record with this key in a topic of `partitions` partitions."""
    return (murmur2(key.encode()) & _POSITIVE) % partitions
