"""Values of many rows as one Arrow array; token arrays go from packed bytes to Arrow with no Python object a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa


def list_array(lengths: Sequence[int], values: pa.Array) -> pa.ListArray:
    """A list per length, cut from `values` in order. Raises ValueError when the lengths do not add up."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] != len(values):
        raise ValueError(f"lists of {offsets[-1]} elements in all cannot be cut from {len(values)}")
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


def packed_array(chunks: Sequence[bytes], dtype: np.dtype[Any]) -> pa.Array:
    """Packed little-endian bytes of many rows as one flat Arrow array."""
    return pa.array(np.frombuffer(b"".join(chunks), dtype=dtype))


def packed_lists(rows: Sequence[Sequence[bytes]], dtype: np.dtype[Any]) -> pa.ListArray:
    """One list a row: the elements of its packed chunks, one chunk after the other."""
    lengths = [sum(map(len, chunks)) // dtype.itemsize for chunks in rows]
    return list_array(lengths, packed_array([chunk for chunks in rows for chunk in chunks], dtype))


def map_array(numbers: pa.DataType) -> Callable[[Sequence[dict[str, Any]]], pa.MapArray]:
    """Builds one map of names to numbers a row."""
    kind = pa.map_(pa.string(), numbers)
    return lambda rows: pa.array([list(row.items()) for row in rows], kind)
