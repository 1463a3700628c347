"""Values of many records as Arrow arrays; packed tokens become Arrow values without a Python object for each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Offsets = npt.NDArray[np.int64]
"""Where each list begins in the values of all lists, and where the last one ends."""


class Gathered:
    """The values of many records of one type, by path of field names: each path is gathered once for all its columns.

    The values of a path of one name are that field of each record. A longer path goes through lists: its values are
    the last field of each item of the lists before it.
    """

    def __init__(self, records: Sequence[Any]) -> None:
        self._records = records
        self._values: dict[tuple[str, ...], list[Any]] = {}
        self._items: dict[tuple[str, ...], list[Any]] = {}
        self._offsets: dict[tuple[str, ...], Offsets] = {}

    def values(self, *path: str) -> list[Any]:
        """The values of a path, in order."""
        found = self._values.get(path)
        if found is None:
            owners = self.items(*path[:-1]) if path[:-1] else self._records
            found = self._values[path] = list(map(attrgetter(path[-1]), owners))
        return found

    def items(self, *path: str) -> list[Any]:
        """The items of all values of a path: those of lists, or the keys of maps."""
        found = self._items.get(path)
        if found is None:
            found = self._items[path] = list(chain.from_iterable(self.values(*path)))
        return found

    def offsets(self, *path: str) -> Offsets:
        """Where each value of a path begins in `items`; for bytes, in their concatenation."""
        found = self._offsets.get(path)
        if found is None:
            values = self.values(*path)
            found = np.zeros(len(values) + 1, dtype=np.int64)
            np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=found[1:])
            self._offsets[path] = found
        return found

    def record_offsets(self, *path: str) -> Offsets:
        """Where each record begins in the `items` of a path of two names."""
        return self.offsets(*path)[self.offsets(path[0])]


def list_array(offsets: Offsets | Sequence[int], values: pa.Array) -> pa.ListArray:
    """The lists that lie between `offsets` of `values`. Raises ValueError when they do not end with the values."""
    if offsets[-1] != len(values):
        raise ValueError(f"lists of {offsets[-1]} elements in all cannot be cut from {len(values)}")
    return pa.ListArray.from_arrays(pa.array(np.asarray(offsets, dtype=np.int32)), values)


def packed_array(chunks: Sequence[bytes], dtype: np.dtype[Any]) -> pa.Array:
    """Packed little-endian bytes of many rows as one flat Arrow array."""
    return pa.array(np.frombuffer(b"".join(chunks), dtype=dtype))


def packed_lists(offsets: Offsets, chunks: Sequence[bytes], dtype: np.dtype[Any]) -> pa.ListArray:
    """Lists of elements out of packed chunks; `offsets` count bytes. Raises ValueError for a part of an element."""
    if (offsets % dtype.itemsize).any():
        raise ValueError(f"packed bytes are no whole number of elements of {dtype.itemsize}")
    return list_array(offsets // dtype.itemsize, packed_array(chunks, dtype))


def map_array(offsets: Offsets, names: Sequence[str], maps: Sequence[dict[str, Any]], kind: pa.DataType) -> pa.MapArray:
    """One map of names to numbers a row; `names` are the keys of all maps."""
    numbers = list(chain.from_iterable(one.values() for one in maps))
    keys, values = pa.array(names, pa.string()), pa.array(numbers, kind)
    return pa.MapArray.from_arrays(pa.array(offsets.astype(np.int32)), keys, values)
