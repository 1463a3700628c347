"""Which segments of a block hold changes at all, where that is worth saying: a few rows of an embedding moved.

u1         0: all are active; 1: a bit for each segment, lowest first; 2: varint length and a frame of these bits
"""

from __future__ import annotations

import numpy as np

from tidemill.kernels.classes import SEGMENT, Active, all_active, segments
from tidemill.kernels.compiled import compiled
from tidemill.kernels.elements import DeltaError
from tidemill.kernels.fingerprint import Indices
from tidemill.kernels.frames import compress, decompress
from tidemill.kernels.information import BIT, choice_cost, log2
from tidemill.kernels.wire import WireReader, varint

ALL, BITS, FRAME = 0, 1, 2
FIXED_COST = 300 * BIT


def find_active(indices: Indices, n_elements: int) -> Active:
    """The segments with changes, or all, whichever is cheaper, for ascending `indices` (i8[changed]) in the block."""
    active = np.zeros(segments(n_elements), np.uint8)
    _activate(indices, active)
    n_active = int(active.sum())
    saved = indices.size * (log2(active.size) - log2(n_active))
    return active if saved > choice_cost(active.size, n_active) + FIXED_COST else all_active(n_elements)


def write_active(active: Active) -> bytes:
    """The segments as bytes."""
    if active.all():
        return bytes([ALL])
    bits = np.packbits(active, bitorder="little").tobytes()
    frame = compress(bits)
    packed = varint(len(frame)) + frame
    return bytes([FRAME]) + packed if len(packed) < len(bits) else bytes([BITS]) + bits


def read_active(source: WireReader, n_elements: int) -> Active:
    """The inverse of `write_active`. Raises DeltaError."""
    form, n = source.byte(), segments(n_elements)
    size = -(-n // 8)
    if form == ALL:
        return all_active(n_elements)
    if form not in (BITS, FRAME):
        raise DeltaError(f"unknown form {form} of active segments")
    data = source.take(size) if form == BITS else decompress(source.take(source.varint()), size)
    return np.unpackbits(np.frombuffer(data, np.uint8), count=n, bitorder="little")


@compiled
def _activate(indices: Indices, active: Active) -> None:
    for i in range(indices.size):
        active[np.uint64(indices[i]) // np.uint64(SEGMENT)] = 1
