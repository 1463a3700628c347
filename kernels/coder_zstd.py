"""The portable coder: numpy and zstandard, nothing compiled here. Larger than the others, readable anywhere.

small      varint length, then one frame: u1 min(gap, 255) of every change, then u1 min(step, 255) of every change
large      only where some are 255: one frame of u4 little-endian, what each of those is above 255, in order
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tidemill.kernels.classes import ClassStreams, Counts
from tidemill.kernels.coder import Coder
from tidemill.kernels.elements import DeltaError, Values
from tidemill.kernels.frames import compress, decompress
from tidemill.kernels.wire import WireReader, varint

ESCAPE = 255


class ZstdCoder(Coder):
    """Bytes with escapes in zstandard frames."""

    code: ClassVar[int] = 3

    def encode(self, streams: ClassStreams) -> bytes:
        """See `Coder.encode`."""
        values = np.concatenate((streams.gaps, streams.steps))
        small = compress(np.minimum(values, ESCAPE).astype(np.uint8).tobytes())
        large = (values[values >= ESCAPE] - np.uint32(ESCAPE)).astype("<u4")
        return varint(len(small)) + small + (compress(large.tobytes()) if large.size else b"")

    def decode(self, payload: memoryview, counts: Counts, n_elements: int) -> ClassStreams:
        """See `Coder.decode`."""
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
