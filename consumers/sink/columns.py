"""The columns of a record's table, derived from its Avro schema by one rule per type, so that the two always agree.

Values of many records become Arrow arrays, packed tokens without a Python object for each token.

| in the schema | in the table |
| --- | --- |
| string, long, double, boolean | String, Int64, Float64, Bool |
| enum, `timestamp-micros` | LowCardinality(String), DateTime64(6) |
| a union with null | Nullable |
| a map of doubles or longs | Map(String, Float64), Map(String, Int64) |
| `le-array` bytes (packed tokens) | Array(UInt32), Array(UInt8), Array(Float32) |
| other bytes | only their size, as `<field>_bytes` |
| an optional record | one Nullable column per field, `<field>_<name>` |
| an array of records | parallel arrays, `<field>.<name>`, which ClickHouse reads as one Nested |
| packed tokens in an array of records | one concatenated array per row, `<name>` |
| an array of records in an array of records | concatenated, `<name>.<leaf>`, with the outer element's index |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any

import fastavro
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.schemas.codec import RECORD_TYPES, current_schema

Offsets = npt.NDArray[np.int64]
"""The start of each list in the values of all lists, and the end of the last one."""


class Gathered:
    """The values of many records of one type, by path of field names: each path is gathered once for all its columns.

    The values of a path with one name are that field of each record. A longer path passes through lists: its values are
    the last field of each item of the preceding lists.
    """

    def __init__(self, records: Sequence[Any]) -> None:
        self._records = records
        self._values: dict[tuple[str, ...], list[Any]] = {}
        self._items: dict[tuple[str, ...], list[Any]] = {}
        self._offsets: dict[tuple[str, ...], Offsets] = {}

    def values(self, *path: str) -> list[Any]:
        found = self._values.get(path)
        if found is None:
            owners = self.items(*path[:-1]) if path[:-1] else self._records
            found = self._values[path] = list(map(attrgetter(path[-1]), owners))
        return found

    def items(self, *path: str) -> list[Any]:
        """Return the items of all values of a path: those of lists, or the keys of maps."""
        found = self._items.get(path)
        if found is None:
            found = self._items[path] = list(chain.from_iterable(self.values(*path)))
        return found

    def offsets(self, *path: str) -> Offsets:
        """Return the start of each value of a path in `items`; for bytes, in their concatenation."""
        found = self._offsets.get(path)
        if found is None:
            values = self.values(*path)
            found = np.zeros(len(values) + 1, dtype=np.int64)
            np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=found[1:])
            self._offsets[path] = found
        return found

    def record_offsets(self, *path: str) -> Offsets:
        """Return the start of each record in the `items` of a path."""
        found = self.offsets(path[0])
        for depth in range(2, len(path) + 1):
            found = self.offsets(*path[:depth])[found]
        return found


def list_array(offsets: Offsets | Sequence[int], values: pa.Array) -> pa.ListArray:
    """Return the lists of `values` between the `offsets`. Raises ValueError if they do not end with the values."""
    if offsets[-1] != len(values):
        raise ValueError(f"lists of {offsets[-1]} elements in all cannot be cut from {len(values)}")
    return pa.ListArray.from_arrays(pa.array(np.asarray(offsets, dtype=np.int32)), values)


def packed_lists(offsets: Offsets, chunks: Sequence[bytes], dtype: np.dtype[Any]) -> pa.ListArray:
    """Return lists of elements from packed chunks; `offsets` are in bytes. Raises ValueError for a partial element."""
    if (offsets % dtype.itemsize).any():
        raise ValueError(f"packed bytes are no whole number of elements of {dtype.itemsize}")
    return list_array(offsets // dtype.itemsize, pa.array(np.frombuffer(b"".join(chunks), dtype=dtype)))


Build = Callable[[Gathered], pa.Array]
"""Builds a column's values from the records of one type."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name and ClickHouse type, its source fields in the schema, and the builder of its values."""

    name: str
    type: str
    source: str
    build: Build
    itemsize: int = 0
    """Bytes of an element of packed arrays; 0 for other columns."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A scalar type, in ClickHouse and in Arrow."""

    clickhouse: str
    arrow: pa.DataType

    def array(self, values: Sequence[Any]) -> pa.Array:
        """Return the values as an Arrow array; None becomes null."""
        return pa.array(values, self.arrow)


MICROSECONDS = Leaf("DateTime64(6, 'UTC')", pa.timestamp("us", tz="UTC"))
MILLISECONDS = Leaf("DateTime64(3, 'UTC')", pa.timestamp("ms", tz="UTC"))
TEXT = Leaf("String", pa.string())
BYTES = Leaf("String", pa.binary())
NAME = Leaf("LowCardinality(String)", pa.string())
INTEGER = Leaf("Int64", pa.int64())
PARTITION = Leaf("Int32", pa.int32())
PRIMITIVES = {
    "string": TEXT,
    "long": INTEGER,
    "int": INTEGER,
    "double": Leaf("Float64", pa.float64()),
    "float": Leaf("Float64", pa.float64()),
    "boolean": Leaf("Bool", pa.bool_()),
}
PACKED = {"u4": "UInt32", "u1": "UInt8", "f4": "Float32"}


def schema_columns(document: dict[str, Any]) -> list[Column]:
    """Return the columns of a record schema's fields, in order. Raises TypeError for a type that no rule covers."""
    fields = fastavro.schema.expand_schema(document)["fields"]
    return [column for field in fields for column in _columns_of((field["name"],), field["type"])]


def _without_null(kind: Any) -> tuple[Any, bool]:  # noqa: ANN401 - a JSON tree
    """Return a type without null, and whether it was nullable."""
    if not isinstance(kind, list):
        return kind, False
    (other,) = (branch for branch in kind if branch != "null")
    return other, True


def _columns_of(path: tuple[str, ...], declared: Any) -> Iterator[Column]:  # noqa: ANN401 - a JSON tree
    """Yield the columns of a field: of a record if the path is one name, otherwise of the items of its lists."""
    kind, nullable = _without_null(declared)
    name, source, within = path[-1], ".".join(path), path[:-1]
    leaf, form = leaf_of(kind), kind if isinstance(kind, str) else kind["type"]
    code = "" if isinstance(kind, str) else kind.get("dtype", "")
    if leaf is not None and not within:
        yield scalar_column(name, leaf, nullable)
    elif leaf is not None:
        array = leaf.array
        yield Column(
            ".".join(path[-2:]),
            f"Array({_nullable(leaf, nullable)})",
            source,
            lambda of: list_array(of.record_offsets(*within), array(of.values(*path))),
        )
    elif form == "bytes" and code:
        yield Column(
            name,
            f"Array({PACKED[code]})",
            source,
            lambda of: packed_lists(of.record_offsets(*path), of.values(*path), np.dtype(f"<{code}")),
            np.dtype(f"<{code}").itemsize,
        )
    elif form == "bytes" and within:
        raise TypeError(f"field {source}: bytes within a list need the logical type le-array")
    elif form == "bytes":
        yield Column(f"{name}_bytes", INTEGER.clickhouse, name, lambda of: pa.array(np.diff(of.offsets(name))))
    elif form == "array" and len(path) < 3:
        yield from _array_columns(path, kind["items"])
    elif form == "record" and not within:
        for field in kind["fields"]:
            part = leaf_of(_without_null(field["type"])[0])
            if part is None:
                raise TypeError(f"field {name}.{field['name']}: an optional record may hold scalars only")
            yield _optional_part(name, field["name"], part)
    elif form == "map" and not within and kind["values"] in ("double", "long"):
        yield _map_column(name, PRIMITIVES[kind["values"]])
    else:
        raise TypeError(f"field {source}: no column rule for the Avro type {declared!r}")


def _array_columns(path: tuple[str, ...], items: Any) -> Iterator[Column]:  # noqa: ANN401 - a JSON tree
    leaf, source, first = leaf_of(items), ".".join(path), path[0]
    if leaf is not None:
        array = leaf.array

        def lists(of: Gathered) -> pa.Array:
            own = list_array(of.offsets(*path), array(of.items(*path)))
            return own if len(path) == 1 else list_array(of.offsets(first), own)

        yield Column(source, f"{'Array(' * len(path)}{leaf.clickhouse}{')' * len(path)}", source, lists)
        return
    if len(path) == 2:

        def outer_index(of: Gathered) -> pa.Array:
            outer, inner = of.offsets(first), of.offsets(*path)
            places = np.arange(outer[-1]) - np.repeat(outer[:-1], np.diff(outer))
            return list_array(inner[outer], pa.array(np.repeat(places, np.diff(inner))))

        yield Column(f"{path[1]}.{first.removesuffix('s')}", "Array(Int64)", source, outer_index)
    for field in items["fields"]:
        yield from _columns_of((*path, field["name"]), field["type"])


def leaf_of(kind: Any) -> Leaf | None:  # noqa: ANN401 - a JSON tree
    """Return the scalar type of a definition; None if it is not a scalar."""
    if isinstance(kind, str):
        return PRIMITIVES.get(kind)
    if kind["type"] == "enum":
        return NAME
    return MICROSECONDS if kind.get("logicalType") == "timestamp-micros" else PRIMITIVES.get(kind["type"])


def _nullable(leaf: Leaf, nullable: bool) -> str:
    if not nullable:
        return leaf.clickhouse
    return "LowCardinality(Nullable(String))" if leaf is NAME else f"Nullable({leaf.clickhouse})"


def scalar_column(name: str, leaf: Leaf, nullable: bool = False, column: str = "") -> Column:
    """Return a column of one scalar attribute; `column` is its name if that is different."""
    return Column(column or name, _nullable(leaf, nullable), name, lambda of: leaf.array(of.values(name)))


def _optional_part(name: str, sub: str, leaf: Leaf) -> Column:
    def build(of: Gathered) -> pa.Array:
        return leaf.array([None if value is None else getattr(value, sub) for value in of.values(name)])

    return Column(f"{name}_{sub}", _nullable(leaf, True), f"{name}.{sub}", build)


def _map_column(name: str, number: Leaf) -> Column:
    def build(of: Gathered) -> pa.Array:
        values = chain.from_iterable(one.values() for one in of.values(name))
        keys, numbers = pa.array(of.items(name), pa.string()), number.array(list(values))
        return pa.MapArray.from_arrays(pa.array(of.offsets(name).astype(np.int32)), keys, numbers)

    return Column(name, f"Map(String, {number.clickhouse})", name, build)


POSITION = (
    scalar_column("topic", NAME, column="_topic"),
    scalar_column("partition", PARTITION, column="_partition"),
    scalar_column("offset", INTEGER, column="_offset"),
    scalar_column("timestamp_ms", MILLISECONDS, column="_timestamp"),
    scalar_column("key", BYTES, column="_key"),
)
"""The position of a row in the log, built from the row itself. `_topic` is the full name."""

DEAD_LETTER = (
    scalar_column("source_topic", NAME),
    scalar_column("source_partition", PARTITION),
    scalar_column("source_offset", INTEGER),
    scalar_column("source_timestamp_ms", MILLISECONDS, column="source_timestamp"),
    scalar_column("reason", TEXT),
    scalar_column("found_by", NAME),
    scalar_column("value", BYTES),
)


def record_columns(record_type: type) -> tuple[Column, ...]:
    """Return the columns of a record type, without the position. Raises TypeError for a schema that no rule covers."""
    return tuple(schema_columns(current_schema(record_type)))


@cache
def packed_fields() -> dict[type, list[tuple[list[str], int]]]:
    """Return the packed arrays of each record type: field path, through lists of records, and bytes of an element."""
    return {
        kind: [(column.source.split("."), column.itemsize) for column in record_columns(kind) if column.itemsize > 1]
        for kind in RECORD_TYPES.values()
    }
