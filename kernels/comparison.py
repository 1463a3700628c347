"""What a delta between two sets of weights costs: its size, the bounds, the speed, and what other formats would take.

Every block is encoded, decoded, resolved and applied as a replica would, and the result compared bit for bit. Tensors
are taken one after the other and blocks one by one: beyond the tensors that it is given, which may be mapped from
files, the comparison holds a few blocks, small tensors that wait for a block together among them. Speeds are bytes of
dense weights for each second of processor time of this process; the first, compiling run of each element type is not
counted.

The formats that others ship weight deltas in are yardsticks for ours. Each turns a tensor's old and new patterns into
bytes, and the bytes and the old patterns into the new ones, bit for bit. They are measured, never sent: what they
decode is what they encoded a moment before, and they do not check it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from tidemill.kernels.bounds import NOTHING, DeltaBounds, ModelBounds
from tidemill.kernels.delta import (
    CodecSettings,
    StreamWriter,
    TensorChange,
    apply_change,
    decode_blocks,
    resolve,
    resolve_all,
)
from tidemill.kernels.elements import element_type, flat_bits
from tidemill.kernels.encoder import DeltaEncoder, Encoded
from tidemill.kernels.fingerprint import Bits, Indices

ZSTD_LEVEL = 1
INDEX = np.dtype("<i4")
COUNT = np.dtype("<u4")
ESCAPE = 0xFFFF
"""A two-byte gap that says: so many unchanged elements, and no changed one after them."""


class Format(Protocol):
    """A way to write what changed between two tensors of at most 2**31 elements."""

    name: ClassVar[str]

    def encode(self, old_bits: Bits, new_bits: Bits) -> bytes:
        """The change from `old_bits` to `new_bits` (uN[n] each) as bytes."""

    def decode(self, data: bytes, old_bits: Bits) -> Bits:
        """The new patterns (uN[n]) from what `encode` made and the old ones, which are left alone."""


class DenseXor(Format):
    """Old XOR new of every element, changed or not, compressed."""

    name = "xor+zstd-1"

    def encode(self, old_bits: Bits, new_bits: Bits) -> bytes:
        return _compress((old_bits ^ new_bits).tobytes())

    def decode(self, data: bytes, old_bits: Bits) -> Bits:
        return old_bits ^ np.frombuffer(_decompress(data), old_bits.dtype)


class RawIndices(Format):
    """Four bytes of index and the new pattern for each changed element, as they are."""

    name = "int32+value"

    def encode(self, old_bits: Bits, new_bits: Bits) -> bytes:
        indices = np.flatnonzero(old_bits != new_bits)
        return indices.astype(INDEX).tobytes() + new_bits[indices].tobytes()

    def decode(self, data: bytes, old_bits: Bits) -> Bits:
        count = len(data) // (INDEX.itemsize + old_bits.itemsize)
        indices, values = np.frombuffer(data, INDEX, count), data[count * INDEX.itemsize :]
        new_bits = old_bits.copy()
        new_bits[indices] = np.frombuffer(values, old_bits.dtype)
        return new_bits


class GapValue(Format):
    """The number of unchanged elements before each changed one in two bytes with an escape, and the new pattern."""

    name = "u16-gap+value+zstd-1"

    def encode(self, old_bits: Bits, new_bits: Bits) -> bytes:
        indices = np.flatnonzero(old_bits != new_bits)
        # Two-byte gaps; one that does not fit follows escapes that hold the rest.
        counts = _gaps(indices)
        escapes = counts // ESCAPE
        gaps = np.full(counts.size + int(escapes.sum()), ESCAPE, "<u2")
        gaps[np.cumsum(escapes + 1) - 1] = counts % ESCAPE
        return _compress(_counted(gaps) + gaps.tobytes() + new_bits[indices].tobytes())

    def decode(self, data: bytes, old_bits: Bits) -> Bits:
        gaps, values = _split(_decompress(data), np.dtype("<u2"))
        ends = gaps != ESCAPE
        indices = np.cumsum(gaps.astype(np.int64) + ends)[ends] - 1
        new_bits = old_bits.copy()
        new_bits[indices] = np.frombuffer(values, old_bits.dtype)
        return new_bits


class GapXor(Format):
    """The number of unchanged elements before each changed one in two or four bytes, and old XOR new."""

    name = "gap+xor+zstd-1"

    def encode(self, old_bits: Bits, new_bits: Bits) -> bytes:
        indices = np.flatnonzero(old_bits != new_bits)
        gaps = _gaps(indices)
        wide = bool(gaps.size and gaps.max() > ESCAPE)
        packed = gaps.astype("<u4" if wide else "<u2")
        changes = old_bits[indices] ^ new_bits[indices]
        return bytes([wide]) + _compress(_counted(packed) + packed.tobytes() + changes.tobytes())

    def decode(self, data: bytes, old_bits: Bits) -> Bits:
        gaps, changes = _split(_decompress(data[1:]), np.dtype("<u4" if data[0] else "<u2"))
        new_bits = old_bits.copy()
        new_bits[np.cumsum(gaps.astype(np.int64) + 1) - 1] ^= np.frombuffer(changes, old_bits.dtype)
        return new_bits


FORMATS: tuple[Format, ...] = (DenseXor(), RawIndices(), GapValue(), GapXor())


def _gaps(indices: Indices) -> Indices:
    return np.diff(indices, prepend=-1) - 1


def _counted(values: npt.NDArray[Any]) -> bytes:
    return np.array(values.size, COUNT).tobytes()


def _split(data: bytes, layout: np.dtype[Any]) -> tuple[npt.NDArray[Any], bytes]:
    """The integers that a count announces, and the bytes after them."""
    count = int(np.frombuffer(data, COUNT, 1)[0])
    end = COUNT.itemsize + count * layout.itemsize
    return np.frombuffer(data[COUNT.itemsize : end], layout), data[end:]


def _compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)


def _decompress(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


WARM_UP_ELEMENTS = 1 << 16
WARM_UP_STRIDE = 97
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class DeltaSize:
    """How large a delta is, and how small it could be (`kernels.bounds`). Ratios are None where nothing changed."""

    elements: int
    changed: int
    density: float
    """Share of the elements that changed."""
    wire_bytes: int
    """Everything that is sent: payloads, names, fingerprints, digests."""
    bytes_per_changed: float | None
    iid_bound_bytes: float
    exponent_class_bound_bytes: float
    """By a fit to all tensors of an element type together."""
    exponent_class_bound_by_tensor_bytes: float
    """By a fit to each tensor."""
    ratio_to_iid_bound: float | None
    ratio_to_exponent_class_bound: float | None


@dataclass(frozen=True, slots=True)
class FormatReport:
    """What another format takes for the same change."""

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
    """Decode, guard and apply, of the blocks that change anything."""
    round_trip_equal: bool
    """Whether the delta turned the old patterns into the new ones, bit for bit."""
    against: tuple[FormatReport, ...]
    """Other formats, where they were asked for."""


def compare(
    changes: Iterable[TensorChange], settings: CodecSettings | None = None, *, against: bool = False
) -> DeltaReport:
    """Measure the delta of `changes`; with `against`, also what other formats take.

    Raises DeltaError when a change cannot be encoded: another shape, an unknown element type, a name too long.
    """
    comparison = _Comparison(settings or CodecSettings(), FORMATS if against else ())
    for change in changes:
        comparison.observe(change)
    return comparison.report()


@dataclass(slots=True)
class _Clock:
    """Processor time spent, and the bytes of weights that it was spent on."""

    seconds: float = 0.0
    n_bytes: int = 0
    _begun: float = field(default=0.0, repr=False)

    def __enter__(self) -> None:
        self._begun = time.process_time()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.process_time() - self._begun

    def gb_per_second(self) -> float:
        return self.n_bytes / self.seconds / GIGA if self.seconds else 0.0


class _Comparison:
    def __init__(self, settings: CodecSettings, formats: Iterable[Format]) -> None:
        self._settings = settings
        self._encoder = DeltaEncoder(settings)
        self._open: dict[str, _Open] = {}
        self._writer = StreamWriter(1, 0)
        self._edges = len(self._writer.header())
        self._wire: dict[str, int] = {}
        self._bounds = ModelBounds()
        self._formats = [_FormatMeter(other) for other in formats]
        self._encode, self._apply = _Clock(), _Clock()
        self._tensors, self._equal = 0, True

    def observe(self, change: TensorChange) -> None:
        if change.dtype not in self._wire:
            self._wire[change.dtype] = 0
            _warm_up(change, self._settings)
        kind = element_type(change.dtype)
        old, new = flat_bits(change.old_bits, kind), flat_bits(change.new_bits, kind)
        self._open[change.name] = _Open(old, new)
        self._take_all(self._encoder.add(*change))
        self._close(self._open.keys() - self._encoder.waiting)
        self._tensors += 1
        self._encode.n_bytes += old.nbytes
        for first in range(0, old.size, self._settings.block_elements):
            part = slice(first, first + self._settings.block_elements)
            self._bounds.count(change.dtype, old[part], new[part])
            for meter in self._formats:
                meter.observe(old[part], new[part])
        self._bounds.end_tensor()

    def report(self) -> DeltaReport:
        self._take_all(self._encoder.finish())
        self._close(set(self._open))
        whole, apart = self._bounds.whole(), self._bounds.by_tensor()
        by_dtype = {
            dtype: _size(wire, whole.get(dtype, NOTHING), apart.get(dtype, NOTHING))
            for dtype, wire in self._wire.items()
        }
        wire = self._edges + sum(self._wire.values()) + len(self._writer.trailer())
        total = _size(wire, sum(whole.values(), NOTHING), sum(apart.values(), NOTHING))
        return DeltaReport(
            tensors=self._tensors,
            total=total,
            by_dtype=by_dtype,
            encode_gb_per_second=self._encode.gb_per_second(),
            apply_gb_per_second=self._apply.gb_per_second(),
            round_trip_equal=self._equal,
            against=tuple(meter.report(total) for meter in self._formats),
        )

    def _take_all(self, blocks: Iterator[Encoded]) -> None:
        """Apply blocks, each to a copy of what it covers, and compare; with the time that each takes to make."""
        while True:
            with self._encode:
                encoded = next(blocks, None)
            if encoded is None:
                return
            data = self._writer.block(encoded.data)
            with self._apply:
                (block,) = decode_blocks(data)
            self._wire[block.dtype] += len(data)
            held = {p.name: self._open[p.name].old[p.start : p.start + p.n].copy() for p in block.parts}
            first = block.parts[0]
            with self._apply:
                if len(block.parts) > 1:
                    changes = resolve_all(block, held)
                else:
                    resolved = resolve(block, held[first.name], offset=first.start)
                    changes = () if resolved is None else (resolved,)
                for change in changes:
                    apply_change(change, held[change.name], offset=change.start)
            for part in block.parts:
                self._apply.n_bytes += held[part.name].nbytes
                self._equal &= self._open[part.name].goes_on(part.start, held[part.name])

    def _close(self, names: Iterable[str]) -> None:
        """Nothing more is applied to these tensors: what is left of them has not changed."""
        for name in names:
            tensor = self._open.pop(name)
            self._equal &= tensor.goes_on(tensor.old.size, tensor.old[:0])


@dataclass(slots=True)
class _Open:
    """A tensor of which blocks are being applied."""

    old: Bits
    new: Bits
    _compared: int = 0

    def goes_on(self, start: int, made: Bits) -> bool:
        """Whether the elements up to `start` have not changed, and those from there on became what was `made`."""
        before, end = slice(self._compared, start), start + made.size
        self._compared = end
        return np.array_equal(self.old[before], self.new[before]) and np.array_equal(made, self.new[start:end])


class _FormatMeter:
    def __init__(self, other: Format) -> None:
        self._format = other
        self._encode, self._decode = _Clock(), _Clock()
        self._wire, self._equal = 0, True

    def observe(self, old: Bits, new: Bits) -> None:
        with self._encode:
            data = self._format.encode(old, new)
        with self._decode:
            made = self._format.decode(data, old)
        self._encode.n_bytes += old.nbytes
        self._decode.n_bytes += old.nbytes
        self._wire += len(data)
        self._equal &= np.array_equal(made, new)

    def report(self, ours: DeltaSize) -> FormatReport:
        return FormatReport(
            self._format.name,
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
    """Run the codec once over the head of a tensor, so that compiling its loops is not timed."""
    old = flat_bits(change.old_bits, element_type(change.dtype))[:WARM_UP_ELEMENTS]
    new = old.copy()
    new[::WARM_UP_STRIDE] += new.dtype.type(1)
    encoder = DeltaEncoder(settings)
    for encoded in (*encoder.add(change.name, change.dtype, old, new), *encoder.finish()):
        held = old.copy()
        for block in decode_blocks(encoded.data):
            for resolved in resolve_all(block, {change.name: held}):
                apply_change(resolved, held)
