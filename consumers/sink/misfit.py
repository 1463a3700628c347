"""Whether a record's packed arrays are whole: bytes of anybody's making, which the schema takes as they are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from tidemill.schemas.codec import RECORD_TYPES, current_schema

Packed = tuple[tuple[str, ...], int]
"""Path of a packed array's field, through lists of records, and the size of its elements."""


@lru_cache(maxsize=1)
def packed_fields() -> dict[type, tuple[Packed, ...]]:
    """The packed arrays of every record type."""
    return {kind: tuple(_packed(current_schema(kind), ())) for kind in RECORD_TYPES.values()}


def _packed(kind: Any, path: tuple[str, ...]) -> Iterator[Packed]:  # noqa: ANN401 - an Avro type
    if isinstance(kind, list):
        for branch in kind:
            yield from _packed(branch, path)
    elif isinstance(kind, dict) and kind.get("logicalType") == "le-array":
        yield path, np.dtype(f"<{kind['dtype']}").itemsize
    elif isinstance(kind, dict) and kind["type"] == "array":
        yield from _packed(kind["items"], path)
    elif isinstance(kind, dict) and kind["type"] == "record":
        for field in kind["fields"]:
            yield from _packed(field["type"], (*path, field["name"]))


def misfit(record: object) -> str:
    """Why a record's packed arrays cannot be unpacked; empty when they can."""
    for path, size in packed_fields()[type(record)]:
        for chunk in _at(record, path):
            if len(chunk) % size:
                return f"{'.'.join(path)} has {len(chunk)} bytes, which is no whole number of elements of {size}"
    return ""


def _at(value: Any, path: tuple[str, ...]) -> Iterator[bytes]:  # noqa: ANN401 - a record or a field of one
    if value is None:
        return
    if isinstance(value, list):
        for item in value:
            yield from _at(item, path)
    elif path:
        yield from _at(getattr(value, path[0]), path[1:])
    else:
        yield value
