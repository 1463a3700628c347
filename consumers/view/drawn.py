"""Display of rows: texts and links of values, tables, plots for the browser, bars and graphs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
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
"""The first part of the address of a value's own page, by column."""
PARAMETER = "param_"
"""The prefix of a query parameter in the address of a query, as in ClickHouse."""
Named = dict[str, Any]
"""Values by name: a row of a table, or a part of a drawing for a template."""
POSITIONS = tuple((f"{of}topic", f"{of}partition", f"{of}offset") for of in ("_", "", "source_"))
"""Columns that together identify a record."""


def cell_text(value: object) -> str:
    """Format a value as `tidemill query` prints it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else str(value)


def shown_text(value: object) -> str:
    """Format a value as the page shows it: control, directional and invisible characters become visible."""
    return visible(cell_text(value))


def numeric(kind: str) -> bool:
    """Whether a ClickHouse type is numeric, so that its values are aligned right."""
    return re.match(r"(Nullable\(|LowCardinality\()*(U?Int|Float|Decimal)", kind) is not None


def link(column: str, row: list[Any], columns: tuple[str, ...]) -> str:
    """Return the address of the page of a value in a table; empty if it has none. An offset links to its record."""
    value = row[columns.index(column)]
    for topic, partition, offset in POSITIONS:
        if column == offset and topic in columns and partition in columns and value is not None:
            place = (row[columns.index(topic)], row[columns.index(partition)], value)
            return f"/log/record?{urlencode(dict(zip(('topic', 'partition', 'offset'), place, strict=True)))}"
    # A failed rollout has no version: -1.
    if value in (None, "", -1) or column not in LINKS:
        return ""
    begin = LINKS[column]
    if column == "group_id" and "topic" in columns:
        # An input of a step: a group, an online batch (which has only the page of its record), or an interaction.
        source = str(row[columns.index("topic")])
        begin = {"online-batches": "", "interactions": LINKS["interaction_id"]}.get(source.rpartition(".")[2], begin)
    if not begin:
        return ""
    beside = {name: row[columns.index(of)] for name, of in (("run", "run_id"), ("branch", "branch")) if of in columns}
    beside = {name: each for name, each in beside.items() if each}
    return f"{begin}{quote(str(value), safe='')}" + (f"?{urlencode(beside)}" if beside else "")


def asked_at(panel: Panel, values: dict[str, str]) -> str:
    """Return the address that runs a panel's query with the given values."""
    own = {f"{PARAMETER}{name}": values[name] for name in panel.parameters if values.get(name)}
    return f"/ask?{urlencode({'name': panel.name, **own})}"


def table_body(result: TableRows, under: str) -> Markup:
    """Return the rows of a table, escaped; built in Python, since a template takes ten times as long for a cell.

    Args:
        under: query that lists the records of a row, to which the last cell links; empty for none.
    """
    classes = [' class="n"' if numeric(kind) else "" for kind in result.types]
    lines = []
    for row in result.rows:
        cells = [f"<td{classes[place]}>{cell(result, row, place)}</td>" for place in range(len(result.columns))]
        if under:
            values = {column: cell_text(value) for column, value in zip(result.columns, row, strict=True)}
            address = asked_at(panels()[under], {"run": values.get("run_id", ""), **values})
            cells.append(f'<td><a href="{escape(address)}">records</a></td>')
        lines.append(f"<tr>{''.join(cells)}</tr>\n")
    return Markup("".join(lines))


def cell(result: TableRows, row: list[Any], place: int) -> Markup:
    """Return one value of a row, escaped: a number, a text, a link, or a time that the browser shows in its zone."""
    value, column = row[place], result.columns[place]
    if value and "DateTime" in result.types[place]:
        return Markup('<time datetime="{}Z">{}</time>').format(str(value).replace(" ", "T"), value)
    text = str(value) if type(value) in (int, float) else shown_text(value)
    if column not in LINKS and not column.endswith("offset"):
        return escape(text)
    address = link(column, row, result.columns)
    return Markup('<a href="{}">{}</a>').format(address, text) if address else escape(text)


# Excludes the line break and the tab, and the two joiners that ordinary words and emoji need.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
CONTROL_PICTURES = 0x2400


def visible(text: str) -> str:
    """Replace control, directional and invisible characters of a text by symbols or by their numbers."""

    def shown(found: re.Match[str]) -> str:
        code = ord(found[0])
        return chr(CONTROL_PICTURES + code) if code < 0x20 else f"⟨U+{code:04X}⟩"

    return _HIDDEN.sub(shown, text)


def clipped(text: str, most: int) -> str:
    """Return the first part of a long text, with the number of omitted characters."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} characters more)"


PLOTTED = frozenset({"line", "steps", "bars", "heat"})
"""Plots that the browser draws from rows."""
PLACES = 200
"""Maximum number of values of `x` that are drawn: a panel is about 600 pixels wide."""


def plotted(panel: Panel, result: TableRows) -> dict[str, Any]:
    """Return the `rows` of a panel to draw, with their `columns`; of the values of `x` only each `every`-th is drawn,
    including the last one."""
    drawn = ",".join(panel.drawn.get(key, "") for key in ("x", "y", "by", "low", "high"))
    named = ("run_id", *(name.strip() for name in drawn.split(",")))
    columns = [name for name in dict.fromkeys(named) if name in result.columns]
    places = [result.columns.index(name) for name in columns]
    x = result.columns.index(panel.drawn["x"])
    known = sorted({row[x] for row in result.rows if row[x] is not None})
    every = -(-len(known) // PLACES)
    kept = set(known[::-1][::every]) if every > 1 else set(known)
    chosen = ([row[place] for place in places] for row in result.rows if row[x] in kept)
    rows = [[visible(value) if isinstance(value, str) else value for value in row] for row in chosen]
    return {"columns": columns, "rows": rows, "every": max(1, every)}


WIDTH = 1000.0
"""Width of a bar, in its own units."""
KINDS = {"trained": "good", "evaluated": "good", "reward": "good", "failed": "bad", "open": "quiet", "more": "bad"}
"""The colour of a part by its first word; other parts have the colours of the series."""


def flows(panel: Panel, result: TableRows) -> list[Named]:
    """Return the bars of a panel: a bar for each value of the columns `by`, a part for each of its rows.

    Returns:
        of each bar its `name`, its `total`, its `parts`, and the number that the parts lack (`missing`); of each part
        its `name`, its `count`, the place of its rectangle (`x`, `width`), the CSS class of its `colour`, and the
        columns that identify it as the `query` string of an address.
    """
    by = [name.strip() for name in panel.drawn["by"].split(",")]
    name, count = panel.drawn["x"], panel.drawn["y"]
    kinds: dict[tuple[Any, ...], list[Named]] = {}
    for named in result.named():
        kinds.setdefault(tuple(named[each] for each in by), []).append(named)
    found = []
    for kind, rows in kinds.items():
        total = int(rows[0][panel.drawn["total"]])
        parts, reached, other, scale = list[Named](), 0, 0, WIDTH / max(1, total)
        for row in sorted(rows, key=lambda row: -row[count]):
            colour = KINDS.get(str(row[name]).split(":")[0].split(" ")[0], "")
            if not colour:
                colour, other = f"part-{other % 3}", other + 1
            query = urlencode({"run" if each == "run_id" else each: row[each] for each in [*by, name]})
            part = {"name": visible(str(row[name])), "count": row[count], "colour": colour, "query": query}
            parts.append({**part, "x": reached * scale, "width": row[count] * scale})
            reached += row[count]
        title = visible(" · ".join(map(str, kind)))
        found.append({"name": title, "total": total, "parts": parts, "missing": total - reached})
    return found


STEP, LANE, EDGE = 34, 78, 44
MARKS = {"promote": "▲", "canary": "◇", "admit": "✓", "hold": "‖", "reject": "✕", "roll_back": "↩"}
"""The mark under a version for each kind of decision about it."""


@dataclass(slots=True)
class GraphNode:
    name: str
    address: str
    anchor: bool
    x: int
    y: int
    marks: dict[str, str] = field(default_factory=dict)
    """The newest reason of each kind of decision."""


@dataclass(slots=True)
class Graph:
    """The graph of one run, with the size of its drawing."""

    run: str
    nodes: list[GraphNode] = field(default_factory=list)
    edges: list[dict[str, str]] = field(default_factory=list)
    """Connections from one version to another: `kind` (delta, skip-delta, fork or roll_back), `path` and `title`."""
    lanes: list[tuple[str, int]] = field(default_factory=list)
    """Each branch's name, and the vertical position of its first lane."""
    width: int = 0
    height: int = 0
    first: int = 0
    """The oldest version shown."""


def graphs(result: TableRows) -> list[Graph]:
    """Return a graph for each run of the query `weight_graph`."""
    runs: dict[str, list[Named]] = {}
    for named in result.named():
        runs.setdefault(named["run_id"], []).append(named)
    return [graph for run, rows in runs.items() if (graph := _graph(run, rows)).nodes]


def _graph(run: str, rows: list[Named]) -> Graph:
    versions = [row for row in rows if row["kind"] == "version"]
    places = {version: n for n, version in enumerate(sorted({row["version"] for row in versions}))}
    graph = Graph(run, width=EDGE * 2 + STEP * len(places), first=min(places, default=0))
    found: dict[tuple[str, str, int], GraphNode] = {}
    lane, branch, tip = -1, None, None
    for row in versions:
        of = (row["branch"], row["incarnation"])
        if of != branch:
            branch, lane = of, lane + 1
            graph.lanes.append((row["branch"], lane * LANE + 14))
        elif row["base"] != tip:
            # It continues an older version: the abandoned path keeps its lane.
            lane += 1
        tip = row["version"]
        address = f"/weights/{row['version']}?{urlencode({'run': run, 'branch': row['branch']})}"
        x, y = EDGE + STEP * places[row["version"]], lane * LANE + EDGE
        node = GraphNode(str(row["version"]), address, bool(row["anchor"]), x, y)
        parent = found.get((*of, row["base"]))
        if parent is not None:
            graph.edges.append(_edge("delta", parent, node, f"delta of {row['bytes']} bytes"))
        found[(*of, row["version"])] = node
        graph.nodes.append(node)
    for row in versions:
        for other in versions if row["base"] is None else ():
            same = (other["version"], other["fingerprint"]) == (row["version"], row["fingerprint"])
            if same and other["base"] is not None and other["branch"] != row["branch"]:
                start, end = (found[each["branch"], each["incarnation"], each["version"]] for each in (other, row))
                graph.edges.append(_edge("fork", start, end, f"{row['branch']} begins with this version"))
    graph.height = (lane + 1) * LANE + 20
    newest = {(branch, version): node for (branch, _, version), node in found.items()}
    for row in rows:
        if row["kind"] == "skip-delta" and (row["branch"], row["base"]) in newest:
            target = newest.get((row["branch"], row["version"]))
            if target is not None:
                start = newest[row["branch"], row["base"]]
                graph.edges.append(_edge("skip-delta", start, target, f"skip-delta of {row['bytes']} bytes"))
    served: dict[str, GraphNode] = {}
    for row in sorted((row for row in rows if row["kind"] in MARKS), key=lambda row: row["place"]):
        node_of = newest.get((row["branch"], row["version"]))
        if node_of is None:
            continue
        node_of.marks[row["kind"]] = row["reason"]
        if row["kind"] == "roll_back" and row["branch"] in served and served[row["branch"]] is not node_of:
            graph.edges.append(_edge("roll_back", served[row["branch"]], node_of, f"roll back: {row['reason']}"))
        if row["kind"] in ("promote", "roll_back"):
            served[row["branch"]] = node_of
    return graph


def _edge(kind: str, start: GraphNode, end: GraphNode, title: str) -> dict[str, str]:
    bend = {"skip-delta": -26, "roll_back": 34}.get(kind, 0)
    middle, height = (start.x + end.x) / 2, (start.y + end.y) / 2 + 2 * bend
    path = f"M{start.x} {start.y}Q{middle:g} {height:g} {end.x} {end.y}"
    return {"kind": kind, "path": path, "title": f"{start.name} to {end.name}: {title}"}
