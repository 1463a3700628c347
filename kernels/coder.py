"""Coders: from the class streams of a block to bytes and back, each with its code on the wire; and encoders' settings.

A coder sees gaps and steps class by class and nothing of the weights, so that its bytes can be checked and decoded
before, or elsewhere than, the weights that they change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pcodec import ChunkConfig, standalone

from tidemill.kernels.classes import ClassStreams, Counts
from tidemill.kernels.elements import DeltaError, Values
from tidemill.kernels.wire import WireReader, compress, decompress, varint

CoderChoice = Literal["auto", "rans", "pcodec", "zstd"]
DigestChoice = Literal["xxh3", "blake3"]

BLOCK_ELEMENTS = 1 << 24
"""Elements of the largest block; memory on both sides is bounded by it."""


@dataclass(frozen=True, slots=True)
class CodecSettings:
    """How blocks are cut, coded and sealed. A block says of itself how it was made: nothing here is needed to decode.

    Raises DeltaError for a block size that no decoder takes.
    """

    block_elements: int = BLOCK_ELEMENTS
    """Largest number of elements of a block, 1 to `BLOCK_ELEMENTS`."""
    coder: CoderChoice = "auto"
    """Entropy coder of sparse blocks; "auto" takes the smallest."""
    digest: DigestChoice = "xxh3"
    """Digest over a block's bytes: xxh3-128 finds damage; blake3 also withstands malice."""

    def __post_init__(self) -> None:
        if not 0 < self.block_elements <= BLOCK_ELEMENTS:
            raise DeltaError(f"blocks have 1 to {BLOCK_ELEMENTS} elements, not {self.block_elements}")


class Coder(ABC):
    """One way to code class streams."""

    code: ClassVar[int]
    """Its number in a block."""

    @abstractmethod
    def encode(self, streams: ClassStreams) -> bytes:
        """The streams' gaps and steps as bytes; their counts are known to the decoder."""

    @abstractmethod
    def decode(self, payload: memoryview, counts: Counts, n_elements: int) -> ClassStreams:
        """The inverse of `encode`, for the `counts` (i8[classes]) of a block of `n_elements`.

        Memory is bounded by the counts. Raises DeltaError and nothing else when the bytes do not hold exactly that, or
        a gap is longer than the block.
        """


ESCAPE = 255


class ZstdCoder(Coder):
    """The portable coder: numpy and zstandard, nothing compiled here. Larger than the others, readable anywhere.

    small      varint length, then one frame: u1 min(gap, 255) of every change, then u1 min(step, 255) of every change
    large      only where some are 255: one frame of u4 little-endian, the rest of each above 255, in order
    """

    code: ClassVar[int] = 3

    def encode(self, streams: ClassStreams) -> bytes:
        values = np.concatenate((streams.gaps, streams.steps))
        small = compress(np.minimum(values, ESCAPE).astype(np.uint8).tobytes())
        large = (values[values >= ESCAPE] - np.uint32(ESCAPE)).astype("<u4")
        return varint(len(small)) + small + (compress(large.tobytes()) if large.size else b"")

    def decode(self, payload: memoryview, counts: Counts, n_elements: int) -> ClassStreams:
        source, changed = WireReader(payload), int(counts.sum())
        values = np.frombuffer(decompress(source.take(source.varint()), 2 * changed), np.uint8).astype(np.uint32)
        escaped, rest = np.flatnonzero(values == ESCAPE), source.rest()
        if escaped.size:
            large = np.frombuffer(decompress(rest, 4 * escaped.size), "<u4").astype(np.uint64) + np.uint64(ESCAPE)
            if large.max() > np.uint64(2**32 - 1):
                raise DeltaError(f"a value of {large.max()} in a stream of 32-bit values")
            values[escaped] = large.astype(np.uint32)
        elif len(rest):
            raise DeltaError(f"{len(rest)} bytes follow the streams")
        return ClassStreams(counts, *checked(values[:changed], values[changed:], n_elements))


def checked(gaps: Values, steps: Values, n_elements: int) -> tuple[Values, Values]:
    """Gaps and steps, or DeltaError where a gap is longer than the block."""
    if gaps.size and int(gaps.max()) >= n_elements:
        raise DeltaError(f"a gap of {gaps.max()} in a block of {n_elements} elements: a stream leaves its block")
    return gaps, steps


class PcodecCoder(Coder):
    """The coder for gaps of any distribution: pcodec, which sends the bins that it finds.

    gaps       varint length, then a pcodec file of u4
    steps      a pcodec file of u4
    """

    code: ClassVar[int] = 2

    def encode(self, streams: ClassStreams) -> bytes:
        gaps: bytes = standalone.simple_compress(streams.gaps, ChunkConfig())
        steps: bytes = standalone.simple_compress(streams.steps, ChunkConfig())
        return varint(len(gaps)) + gaps + steps

    def decode(self, payload: memoryview, counts: Counts, n_elements: int) -> ClassStreams:
        source, changed = WireReader(payload), int(counts.sum())
        gaps = _numbers(source.take(source.varint()), changed)
        return ClassStreams(counts, *checked(gaps, _numbers(source.rest(), changed), n_elements))


def _numbers(data: memoryview, n: int) -> Values:
    """Exactly `n` numbers, in memory that is allocated here."""
    numbers = np.zeros(n, np.uint32)
    try:
        progress = standalone.simple_decompress_into(bytes(data), numbers)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not even an Exception
        raise DeltaError(f"not a pcodec stream: {error}") from error
    if progress.n_processed != n or not progress.finished:
        raise DeltaError(f"a pcodec stream of other than {n} numbers")
    return numbers
