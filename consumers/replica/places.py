"""The arithmetic of places: from an element of a checkpoint tensor to an element of a parameter's storage.

A tensor lies in a parameter as runs of rows; the engine may have reordered the parameter afterwards, block by block
(an expert is a block). The loops are compiled and let go of the interpreter's lock, so that what is prepared or proved
while tokens flow does not hold the engine up.

Keeps true: a loop visits the elements that a `Layout` names and no others; `Layout.last` bounds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.kernels.compiled import compiled

Elements = npt.NDArray[np.unsignedinteger[Any]]
"""Elements of the engine's storage as bit patterns: u1, u2 or u4."""

Indices = npt.NDArray[np.int64]

Places = npt.NDArray[np.unsignedinteger[Any]]
"""Places in a storage: u4, or u8 where the storage is longer than that reaches."""

_AS_LOADED: Indices = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [source, source + length) of a tensor: rows of `row` elements, row r at target + r * pitch."""

    source: int
    length: int
    target: int
    row: int
    pitch: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of one checkpoint tensor lie."""

    parameter: str
    runs: tuple[Run, ...]
    """In the order of the tensor's elements, without gaps."""
    table: Indices
    """i8[runs, 4]: source, target, row, pitch of each run."""
    order: Indices
    """i8[block]: where in its block an element lies that was loaded there; empty where nothing was reordered."""
    shift: int
    """Bits by which a pattern is moved up in the engine's wider element."""

    @classmethod
    def of(cls, parameter: str, runs: Sequence[Run], order: Indices | None, shift: int) -> Layout:
        """A layout from its runs; `order` None for a parameter that holds what was loaded."""
        table = np.array([(run.source, run.target, run.row, run.pitch) for run in runs], dtype=np.int64)
        return cls(parameter, tuple(runs), table.reshape(-1, 4), _AS_LOADED if order is None else order, shift)

    @property
    def length(self) -> int:
        """Number of the tensor's elements."""
        return sum(run.length for run in self.runs)

    @property
    def last(self) -> int:
        """The highest element of the storage that is visited, -1 for none."""
        ends = [
            run.target + (run.length - 1) // run.row * run.pitch + min(run.row, run.length) - 1
            for run in self.runs
            if run.length
        ]
        block = max(self.order.size, 1)
        return (max(ends, default=-1) // block + 1) * block - 1


def find(layout: Layout, indices: Indices, places: Places) -> None:
    """Write to `places` (uN[n]) where the elements at flat `indices` (i8[n], within the tensor) lie."""
    _find(indices, layout.table, layout.order, places)


def widen(layout: Layout, bits: Elements, elements: Elements) -> None:
    """Write to `elements` what the engine holds for the patterns `bits` (uN[n] each)."""
    np.left_shift(bits, elements.dtype.type(layout.shift), out=elements, dtype=elements.dtype)


def read(layout: Layout, run: Run, begin: int, storage: Elements, bits: Elements) -> bool:
    """Read elements [begin, begin + bits.size) of a run into `bits`; whether every one is a pattern of the tensor."""
    shift = storage.dtype.type(layout.shift)
    below = storage.dtype.type((1 << layout.shift) - 1)
    lost: bool = _read(storage, layout.order, run.target, run.row, run.pitch, begin, shift, below, bits)
    return not lost


def write(layout: Layout, run: Run, bits: Elements, storage: Elements) -> None:
    """Write all of a run's patterns (uN[run.length]) into the storage."""
    _write(storage, layout.order, run.target, run.row, run.pitch, storage.dtype.type(layout.shift), bits)


def gather(storage: Elements, places: Places, elements: Elements) -> None:
    """Write to `elements` (uN[n]) what the storage holds at `places` (uN[n])."""
    _gather(storage, places, elements)


def scatter(storage: Elements, places: Places, elements: Elements) -> None:
    """Put `elements` (uN[n]) at `places` (uN[n]). Only stores: the quickest way to write many single elements."""
    _scatter(storage, places, elements)


@compiled
def _find(indices: Indices, table: Indices, order: Indices, places: Places) -> None:
    block = order.size
    for k in range(indices.size):
        run = 0
        if table.shape[0] > 1:
            run = np.searchsorted(table[:, 0], indices[k], side="right") - 1
        within, row = indices[k] - table[run, 0], table[run, 2]
        place = table[run, 1] + within
        if within >= row:
            place += within // row * (table[run, 3] - row)
        if block:
            start = place // block * block
            place = start + order[place - start]
        places[k] = place


@compiled
def _read(
    storage: Elements,
    order: Indices,
    target: int,
    row: int,
    pitch: int,
    begin: int,
    shift: np.unsignedinteger[Any],
    below: np.unsignedinteger[Any],
    bits: Elements,
) -> bool:
    lost = np.uint64(0)
    done = 0
    while done < bits.size:
        first, n = _stretch(order.size, target, row, pitch, begin + done, bits.size - done)
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
    storage: Elements, order: Indices, target: int, row: int, pitch: int, shift: np.unsignedinteger[Any], bits: Elements
) -> None:
    done = 0
    while done < bits.size:
        first, n = _stretch(order.size, target, row, pitch, done, bits.size - done)
        if order.size:
            start = first // order.size * order.size
            for j in range(n):
                storage[start + order[first - start + j]] = storage.dtype.type(bits[done + j]) << shift
        else:
            for j in range(n):
                storage[first + j] = storage.dtype.type(bits[done + j]) << shift
        done += n


@compiled
def _stretch(block: int, target: int, row: int, pitch: int, at: int, wanted: int) -> tuple[int, int]:
    """The first place of element `at` of a run before reordering, and how many follow it within a row and a block."""
    number = at // row
    column = at - number * row
    first = target + number * pitch + column
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
