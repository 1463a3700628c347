"""The columns of a record's table, derived from its Avro schema: one rule a type, so that the two cannot drift.

| in the schema | in the table |
| --- | --- |
| string, long, double, boolean | String, Int64, Float64, Bool |
| enum, `timestamp-micros` | LowCardinality(String), DateTime64(6) |
| a union with null | Nullable |
| a map of doubles or longs | Map(String, Float64), Map(String, Int64) |
| `le-array` bytes (packed tokens) | Array(UInt32), Array(UInt8), Array(Float32) |
| other bytes | their size alone, as `<field>_bytes` |
| an optional record | one Nullable column a field, `<field>_<name>` |
| an array of records | parallel arrays, `<field>.<name>`, which ClickHouse reads as one Nested |
| packed tokens in an array of records | one concatenated array a row, `<name>` |
| an array of records in an array of records | concatenated, `<name>.<leaf>`, with the outer element's index beside it |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.consumers.sink.arrays import Gathered, list_array, map_array, packed_lists
from tidemill.consumers.sink.rows import DeadLetter, Row
from tidemill.schemas.codec import current_schema

Build = Callable[[Gathered], pa.Array]
"""From the records of one type to the column's values."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name and ClickHouse type, the schema fields it is made of, and how its values are built."""

    name: str
    type: str
    source: str
    build: Build


@dataclass(frozen=True, slots=True)
class Leaf:
    """A scalar type on both sides."""

    clickhouse: str
    arrow: pa.DataType

    def array(self, values: Sequence[Any]) -> pa.Array:
        """The values as an Arrow array; None is null."""
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


class Schema:
    """An Avro record schema whose references to named types are resolved."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._named: dict[str, dict[str, Any]] = {}
        self._collect(document)
        self.fields: list[dict[str, Any]] = document["fields"]

    def _collect(self, node: Any) -> None:  # noqa: ANN401 - a JSON tree
        if isinstance(node, list):
            for item in node:
                self._collect(item)
        elif isinstance(node, dict):
            if node.get("type") in ("record", "enum"):
                self._named[node["name"]] = self._named[f"{node.get('namespace', '')}.{node['name']}"] = node
            for item in node.values():
                self._collect(item)

    def resolve(self, kind: Any) -> Any:  # noqa: ANN401 - a JSON tree
        """The definition behind a name; anything else as it is."""
        return self._named.get(kind, kind) if isinstance(kind, str) else kind

    def optional(self, kind: Any) -> tuple[Any, bool]:  # noqa: ANN401 - a JSON tree
        """A type without its null, and whether it had one."""
        if not isinstance(kind, list):
            return self.resolve(kind), False
        (inner,) = (branch for branch in kind if branch != "null")
        return self.resolve(inner), True

    def leaf(self, kind: Any) -> Leaf | None:  # noqa: ANN401 - a JSON tree
        """The scalar that a type is; None when it is not one."""
        if isinstance(kind, str):
            return PRIMITIVES.get(kind)
        if kind["type"] == "enum":
            return NAME
        if kind.get("logicalType") == "timestamp-micros":
            return MICROSECONDS
        return PRIMITIVES.get(kind["type"])

    def columns(self) -> list[Column]:
        """The columns of every field, in order. Raises TypeError for a type that no rule covers."""
        return [column for field in self.fields for column in self._of_field(field["name"], field["type"])]

    def _of_field(self, name: str, declared: Any) -> Iterator[Column]:  # noqa: ANN401 - a JSON tree
        kind, nullable = self.optional(declared)
        leaf = self.leaf(kind)
        if leaf is not None:
            yield scalar_column(name, leaf, nullable)
        elif _is_bytes(kind):
            code = _dtype(kind)
            if code:
                yield Column(
                    name,
                    f"Array({PACKED[code]})",
                    name,
                    lambda of: packed_lists(of.offsets(name), of.values(name), np.dtype(f"<{code}")),
                )
            else:
                yield Column(f"{name}_bytes", INTEGER.clickhouse, name, lambda of: pa.array(np.diff(of.offsets(name))))
        elif kind["type"] == "record":
            yield from self._flattened(name, kind)
        elif kind["type"] == "map" and kind["values"] in ("double", "long"):
            number = PRIMITIVES[kind["values"]]
            yield Column(
                name,
                f"Map(String, {number.clickhouse})",
                name,
                lambda of: map_array(of.offsets(name), of.items(name), of.values(name), number.arrow),
            )
        elif kind["type"] == "array":
            yield from self._of_array(name, self.resolve(kind["items"]))
        else:
            raise TypeError(f"field {name!r}: no column rule for the Avro type {declared!r}")

    def _flattened(self, name: str, record: dict[str, Any]) -> Iterator[Column]:
        for field in record["fields"]:
            leaf = self.leaf(self.resolve(field["type"]))
            if leaf is None:
                raise TypeError(f"field {name}.{field['name']}: an optional record may hold scalars only")
            yield _optional_part(name, field["name"], leaf)

    def _of_array(self, name: str, items: Any) -> Iterator[Column]:  # noqa: ANN401 - a JSON tree
        leaf = self.leaf(items)
        if leaf is not None:
            array = leaf.array
            yield Column(
                name, f"Array({leaf.clickhouse})", name, lambda of: list_array(of.offsets(name), array(of.items(name)))
            )
            return
        for field in items["fields"]:
            yield from self._of_item(name, field["name"], field["type"])

    def _of_item(self, name: str, sub: str, declared: Any) -> Iterator[Column]:  # noqa: ANN401 - a JSON tree
        kind, nullable = self.optional(declared)
        leaf = self.leaf(kind)
        if leaf is not None:
            array = leaf.array
            yield Column(
                f"{name}.{sub}",
                f"Array({_nullable(leaf, nullable)})",
                f"{name}.{sub}",
                lambda of: list_array(of.offsets(name), array(of.values(name, sub))),
            )
        elif _is_bytes(kind):
            code = _dtype(kind)
            if not code:
                raise TypeError(f"field {name}.{sub}: bytes within a list need the logical type le-array")
            yield Column(
                sub,
                f"Array({PACKED[code]})",
                f"{name}.{sub}",
                lambda of: packed_lists(of.record_offsets(name, sub), of.values(name, sub), np.dtype(f"<{code}")),
            )
        elif kind["type"] == "array":
            yield from self._of_inner_array(name, sub, self.resolve(kind["items"]))
        else:
            raise TypeError(f"field {name}.{sub}: no column rule for the Avro type {declared!r}")

    def _of_inner_array(self, name: str, sub: str, items: Any) -> Iterator[Column]:  # noqa: ANN401 - a JSON tree
        leaf = self.leaf(items)
        if leaf is not None:
            array = leaf.array
            yield Column(
                f"{name}.{sub}",
                f"Array(Array({leaf.clickhouse}))",
                f"{name}.{sub}",
                lambda of: list_array(of.offsets(name), list_array(of.offsets(name, sub), array(of.items(name, sub)))),
            )
            return

        def outer_index(of: Gathered) -> pa.Array:
            outer, inner = of.offsets(name), of.offsets(name, sub)
            places = np.arange(outer[-1]) - np.repeat(outer[:-1], np.diff(outer))
            return list_array(inner[outer], pa.array(np.repeat(places, np.diff(inner))))

        yield Column(f"{sub}.{name.removesuffix('s')}", "Array(Int64)", f"{name}.{sub}", outer_index)
        for field in items["fields"]:
            inner = self.leaf(self.resolve(field["type"]))
            if inner is None:
                raise TypeError(f"field {name}.{sub}.{field['name']}: nested deeper than any column rule")
            yield _inner_column(name, sub, field["name"], inner)


def _is_bytes(kind: Any) -> bool:  # noqa: ANN401 - a JSON tree
    return kind == "bytes" or (isinstance(kind, dict) and kind["type"] == "bytes")


def _dtype(kind: Any) -> str:  # noqa: ANN401 - a JSON tree
    return kind.get("dtype", "") if isinstance(kind, dict) else ""


def _nullable(leaf: Leaf, nullable: bool) -> str:
    if not nullable:
        return leaf.clickhouse
    return "LowCardinality(Nullable(String))" if leaf is NAME else f"Nullable({leaf.clickhouse})"


def scalar_column(name: str, leaf: Leaf, nullable: bool = False, column: str = "") -> Column:
    """A column of one scalar attribute; `column` where it has another name."""
    return Column(column or name, _nullable(leaf, nullable), name, lambda of: leaf.array(of.values(name)))


def _optional_part(name: str, sub: str, leaf: Leaf) -> Column:
    def build(of: Gathered) -> pa.Array:
        return leaf.array([None if value is None else getattr(value, sub) for value in of.values(name)])

    return Column(f"{name}_{sub}", _nullable(leaf, True), f"{name}.{sub}", build)


def _inner_column(name: str, sub: str, part: str, leaf: Leaf) -> Column:
    def build(of: Gathered) -> pa.Array:
        return list_array(of.record_offsets(name, sub), leaf.array(of.values(name, sub, part)))

    return Column(f"{sub}.{part}", f"Array({leaf.clickhouse})", f"{name}.{sub}.{part}", build)


POSITION = (
    scalar_column("topic", NAME, column="_topic"),
    scalar_column("partition", PARTITION, column="_partition"),
    scalar_column("offset", INTEGER, column="_offset"),
    scalar_column("timestamp_ms", MILLISECONDS, column="_timestamp"),
    scalar_column("key", BYTES, column="_key"),
)
"""Where a row lies in the log; built from the row itself. `_topic` is the full name."""

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
    """The columns of a record type, position aside. Raises TypeError for a schema that no rule covers."""
    if record_type is DeadLetter:
        return DEAD_LETTER
    return tuple(Schema(current_schema(record_type)).columns())


def arrow_table(columns: Sequence[Column], rows: Sequence[Row]) -> pa.Table:
    """Rows as one Arrow table: position first, then the record's columns."""
    places, records = Gathered(rows), Gathered([row.record for row in rows])
    arrays = [*(c.build(places) for c in POSITION), *(c.build(records) for c in columns)]
    return pa.Table.from_arrays(arrays, names=[c.name for c in (*POSITION, *columns)])
