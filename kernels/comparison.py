"""The cost of a delta between two sets of weights: its size, the bounds, the speed, and the size in other formats.

Every block is encoded, decoded, resolved and applied as in a replica, and the result is compared bit for bit. Tensors
are processed one after the other, and blocks one by one: in addition to the input tensors, which may be mapped from
files, memory holds a few blocks, and small tensors that wait for a shared block. Speeds are bytes of dense weights for
each second of processor time of this process; the first run of each element type, which compiles, is not counted.

The delta is compared with formats that other systems use for weight deltas. Each converts a tensor's old and new
patterns into bytes, and these bytes and the old patterns into the new ones, bit for bit. They are only measured, never
sent: they decode only what they have just encoded, and do not check it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from tidemill.kernels.block import CodecSettings
from tidemill.kernels.bounds import NOTHING, DeltaBounds, DeltaCounts
from tidemill.kernels.compiled import Bits
from tidemill.kernels.delta import StreamWriter, apply_change, decode_blocks, resolve_all
from tidemill.kernels.elements import TensorChange, element_type, flat_bits
from tidemill.kernels.encoder import DeltaEncoder, Encoded

ZSTD_LEVEL = 1
INDEX = np.dtype("<i4")
COUNT = np.dtype("<u4")
ESCAPE = 0xFFFF
"""A two-byte gap that means: this many unchanged elements, without a changed one after them."""


def encode_raw(old_bits: Bits, new_bits: Bits) -> bytes:
    """Encode four bytes of index and the new pattern for each changed element, without compression."""
    indices = np.flatnonzero(old_bits != new_bits)
    return indices.astype(INDEX).tobytes() + new_bits[indices].tobytes()


def decode_raw(data: bytes, old_bits: Bits) -> Bits:
    """Invert `encode_raw`."""
    count = len(data) // (INDEX.itemsize + old_bits.itemsize)
    new_bits = old_bits.copy()
    new_bits[np.frombuffer(data, INDEX, count)] = np.frombuffer(data[count * INDEX.itemsize :], old_bits.dtype)
    return new_bits


def encode_gap_value(old_bits: Bits, new_bits: Bits) -> bytes:
    """Encode the gap of unchanged elements before each changed one (two bytes, with an escape), and the new pattern."""
    indices = np.flatnonzero(old_bits != new_bits)
    # Two-byte gaps; a longer gap is written as escapes and its remainder.
    counts = np.diff(indices, prepend=-1) - 1
    escapes = counts // ESCAPE
    gaps = np.full(counts.size + int(escapes.sum()), ESCAPE, "<u2")
    gaps[np.cumsum(escapes + 1) - 1] = counts % ESCAPE
    return _compress(_counted(gaps) + new_bits[indices].tobytes())


def decode_gap_value(data: bytes, old_bits: Bits) -> Bits:
    """Invert `encode_gap_value`."""
    gaps, values = _split(_decompress(data), np.dtype("<u2"))
    ends = gaps != ESCAPE
    new_bits = old_bits.copy()
    new_bits[np.cumsum(gaps.astype(np.int64) + ends)[ends] - 1] = np.frombuffer(values, old_bits.dtype)
    return new_bits


def encode_gap_xor(old_bits: Bits, new_bits: Bits) -> bytes:
    """Encode the gap of unchanged elements before each changed one (two or four bytes), and old XOR new."""
    indices = np.flatnonzero(old_bits != new_bits)
    gaps = np.diff(indices, prepend=-1) - 1
    wide = bool(gaps.size and gaps.max() > ESCAPE)
    packed = gaps.astype("<u4" if wide else "<u2")
    return bytes([wide]) + _compress(_counted(packed) + (old_bits[indices] ^ new_bits[indices]).tobytes())


def decode_gap_xor(data: bytes, old_bits: Bits) -> Bits:
    """Invert `encode_gap_xor`."""
    gaps, changes = _split(_decompress(data[1:]), np.dtype("<u4" if data[0] else "<u2"))
    new_bits = old_bits.copy()
    new_bits[np.cumsum(gaps.astype(np.int64) + 1) - 1] ^= np.frombuffer(changes, old_bits.dtype)
    return new_bits


def _counted(values: npt.NDArray[Any]) -> bytes:
    return np.array(values.size, COUNT).tobytes() + values.tobytes()


def _split(data: bytes, layout: np.dtype[Any]) -> tuple[npt.NDArray[Any], bytes]:
    """Read a count and that many integers; return the integers and the bytes after them."""
    count = int(np.frombuffer(data, COUNT, 1)[0])
    end = COUNT.itemsize + count * layout.itemsize
    return np.frombuffer(data[COUNT.itemsize : end], layout), data[end:]


def _compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)


def _decompress(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


Encode = Callable[[Bits, Bits], bytes]
"""Encodes the change from the old patterns to the new ones (uN[n] each, at most 2**31 elements)."""
Decode = Callable[[bytes, Bits], Bits]
"""Decodes the new patterns (uN[n]) from these bytes and the old patterns, which stay unchanged."""

FORMATS: Mapping[str, tuple[Encode, Decode]] = {
    # Old XOR new of every element, changed or not.
    "xor+zstd-1": (
        lambda old_bits, new_bits: _compress((old_bits ^ new_bits).tobytes()),
        lambda data, old_bits: old_bits ^ np.frombuffer(_decompress(data), old_bits.dtype),
    ),
    "int32+value": (encode_raw, decode_raw),
    "u16-gap+value+zstd-1": (encode_gap_value, decode_gap_value),
    "gap+xor+zstd-1": (encode_gap_xor, decode_gap_xor),
}
"""Other formats for the changes of a tensor, by name."""

WARM_UP_ELEMENTS = 1 << 16
WARM_UP_STRIDE = 97
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class DeltaSize:
    """The size of a delta, and its lower bounds (`kernels.bounds`). Ratios are None if nothing changed."""

    elements: int
    changed: int
    density: float
    """Share of the elements that changed."""
    wire_bytes: int
    """All bytes that are sent: payloads, names, fingerprints, digests."""
    bytes_per_changed: float | None
    iid_bound_bytes: float
    exponent_class_bound_bytes: float
    """For a model fitted to all tensors of an element type together."""
    exponent_class_bound_by_tensor_bytes: float
    """For a model fitted to each tensor."""
    ratio_to_iid_bound: float | None
    ratio_to_exponent_class_bound: float | None


@dataclass(frozen=True, slots=True)
class FormatReport:
    """The size of the same change in another format."""

    name: str
    wire_bytes: int
    bytes_per_changed: float | None
    times_ours: float | None
    encode_gb_per_second: float
    decode_gb_per_second: float
    round_trip_equal: bool


@dataclass(frozen=True, slots=True)
class DeltaReport:
    """A comparison of two sets of weights."""

    tensors: int
    total: DeltaSize
    by_dtype: dict[str, DeltaSize]
    """By element type; the stream's own header and trailer are in the total only."""
    encode_gb_per_second: float
    apply_gb_per_second: float
    """Decode, check and apply, for the blocks that change anything."""
    round_trip_equal: bool
    """Whether the delta turned the old patterns into the new ones, bit for bit."""
    against: tuple[FormatReport, ...]
    """Other formats, if they were requested."""


def compare(
    changes: Iterable[TensorChange], settings: CodecSettings | None = None, *, against: bool = False
) -> DeltaReport:
    """Measure the delta of `changes`; with `against`, also the size in other formats.

    Raises DeltaError if a change cannot be encoded: another shape, an unknown element type, a name too long.
    """
    comparison = _Comparison(settings or CodecSettings(), FORMATS if against else {})
    for change in changes:
        comparison.observe(change)
    return comparison.report()


@dataclass(slots=True)
class _Clock:
    """Processor time, and the bytes of weights that were processed in it."""

    seconds: float = 0.0
    n_bytes: int = 0
    _started: float = field(default=0.0, repr=False)

    def __enter__(self) -> None:
        self._started = time.process_time()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.process_time() - self._started

    def gb_per_second(self) -> float:
        return self.n_bytes / self.seconds / GIGA if self.seconds else 0.0


class _Comparison:
    def __init__(self, settings: CodecSettings, formats: Mapping[str, tuple[Encode, Decode]]) -> None:
        self._settings = settings
        self._encoder, self._writer = DeltaEncoder(settings), StreamWriter(1, 0)
        self._edges = len(self._writer.header()) + len(self._writer.trailer())
        self._open: dict[str, tuple[Bits, Bits]] = {}
        """Tensors with blocks that are not written yet, before and after."""
        self._wire: dict[str, int] = {}
        self._whole: dict[str, DeltaCounts] = {}
        self._apart: dict[str, DeltaBounds] = {}
        """By element type: the sum of the bounds of models fitted to each tensor."""
        self._formats = [_FormatMeter(name, *coder) for name, coder in formats.items()]
        self._encode, self._apply = _Clock(), _Clock()
        self._tensors, self._equal = 0, True

    def observe(self, change: TensorChange) -> None:
        kind = element_type(change.dtype)
        old, new = flat_bits(change.old_bits, kind), flat_bits(change.new_bits, kind)
        if kind.name not in self._wire:
            self._wire[kind.name], self._whole[kind.name], self._apart[kind.name] = 0, DeltaCounts(kind.name), NOTHING
            _warm_up(change, self._settings)
        self._open[change.name] = old, new
        self._take_all(self._encoder.add(*change))
        self._open = {name: self._open[name] for name in self._encoder.waiting}
        self._tensors += 1
        self._encode.n_bytes += old.nbytes
        own = DeltaCounts(kind.name)
        for first in range(0, old.size, self._settings.block_elements):
            part = slice(first, first + self._settings.block_elements)
            own.count(old[part], new[part])
            for meter in self._formats:
                meter.observe(old[part], new[part])
        self._whole[kind.name].add(own)
        self._apart[kind.name] += own.bounds()

    def report(self) -> DeltaReport:
        self._take_all(self._encoder.finish())
        whole = {dtype: counts.bounds() for dtype, counts in self._whole.items()}
        by_dtype = {dtype: _size(wire, whole[dtype], self._apart[dtype]) for dtype, wire in self._wire.items()}
        bounds, apart = sum(whole.values(), NOTHING), sum(self._apart.values(), NOTHING)
        total = _size(self._edges + sum(self._wire.values()), bounds, apart)
        return DeltaReport(
            tensors=self._tensors,
            total=total,
            by_dtype=by_dtype,
            encode_gb_per_second=self._encode.gb_per_second(),
            apply_gb_per_second=self._apply.gb_per_second(),
            # Every block gave the right result, and no block is missing.
            round_trip_equal=self._equal and self._writer.changed == total.changed,
            against=tuple(meter.report(total) for meter in self._formats),
        )

    def _take_all(self, blocks: Iterator[Encoded]) -> None:
        """Apply each block to a copy of the elements that it covers, and compare; measure both times."""
        while True:
            with self._encode:
                encoded = next(blocks, None)
            if encoded is None:
                return
            data = self._writer.block(encoded.data)
            with self._apply:
                (block,) = decode_blocks(data)
            self._wire[block.header.kind.name] += len(data)
            runs = {part.name: slice(part.start, part.start + part.n) for part in block.parts}
            held = {name: self._open[name][0][run].copy() for name, run in runs.items()}
            with self._apply:
                for change in resolve_all(block, {name: self._open[name][0] for name in runs}):
                    apply_change(change, held[change.name], offset=change.start)
            for name, run in runs.items():
                self._apply.n_bytes += held[name].nbytes
                self._equal &= np.array_equal(held[name], self._open[name][1][run])


class _FormatMeter:
    def __init__(self, name: str, encode: Encode, decode: Decode) -> None:
        self._name, self._to_bytes, self._from_bytes = name, encode, decode
        self._encode, self._decode = _Clock(), _Clock()
        self._wire, self._equal = 0, True

    def observe(self, old: Bits, new: Bits) -> None:
        with self._encode:
            data = self._to_bytes(old, new)
        with self._decode:
            made = self._from_bytes(data, old)
        self._encode.n_bytes += old.nbytes
        self._decode.n_bytes += old.nbytes
        self._wire += len(data)
        self._equal &= np.array_equal(made, new)

    def report(self, ours: DeltaSize) -> FormatReport:
        return FormatReport(
            self._name,
            self._wire,
            _ratio(self._wire, ours.changed),
            _ratio(self._wire, ours.wire_bytes) if ours.changed else None,
            self._encode.gb_per_second(),
            self._decode.gb_per_second(),
            self._equal,
        )


def _size(wire: int, whole: DeltaBounds, apart: DeltaBounds) -> DeltaSize:
    return DeltaSize(
        elements=whole.elements,
        changed=whole.changed,
        density=whole.changed / whole.elements if whole.elements else 0.0,
        wire_bytes=wire,
        bytes_per_changed=_ratio(wire, whole.changed),
        iid_bound_bytes=whole.iid,
        exponent_class_bound_bytes=whole.exponent_class,
        exponent_class_bound_by_tensor_bytes=apart.exponent_class,
        ratio_to_iid_bound=_ratio(wire, whole.iid),
        ratio_to_exponent_class_bound=_ratio(wire, whole.exponent_class),
    )


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def _warm_up(change: TensorChange, settings: CodecSettings) -> None:
    """Run the codec once on the first elements of a tensor, so that compiling its loops is not timed."""
    old = flat_bits(change.old_bits, element_type(change.dtype))[:WARM_UP_ELEMENTS]
    new = old.copy()
    new[::WARM_UP_STRIDE] += new.dtype.type(1)
    encoder = DeltaEncoder(settings)
    for encoded in (*encoder.add(change.name, change.dtype, old, new), *encoder.finish()):
        held = old.copy()
        for block in decode_blocks(encoded.data):
            for resolved in resolve_all(block, {change.name: held}):
                apply_change(resolved, held)
