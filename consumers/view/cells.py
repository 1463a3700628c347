"""How values are shown: their texts, the pages that they lead to, and tables of them."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote, urlencode

from markupsafe import Markup, escape

from tidemill.consumers.view.panels import Panel, panels
from tidemill.consumers.view.tables import TableRows

LINKS: dict[str, str] = {
    "interaction_id": "/users/",
    "rollout_id": "/rollouts/",
    "group_id": "/groups/",
    "step": "/run/step/",
    **dict.fromkeys(("version", "parent", "parent_version", "base", "serving"), "/weights/"),
}
"""The beginning of the address of a value's own page, by column."""
PARAMETER = "param_"
"""What the name of a query's parameter begins with in the address of a question, as in ClickHouse's."""
POSITIONS = tuple((f"{of}topic", f"{of}partition", f"{of}offset") for of in ("_", "", "source_"))
"""Columns that together name a record."""


def cell_text(value: object) -> str:
    """A value as `tidemill query` prints it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else str(value)


def shown_text(value: object) -> str:
    """A value as the page shows it: control, directional and invisible characters are seen."""
    return visible(cell_text(value))


def numeric(kind: str) -> bool:
    """Whether a ClickHouse type is a number's, to be aligned by its last digit."""
    return re.match(r"(Nullable\(|LowCardinality\()*(U?Int|Float|Decimal)", kind) is not None


def link(column: str, row: list[Any], columns: tuple[str, ...]) -> str:
    """The address of the page of a value in a table; empty without one. An offset leads to its record."""
    value = row[columns.index(column)]
    for topic, partition, offset in POSITIONS:
        if column == offset and topic in columns and partition in columns and value is not None:
            place = (row[columns.index(topic)], row[columns.index(partition)], value)
            return f"/log/record?{urlencode(dict(zip(('topic', 'partition', 'offset'), place, strict=True)))}"
    if value in (None, "") or column not in LINKS:
        return ""
    begin = LINKS[column]
    if column == "group_id" and "topic" in columns:
        # An input of a step: a group, an online batch (which has its record alone), or an interaction.
        source = str(row[columns.index("topic")])
        begin = {"online-batches": "", "interactions": LINKS["interaction_id"]}.get(source.rpartition(".")[2], begin)
    if not begin:
        return ""
    beside = {name: row[columns.index(of)] for name, of in (("run", "run_id"), ("branch", "branch")) if of in columns}
    beside = {name: each for name, each in beside.items() if each}
    return f"{begin}{quote(str(value), safe='')}" + (f"?{urlencode(beside)}" if beside else "")


def records(name: str, row: list[Any], columns: tuple[str, ...]) -> str:
    """The address of the records under a row, which the query `name` lists."""
    values = {column: cell_text(value) for column, value in zip(columns, row, strict=True)}
    return asked_at(panels()[name], {"run": values.get("run_id", ""), **values})


def asked_at(panel: Panel, values: dict[str, str]) -> str:
    """The address at which a panel's query is asked with some values."""
    own = {f"{PARAMETER}{name}": values[name] for name in panel.parameters if values.get(name)}
    return f"/ask?{urlencode({'name': panel.name, **own})}"


def table_body(result: TableRows, under: str) -> Markup:
    """The rows of a table, escaped; made here, since a template takes ten times as long for a cell.

    Args:
        under: query that lists the records under a row, to which the last cell leads; empty for none.
    """
    classes = [' class="n"' if numeric(kind) else "" for kind in result.types]
    lines = []
    for row in result.rows:
        cells = [f"<td{classes[place]}>{cell(result, row, place)}</td>" for place in range(len(result.columns))]
        if under:
            cells.append(f'<td><a href="{escape(records(under, row, result.columns))}">records</a></td>')
        lines.append(f"<tr>{''.join(cells)}</tr>\n")
    return Markup("".join(lines))


def cell(result: TableRows, row: list[Any], place: int) -> Markup:
    """One value of a row, escaped: a number or a text, a time that the browser shows in its zone, or a link."""
    value, column = row[place], result.columns[place]
    if value and "DateTime" in result.types[place]:
        return Markup('<time datetime="{}Z">{}</time>').format(str(value).replace(" ", "T"), value)
    text = str(value) if type(value) in (int, float) else shown_text(value)
    if column not in LINKS and not column.endswith("offset"):
        return escape(text)
    address = link(column, row, result.columns)
    return Markup('<a href="{}">{}</a>').format(address, text) if address else escape(text)


# Not the line break and the tab, and not the two joiners that ordinary words and emoji need.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
CONTROL_PICTURES = 0x2400


def visible(text: str) -> str:
    """A text whose control, directional and invisible characters are shown by their signs or their numbers."""
    return _HIDDEN.sub(_shown, text)


def _shown(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(CONTROL_PICTURES + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def clipped(text: str, most: int) -> str:
    """The beginning of a long text, with the number of characters that are left out."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} characters more)"
