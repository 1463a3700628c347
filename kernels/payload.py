"""The payload of a block: the changed elements as bytes, in the smallest of several encodings.

    RAW        u1 0: the new patterns of all elements, little-endian; 1: a frame of their byte planes
    CONSTANT   u1 0: all elements become one pattern; 1: all change by one folded step; then the pattern or step, u4
    CLASSES    u1 coder; active segments; classes: the number after the first, a varint, and the first exponent of each
               of these, u1; for each class the number of changed elements, a varint; the coder's bytes

Active segments are listed if this saves bytes, for example if only a few rows of an embedding changed:

    u1         0: all are active; 1: a bit for each segment, lowest first; 2: varint length and a frame of these bits

The number of classes is chosen by cost. A class costs its share of the block's fields; it saves bytes because its
elements have their own probability of a change. Neighbouring classes are merged while a merge reduces the cost, the
largest reduction first.

A decoder knows the exact unpacked size before it unpacks, so hostile bytes cannot make it allocate memory.
The block's fingerprints prove that the new patterns are right.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from tidemill.kernels.backend import KernelBackend, backend_for
from tidemill.kernels.block import CoderChoice
from tidemill.kernels.classes import (
    MAX_CLASSES,
    SEGMENT,
    Active,
    ClassTable,
    all_active,
    count_active_exponents,
    segments,
    select_classes,
)
from tidemill.kernels.coder import CODERS, encode_streams
from tidemill.kernels.compiled import Bits, Counts, Indices, compiled
from tidemill.kernels.elements import AnyArray, ElementType, fold_steps, move
from tidemill.kernels.models import BIT, choice_cost, log2
from tidemill.kernels.wire import DeltaError, WireReader, compress, decompress, varint

RAW_SHARE = 4
"""If CLASSES needs less than 1 / 4 of the block's unencoded bytes, RAW is not tried."""
SAMPLE_RUN, SAMPLE_EVERY = 1 << 14, 8
"""In large blocks the exponents of one run in `SAMPLE_EVERY` are counted: this is enough for the choice of classes."""


class ElementChanges(NamedTuple):
    """Changed elements, on the device of the block: numpy arrays or PyTorch tensors."""

    indices: AnyArray
    """i8[changed], each once."""
    old: AnyArray
    """uN[changed]"""
    new: AnyArray
    """uN[changed]"""


class Encoding(IntEnum):
    """The encoding of a block's payload."""

    RAW = 1
    CONSTANT = 2
    CLASSES = 3


def pack(kind: ElementType, old: AnyArray, changes: ElementChanges, coder: CoderChoice) -> tuple[Encoding, bytes]:
    """Encode `changes` (in ascending order) of `old` (uN[n], contiguous).

    For tensors on a GPU only the changed elements are copied to the host, unless nearly all changed.
    """
    kernels = backend_for(old)
    constant = _pack_constant(kernels, kind, old, kernels.host(changes.new))
    if constant is not None:
        return Encoding.CONSTANT, constant
    active = find_active(kernels.host(changes.indices), len(old))
    changed = kernels.count_exponents(kind, changes.old)
    table = choose_table(_exponents(kernels, kind, old, active), changed)
    streams = kernels.split_classes(kind, old, changes.old, changes.new, changes.indices, table, active)
    code, coded = encode_streams(streams, coder)
    counts = b"".join(varint(count) for count in streams.counts.tolist())
    classes = b"".join((bytes([code]), write_active(active), write_table(table), counts, coded))
    if len(classes) * RAW_SHARE < len(old) * kind.bits.itemsize:
        return Encoding.CLASSES, classes
    new = kernels.host(old).copy()
    new[kernels.host(changes.indices)] = kernels.host(changes.new)
    stored = new.astype(kind.bits.newbyteorder("<"), copy=False)
    frame = compress(stored.view(np.uint8).reshape(-1, kind.bits.itemsize).T.tobytes())
    raw = b"\1" + frame if len(frame) < new.nbytes else b"\0" + stored.tobytes()
    return (Encoding.RAW, raw) if len(raw) < len(classes) else (Encoding.CLASSES, classes)


def unpack(
    encoding: int, payload: memoryview, kind: ElementType, old: Bits, n_changed: int, start: int
) -> ElementChanges:
    """Decode a payload for the block `old` (uN[n], contiguous): indices + `start`, old and new patterns.

    Raises DeltaError if the payload is malformed or does not change exactly `n_changed` elements.
    """
    source = WireReader(payload)
    if encoding == Encoding.CLASSES:
        code = source.byte()
        if code not in CODERS:
            raise DeltaError(f"unknown coder {code}: written by a newer version?")
        active = read_active(source, old.size)
        table = read_table(source, kind.exponents)
        counts = np.array([source.varint() for _ in range(int(table[-1]) + 1)], np.int64)
        if counts.sum() != n_changed:
            raise DeltaError(f"classes of {counts.sum()} changed elements where the block's header says {n_changed}")
        streams = CODERS[code].decode(source.rest(), counts, old.size)
        if n_changed and kind.width < 32 and int(streams.steps.max()) >> kind.width:
            raise DeltaError(f"a step of {streams.steps.max()} in a block of {kind.name}")
        return ElementChanges(*select_classes(kind, old, streams, table, active, start))
    if encoding == Encoding.RAW:
        little = kind.bits.newbyteorder("<")
        form, data, expected = source.byte(), source.rest(), old.size * kind.bits.itemsize
        if form > 1 or (form == 0 and len(data) != expected):
            raise DeltaError(f"raw patterns of form {form} in {len(data)} bytes, not {expected}")
        if form == 1:
            planes = np.frombuffer(decompress(data, expected), np.uint8).reshape(kind.bits.itemsize, -1)
            data = np.ascontiguousarray(planes.T).reshape(-1).data
        new = np.frombuffer(data, little).astype(kind.bits)
    elif encoding == Encoding.CONSTANT:
        form, value = source.byte(), int.from_bytes(source.take(4), "little")
        if form > 1 or value >> kind.width or len(source.rest()):
            raise DeltaError(f"a constant of form {form} and value {value} in a block of {kind.name}")
        new = move(kind, old, value) if form else np.full(old.size, value, kind.bits)
    else:
        raise DeltaError(f"unknown block encoding {encoding}: written by a newer version?")
    indices = np.flatnonzero(old != new)
    if indices.size != n_changed:
        raise DeltaError(f"the payload changes {indices.size} elements where the block's header says {n_changed}")
    return ElementChanges(indices + start, old[indices], new[indices])


def _pack_constant(kernels: KernelBackend, kind: ElementType, old: AnyArray, new_at: Bits) -> bytes | None:
    """Encode the block as one pattern or one step; None if it is neither."""
    same = new_at[0] == new_at[-1] and bool(np.all(new_at == new_at[0]))
    # Changed elements had another pattern before: the block is one pattern if all unchanged elements have it already.
    if same and np.count_nonzero(kernels.host(old) == new_at[0]) == len(old) - len(new_at):
        return b"\0" + int(new_at[0]).to_bytes(4, "little")
    if len(new_at) != len(old):
        return None
    old = kernels.host(old)
    ends = fold_steps(kind, old[[0, -1]], new_at[[0, -1]])
    if ends[0] != ends[1] or np.any(move(kind, old, int(ends[0])) != new_at):
        return None
    return b"\1" + int(ends[0]).to_bytes(4, "little")


def _exponents(kernels: KernelBackend, kind: ElementType, old: AnyArray, active: Active) -> Counts:
    """Count each exponent in the active segments; in large blocks by sampling."""
    n_active = int(active.sum()) * SEGMENT
    every = 1 if kind.exponents == 1 or n_active < 8 * SAMPLE_RUN * SAMPLE_EVERY else SAMPLE_EVERY
    if isinstance(old, np.ndarray) or not active.all():
        run = -(-SAMPLE_RUN // SEGMENT)
        return every * count_active_exponents(kind, kernels.host(old), active, run, every)
    if every == 1:
        return kernels.count_exponents(kind, old)
    stride = SAMPLE_RUN * SAMPLE_EVERY
    whole = len(old) // stride * stride
    sample = old[:whole].reshape(-1, stride)[:, :SAMPLE_RUN].reshape(-1)
    last = old[whole : whole + SAMPLE_RUN]
    return SAMPLE_EVERY * (kernels.count_exponents(kind, sample) + kernels.count_exponents(kind, last))


ALL, BITS, FRAME = 0, 1, 2
FIXED_COST = 300 * BIT


def find_active(indices: Indices, n_elements: int) -> Active:
    """Return the segments with changes, or all if that is cheaper, for ascending `indices` (i8[changed])."""
    active = np.zeros(segments(n_elements), np.uint8)
    _activate(indices, active)
    n_active = int(active.sum())
    saved = indices.size * (log2(active.size) - log2(n_active))
    return active if saved > choice_cost(active.size, n_active) + FIXED_COST else all_active(n_elements)


def write_active(active: Active) -> bytes:
    """Return the active segments as bytes."""
    if active.all():
        return bytes([ALL])
    bits = np.packbits(active, bitorder="little").tobytes()
    frame = compress(bits)
    packed = varint(len(frame)) + frame
    return bytes([FRAME]) + packed if len(packed) < len(bits) else bytes([BITS]) + bits


def read_active(source: WireReader, n_elements: int) -> Active:
    """Invert `write_active`. Raises DeltaError."""
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


CLASS_COST = 10 * BIT
"""The cost of a class's boundary and its count."""
STREAM_COST = 22 * BIT
"""The additional cost of a class with changes: its gap code, a longer count, its share of a table of steps."""


def choose_table(elements: Counts, changed: Counts) -> ClassTable:
    """Return the cheapest classes for a block, from its `elements` and its `changed` elements (i8[exponents] each)."""
    seen = np.maximum(elements, changed)
    used = np.flatnonzero(seen)
    if not used.size:
        return np.zeros(elements.size, np.uint8)
    last = np.empty(used.size, np.int64)
    classes = _merge(seen[used], changed[used], last)
    # Exponents that do not occur cost nothing: each is added to the class of the next used exponent, or to the last.
    ends = used[last[:classes]]
    ends[-1] = elements.size - 1
    return np.searchsorted(ends, np.arange(elements.size)).astype(np.uint8)


def write_table(table: ClassTable) -> bytes:
    """Return a table of classes as bytes."""
    firsts = np.flatnonzero(np.diff(table)) + 1
    return varint(firsts.size) + firsts.astype(np.uint8).tobytes()


def read_table(source: WireReader, exponents: int) -> ClassTable:
    """Invert `write_table` for a type with this number of `exponents`. Raises DeltaError."""
    more = source.varint()
    if more >= min(MAX_CLASSES, exponents):
        raise DeltaError(f"{more + 1} classes of {exponents} exponents")
    firsts = np.frombuffer(source.take(more), np.uint8).astype(np.int64)
    if np.any(np.diff(firsts, prepend=0) <= 0) or np.any(firsts >= exponents):
        raise DeltaError(f"class boundaries {firsts.tolist()} do not divide {exponents} exponents")
    return np.searchsorted(firsts, np.arange(exponents), side="right").astype(np.uint8)


@compiled
def _cost(elements: int, changed: int) -> int:
    return CLASS_COST + (choice_cost(elements, changed) + STREAM_COST if changed else 0)


@compiled
def _merge(elements: Counts, changed: Counts, last: Counts) -> int:
    """Write the last exponent of each class into `last`; return the number of classes."""
    n, c = elements.copy(), changed.copy()
    classes = n.size
    cost, merged = np.zeros(classes + 1, np.int64), np.zeros(classes + 1, np.int64)
    for i in range(classes):
        last[i] = i
        cost[i] = _cost(n[i], c[i])
        if i + 1 < classes:
            merged[i] = _cost(n[i] + n[i + 1], c[i] + c[i + 1])
    while classes > 1:
        best = 0
        for i in range(1, classes - 1):
            if cost[i] + cost[i + 1] - merged[i] > cost[best] + cost[best + 1] - merged[best]:
                best = i
        if merged[best] > cost[best] + cost[best + 1] and classes <= MAX_CLASSES:
            break
        n[best] += n[best + 1]
        c[best] += c[best + 1]
        last[best] = last[best + 1]
        cost[best] = merged[best]
        for i in range(best + 1, classes - 1):
            n[i], c[i], last[i], cost[i], merged[i] = n[i + 1], c[i + 1], last[i + 1], cost[i + 1], merged[i + 1]
        classes -= 1
        for i in range(max(best - 1, 0), min(best + 1, classes - 1)):
            merged[i] = _cost(n[i] + n[i + 1], c[i] + c[i + 1])
    return classes
