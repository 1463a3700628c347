"""Hands a decoded delta to the ranks of an engine: one anonymous file in memory, which every rank maps.

Written by the server, which decoded the delta once; each rank reads it beside its decoding of tokens. It is whole or
refused: a rank checks the digest before it uses an element. It has no name in a directory, so that it takes no room of
a small /dev/shm and is gone with the server, however that ends.

Layout: the header's length (u8, little-endian), the header (JSON: [name, changed elements, bytes of a pattern] of each
change), then the indices (i8) and the patterns of each change. Every part begins at a multiple of 8 bytes.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import xxhash

from tidemill.kernels.weights.mirror import ElementChange

_ALIGNED = 8


class DamagedChangesError(ValueError):
    """What was handed over is not what the server wrote."""


@contextmanager
def handed_over(changes: Sequence[ElementChange]) -> Iterator[tuple[str, str]]:
    """Put changes where every process of this user can read them: the path and the digest, good within the context."""
    digest = xxhash.xxh3_128()
    with os.fdopen(os.memfd_create("tidemill-changes"), "wb") as file:
        for part in _parts(changes):
            # The padding keeps every array on the boundary that its elements need.
            for piece in (part, bytes(-part.nbytes % _ALIGNED)):
                file.write(piece)
                digest.update(piece)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}", digest.hexdigest()


def taken_over(path: str, digest: str) -> list[ElementChange]:
    """The changes of `handed_over`, in its memory. Raises DamagedChangesError, or OSError when it is not there."""
    with open(path, "rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if xxhash.xxh3_128(data).hexdigest() != digest:
        raise DamagedChangesError("the changes in shared memory are not those that were written: their digest differs")
    length = int.from_bytes(data[:_ALIGNED], "little")
    at, changes = _after(_ALIGNED, length), []
    for name, count, width in json.loads(bytes(data[_ALIGNED : _ALIGNED + length])):
        indices = np.frombuffer(data, "<i8", count, at)
        at = _after(at, indices.nbytes)
        bits = np.frombuffer(data, f"<u{width}", count, at)
        at = _after(at, bits.nbytes)
        changes.append(ElementChange(name, indices, bits))
    return changes


def _after(at: int, length: int) -> int:
    return at + length + -length % _ALIGNED


def _parts(changes: Sequence[ElementChange]) -> Iterator[memoryview]:
    described = [[change.name, change.indices.size, change.bits.itemsize] for change in changes]
    header = json.dumps(described).encode()
    yield memoryview(len(header).to_bytes(_ALIGNED, "little"))
    yield memoryview(header)
    for change in changes:
        for array in (change.indices.astype("<i8", copy=False), change.bits):
            yield np.ascontiguousarray(array).view(np.uint8).data
