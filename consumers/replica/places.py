"""Arithmetic of places: from an element of a checkpoint tensor to an element of a parameter's storage.

A parameter stores a tensor as boxes: rows of neighbouring elements, at one distance in the tensor and at another in
the storage. A rank of an engine may hold some boxes of a tensor, or none. The engine may have reordered the parameter
afterwards, block by block (an expert is a block). The loops are compiled and release the interpreter's lock, so that
a write can be prepared, and proved, while the engine samples.

Invariant: a loop visits only the elements that a `Layout` names; `Layout.last` is the highest of them.

For a parameter on a GPU, `DeviceStorage` does the same with torch's index operations, on any device of torch;
patterns are torch's signed integers of the same width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidemill.kernels.compiled import Indices, compiled

Elements = npt.NDArray[np.unsignedinteger[Any]]
"""Elements of the engine's storage as bit patterns: u1, u2 or u4."""

Places = npt.NDArray[np.unsignedinteger[Any]]
"""Places in a storage: u4, or u8 if the storage is too long for u4."""

_AS_LOADED: Indices = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Box:
    """`rows` rows of `row` elements: row r is at source + r * pitch in the tensor, at target + r * step in the storage.

    One row is written as pitch = step = row.
    """

    source: int
    target: int
    rows: int
    row: int
    pitch: int
    step: int

    @property
    def length(self) -> int:
        return self.rows * self.row

    @property
    def end(self) -> int:
        """One more than its last element's index in the tensor."""
        return self.source + (self.rows - 1) * self.pitch + self.row

    @property
    def dense(self) -> bool:
        """Whether its elements are neighbours in the tensor."""
        return self.rows == 1 or self.pitch == self.row

    def cut(self, tensor: Elements) -> Elements:
        """Copy the box's elements of a flat tensor, uN[length]."""
        strides = (self.pitch * tensor.itemsize, tensor.itemsize)
        rows = np.lib.stride_tricks.as_strided(tensor[self.source : self.end], (self.rows, self.row), strides)
        return np.array(rows).reshape(-1)

    def indices(self, begin: int, count: int) -> Indices:
        """Return the indices in the tensor of the box's elements [begin, begin + count), i8[count]."""
        number, column = np.divmod(np.arange(begin, begin + count, dtype=np.int64), self.row)
        found: Indices = self.source + number * self.pitch + column
        return found


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of the elements of one checkpoint tensor."""

    parameter: str
    """Name of the parameter; empty if this rank holds no element of the tensor."""
    boxes: tuple[Box, ...]
    """In the order of the tensor's elements; the end of each is before the source of the next."""
    table: Indices
    """i8[boxes, 6]: source, target, rows, row, pitch, step of each box."""
    order: Indices
    """i8[block]: an element's place in its block, by its loaded place; empty if nothing was reordered."""
    shift: int
    """Bits by which a pattern is shifted up in the engine's wider element."""

    @classmethod
    def of(cls, parameter: str, boxes: Sequence[Box], order: Indices | None, shift: int) -> Layout:
        """Make a layout from its boxes; `order` is None for a parameter that was not reordered after loading."""
        rows = [(box.source, box.target, box.rows, box.row, box.pitch, box.step) for box in boxes]
        table = np.array(rows, dtype=np.int64).reshape(-1, 6)
        return cls(parameter, tuple(boxes), table, _AS_LOADED if order is None else order, shift)

    @property
    def last(self) -> int:
        """The highest index in the storage that is visited, -1 for none."""
        ends = [box.target + (box.rows - 1) * box.step + box.row - 1 for box in self.boxes]
        block = max(self.order.size, 1)
        return (max(ends, default=-1) // block + 1) * block - 1


class HostStorage:
    """A parameter's storage in the CPU's memory, uN[size]."""

    def __init__(self, elements: Elements) -> None:
        self.elements = elements
        self.size = elements.size

    def find(self, changes: Sequence[tuple[Layout, Indices, Elements]]) -> tuple[Places, Elements, Elements]:
        """Return, for the changed elements in this storage, their places, their new elements and the present ones.

        Args:
            changes: layout, flat indices (i8[n]) and patterns (uN[n]) of each change.
        """
        most = sum(len(indices) for _, indices, _ in changes)
        where: Places = np.empty(most, dtype=np.uint32 if self.size <= 1 << 32 else np.uint64)
        new: Elements = np.empty(most, dtype=self.elements.dtype)
        held = 0
        for layout, indices, bits in changes:
            shift = new.dtype.type(layout.shift)
            held += _place(indices, bits, layout.table, layout.order, shift, where[held:], new[held:])
        # If elements were left out, not slices: a slice would keep the memory of its whole array.
        where, new = (where, new) if held == most else (where[:held].copy(), new[:held].copy())
        old = np.empty_like(new)
        _gather(self.elements, where, old)
        return where, new, old

    def put(self, places: Places, elements: Elements) -> None:
        """Store `elements` (uN[n]) at `places` (uN[n]), without checks: the fastest way to write single elements."""
        _scatter(self.elements, places, elements)

    def write(self, layout: Layout, box: Box, bits: Elements) -> None:
        """Write all of a box's patterns (uN[box.length])."""
        shift = self.elements.dtype.type(layout.shift)
        _write(self.elements, layout.order, box.target, box.row, box.step, shift, bits)

    def read(self, layout: Layout, box: Box, begin: int, bits: Elements) -> Elements | None:
        """Read elements [begin, begin + bits.size) of a box into `bits`; None if one is not a pattern of the tensor."""
        shift = self.elements.dtype.type(layout.shift)
        below = self.elements.dtype.type((1 << layout.shift) - 1)
        lost = _read(self.elements, layout.order, box.target, box.row, box.step, begin, shift, below, bits)
        return None if lost else bits


class DeviceStorage:
    """A parameter's storage as a flat tensor of signed integers. Only for layouts that were not reordered.

    A write is queued on the worker's own stream and then waits for its end, so that the next forward pass reads it.
    """

    def __init__(self, elements: torch.Tensor) -> None:
        self._elements = elements
        self.size = elements.numel()

    def find(
        self, changes: Sequence[tuple[Layout, Indices, Elements]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Same as `HostStorage.find`: i8[n] and two signed iN[n] on the device."""
        places, new = list[torch.Tensor](), list[torch.Tensor]()
        for layout, indices, bits in changes:
            at = self._here(np.asarray(indices, dtype=np.int64))
            source, target, rows, row, pitch, step = self._here(np.ascontiguousarray(layout.table.T))
            box = torch.searchsorted(source.contiguous(), at, right=True) - 1
            within = at - source[box]
            number = torch.div(within, pitch[box], rounding_mode="floor")
            column = within - number * pitch[box]
            held = (box >= 0) & (number < rows[box]) & (column < row[box])
            places.append((target[box] + number * step[box] + column)[held])
            new.append(self._widened(layout, bits)[held])
        where = torch.cat(places)
        return where, torch.cat(new), self._elements[where]

    def put(self, places: torch.Tensor, elements: torch.Tensor) -> None:
        self._elements.index_copy_(0, places, elements)
        self._wait()

    def write(self, layout: Layout, box: Box, bits: Elements) -> None:
        rows = self._elements.as_strided((box.rows, box.row), (box.step, 1), box.target)
        rows.copy_(self._widened(layout, bits).view(box.rows, box.row))
        self._wait()

    def read(self, layout: Layout, box: Box, begin: int, bits: Elements) -> torch.Tensor | None:
        """Same as `HostStorage.read`; the patterns stay on the device, as unsigned integers; `bits` is not written."""
        at = torch.arange(begin, begin + bits.size, device=self._elements.device)
        number = torch.div(at, box.row, rounding_mode="floor")
        elements = self._elements[box.target + number * box.step + at - number * box.row]
        if bool((elements & ((1 << layout.shift) - 1)).any()):
            return None
        width = 8 * bits.itemsize
        return (elements >> layout.shift).to(getattr(torch, f"int{width}")).view(getattr(torch, f"uint{width}"))

    def _widened(self, layout: Layout, bits: Elements) -> torch.Tensor:
        signed: torch.Tensor = self._here(bits.view(f"i{bits.itemsize}"))
        return signed.to(self._elements.dtype) << layout.shift

    def _here(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        # A copy: torch does not accept read-only memory.
        return torch.from_numpy(np.array(array)).to(self._elements.device)

    def _wait(self) -> None:
        if self._elements.device.type != "cpu":
            torch.accelerator.synchronize(self._elements.device)


@compiled
def _place(
    indices: Indices,
    bits: Elements,
    table: Indices,
    order: Indices,
    shift: np.unsignedinteger[Any],
    places: Places,
    elements: Elements,
) -> int:
    found, block = 0, order.size
    if table.shape[0] == 0:
        return found
    for k in range(indices.size):
        box = 0
        if table.shape[0] > 1:
            box = np.searchsorted(table[:, 0], indices[k], side="right") - 1
            if box < 0:
                continue
        number, column = 0, indices[k] - table[box, 0]
        if column >= table[box, 4]:
            number = column // table[box, 4]
            column -= number * table[box, 4]
        if column < 0 or number >= table[box, 2] or column >= table[box, 3]:
            continue
        target = table[box, 1] + number * table[box, 5] + column
        if block:
            start = target // block * block
            target = start + order[target - start]
        places[found] = target
        elements[found] = elements.dtype.type(bits[k]) << shift
        found += 1
    return found


@compiled
def _read(
    storage: Elements,
    order: Indices,
    target: int,
    row: int,
    step: int,
    begin: int,
    shift: np.unsignedinteger[Any],
    below: np.unsignedinteger[Any],
    bits: Elements,
) -> bool:
    lost = np.uint64(0)
    done = 0
    while done < bits.size:
        first, n = _stretch(order.size, target, row, step, begin + done, bits.size - done)
        if order.size:
            start = first // order.size * order.size
            for j in range(n):
                element = storage[start + order[first - start + j]]
                lost |= np.uint64(element & below)
                bits[done + j] = element >> shift
        else:
            for j in range(n):
                element = storage[first + j]
                lost |= np.uint64(element & below)
                bits[done + j] = element >> shift
        done += n
    return bool(lost != 0)


@compiled
def _write(
    storage: Elements, order: Indices, target: int, row: int, step: int, shift: np.unsignedinteger[Any], bits: Elements
) -> None:
    done = 0
    while done < bits.size:
        first, n = _stretch(order.size, target, row, step, done, bits.size - done)
        if order.size:
            start = first // order.size * order.size
            for j in range(n):
                storage[start + order[first - start + j]] = storage.dtype.type(bits[done + j]) << shift
        else:
            for j in range(n):
                storage[first + j] = storage.dtype.type(bits[done + j]) << shift
        done += n


@compiled
def _stretch(block: int, target: int, row: int, step: int, at: int, wanted: int) -> tuple[int, int]:
    """Return the place of a box's element `at` before reordering, and the number of neighbours in its row and block."""
    number = at // row
    column = at - number * row
    first = target + number * step + column
    n = min(row - column, wanted)
    if block:
        n = min(n, block - first % block)
    return first, n


@compiled
def _gather(storage: Elements, places: Places, elements: Elements) -> None:
    for k in range(places.size):
        elements[k] = storage[places[k]]


@compiled
def _scatter(storage: Elements, places: Places, elements: Elements) -> None:
    for k in range(places.size):
        storage[places[k]] = elements[k]
