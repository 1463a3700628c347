"""The view Log, and the page of one record of any topic: every field, long values in parts, links to references."""

from __future__ import annotations

import math
import re
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tidemill.consumers.sink.columns import Column
from tidemill.consumers.sink.query import QueryFailed
from tidemill.consumers.sink.rows import DeadLetter
from tidemill.consumers.sink.tables import Table, tables
from tidemill.consumers.view.drawn import Named, link
from tidemill.consumers.view.panels import PAGES
from tidemill.consumers.view.site import MOST_VALUE, Site
from tidemill.consumers.view.tables import TableRows
from tidemill.schemas.catalogue import CATALOGUE, Topic

PART = {"String": 4_000, "Array": 200}
"""Number of characters of a text, and of elements of an array, in one part."""
PLACE = "_topic = {topic:String} AND _partition = {partition:Int32}"


def topic_of(name: str) -> tuple[str, Topic] | None:
    """Return the prefix and the topic of a full name; None if it is not a topic of the catalogue under any prefix."""
    plain = name.removesuffix(".dlq")
    found = [topic for topic in Topic if plain.endswith(topic.value)]
    longest = max(found, key=lambda topic: len(topic.value), default=None)
    return None if longest is None else (plain.removesuffix(longest.value), longest)


def shape(kind: str) -> str:
    """Return `String`, `Array` or, for any other ClickHouse type, an empty text."""
    inner = kind.removeprefix("LowCardinality(").removeprefix("Nullable(")
    return next((name for name in PART if inner.startswith(name)), "")


def selection(table: Table, field: str, part: int) -> str:
    """Return the SQL columns of a record's row, long ones cut to one part; of one field, or of all if it is empty.

    Each column is followed by its length, as `#column`. Bytes that are not text are shown as hexadecimal digits.
    """
    parts = []
    for column in table.all_columns:
        if field and field not in (column.name, column.name.partition(".")[0]):
            continue
        # With the table's name, since otherwise an alias of the same name would have priority.
        name, own, kind = f"`{column.name}`", f"r.`{column.name}`", shape(column.type)
        first = (part - 1) * PART.get(kind, 0)
        if kind == "String":
            whole = f"isValidUTF8(ifNull({own}, ''))"
            text = f"substringUTF8({own}, {first + 1}, {PART[kind]})"
            digits = f"concat('0x', hex(substring({own}, {first // 2 + 1}, {PART[kind] // 2})))"
            parts.append(f"if({whole}, {text}, {digits}) AS {name}")
            parts.append(f"if({whole}, lengthUTF8({own}), 2 * length({own})) AS `#{column.name}`")
        elif kind == "Array":
            parts.append(f"arraySlice({own}, {first + 1}, {PART[kind]}) AS {name}")
            parts.append(f"length({own}) AS `#{column.name}`")
        else:
            parts.append(name)
    return ", ".join(parts)


def fields_of(table: Table, found: TableRows, prefix: str) -> list[Named]:
    """Return the fields of a record's row, all fields of a list of records side by side as one.

    Args:
        found: rows of `selection`.
        prefix: prefix of the record's topic; its references are to topics of the same prefix.

    Returns of each field its `name`, its number of `parts`, and a `table`: the elements of a list of records, or the
    entries of a map. For any other field the table is None, and there are its `value`, its ClickHouse type (`kind`),
    and the `address` of the value's own page, empty if there is none.
    """
    values = dict(zip(found.columns, found.rows[0], strict=True))
    own = [column for column in table.all_columns if column.name in values]
    row, columns = [values[column.name] for column in own], tuple(column.name for column in own)
    fields, lists = list[Named](), dict[str, list[Column]]()
    for column in own:
        name, value = column.name, values[column.name]
        parts = math.ceil(int(values.get(f"#{name}") or 0) / PART.get(shape(column.type), 1))
        if "." in name:
            lists.setdefault(name.partition(".")[0], []).append(column)
        elif isinstance(value, dict):
            entries = TableRows(("name", "value"), ("String", "Float64"), list(map(list, value.items())))
            fields.append({"name": name, "parts": 1, "table": entries})
        else:
            address = "" if name == "_offset" else link(name, row, columns)
            shown = {"kind": column.type, "value": value, "address": address}
            fields.append({"name": name, "parts": parts, "table": None, **shown})
    for name, members in lists.items():
        parts = math.ceil(max(int(values[f"#{member.name}"]) for member in members) / PART["Array"])
        inner = tuple(member.name.partition(".")[2] for member in members)
        kinds = tuple(member.type.removeprefix("Array(").removesuffix(")") for member in members)
        beside = [values[member.name] for member in members]
        if "topic" in inner:
            place = inner.index("topic")
            beside[place] = [f"{prefix}{topic}" for topic in beside[place]]
        elements = TableRows(inner, kinds, list(map(list, zip(*beside, strict=True))))
        fields.append({"name": name, "parts": parts, "table": elements})
    return fields


def routes(site: Site) -> list[BaseRoute]:
    """Return the routes of the view and of the page of a record."""
    here = next(page for page in PAGES if page.path == "log")

    async def page(request: Request) -> Response:
        return await site.page(here, dict(request.query_params), template="log.html")

    async def answer(request: Request) -> Response:
        given = {name: request.query_params.get(name, "")[:MOST_VALUE] for name in ("topic", "partition", "offset")}
        field, part = request.query_params.get("field", ""), request.query_params.get("part", "1")
        named = topic_of(given["topic"])
        shown: dict[str, Any] = {"page": here, "place": given, "field": field, "part": 1}
        shown |= {"message": "", "near": [], "table": "", "fields": [], "sql": ""}
        numbers = re.fullmatch(r"\d{1,9} \d{1,18} [1-9]\d{0,8}", f"{given['partition']} {given['offset']} {part}")
        if named is None:
            shown |= {"status": 404, "message": f"no topic of Tidemill is called {given['topic']!r}"}
        elif numbers is None:
            shown |= {"status": 400, "message": "partition, offset and part are whole numbers"}
        else:
            try:
                shown |= {"part": int(part)} | await _found(named, given, field, int(part))
            except QueryFailed as error:
                shown |= {"status": 502, "message": str(error)}
        return site.html("record.html", **shown)

    async def _found(named: tuple[str, Topic], given: dict[str, str], field: str, part: int) -> dict[str, Any]:
        near = []
        # A record of the topic, or a dead letter about one.
        for table in (tables()[kind] for kind in (*CATALOGUE[named[1]].values, DeadLetter)):
            place = dict(given)
            if place["topic"] == named[1].value:
                # A name without prefix, as in references: it must belong to only one topic.
                known = await site.tables.ask(f"SELECT DISTINCT _topic FROM `{table.name}`")
                full = [row[0] for row in known.rows if row[0].endswith(place["topic"])]
                place["topic"] = full[0] if len(full) == 1 else place["topic"]
            beside = await site.tables.ask(
                "SELECT maxIf(toNullable(_offset), _offset < {offset:Int64}), minIf(toNullable(_offset), "
                f"_offset > {{offset:Int64}}) FROM `{table.name}` WHERE {PLACE}",
                place,
            )
            for way, offset in zip(("previous", "next"), beside.rows[0], strict=True):
                if offset is not None:
                    address = f"/log/record?{urlencode({**place, 'offset': offset})}"
                    near.append((f"{way} in {table.name}", address))
            chosen = selection(table, field, part)
            if not chosen:
                continue
            one = f"FROM `{table.name}` AS r WHERE {PLACE} AND _offset = {{offset:Int64}}"
            found = await site.tables.ask(f"SELECT {chosen} {one} LIMIT 1", place)
            if found.rows:
                prefix = place["topic"].removesuffix(".dlq").removesuffix(named[1].value)
                fields = fields_of(table, found, prefix)
                return {"place": place, "table": table.name, "fields": fields, "near": near, "sql": f"SELECT * {one}"}
        message = "the tables hold no record here: a mark of a transaction, erased or deleted, or not read yet"
        return {"status": 404, "message": message, "near": near}

    return [Route("/log", page), Route("/log/record", answer)]
