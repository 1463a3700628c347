"""Rows drawn: plots for the browser, no more places than can be seen, and counts whose parts add up, as bars. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from tidemill.consumers.view.panels import Panel
from tidemill.consumers.view.tables import TableRows

PLOTTED = frozenset({"line", "steps", "bars", "heat"})
"""Plots that the browser draws from rows."""
PLACES = 400
"""Values of `x` that are drawn: a panel is some 600 pixels wide."""


@dataclass(frozen=True, slots=True)
class Plotted:
    """Rows to draw."""

    columns: list[str]
    rows: list[list[Any]]
    every: int
    """One value of `x` in so many is drawn, the last of them among those."""


def plotted(panel: Panel, result: TableRows) -> Plotted:
    """The rows of a panel to draw."""
    drawn = ",".join(panel.drawn.get(key, "") for key in ("x", "y", "by", "low", "high"))
    named = ("run_id", *(name.strip() for name in drawn.split(",")))
    columns = [name for name in dict.fromkeys(named) if name in result.columns]
    places = [result.columns.index(name) for name in columns]
    x = result.columns.index(panel.drawn["x"])
    known = sorted({row[x] for row in result.rows if row[x] is not None})
    every = -(-len(known) // PLACES)
    kept = set(known[::-1][::every]) if every > 1 else set(known)
    return Plotted(columns, [[row[place] for place in places] for row in result.rows if row[x] in kept], max(1, every))


WIDTH = 1000.0
"""Of a bar, in its own units."""
KINDS = {"trained": "good", "reward": "good", "failed": "bad", "open": "quiet", "more": "bad"}
"""The colour of a part by its first word; any other part has one of the series' colours."""


@dataclass(frozen=True, slots=True)
class FlowPart:
    """One part of a whole."""

    name: str
    count: int
    x: float
    width: float
    colour: str
    """Name of a class."""
    query: str
    """The columns that name the part, as the query of an address."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A whole, its parts, and whether they add up to it."""

    name: str
    total: int
    parts: list[FlowPart]

    @property
    def missing(self) -> int:
        """What the parts lack of the whole; 0 when they add up."""
        return self.total - sum(part.count for part in self.parts)


def flows(panel: Panel, result: TableRows) -> list[Flow]:
    """The bars of a panel: a bar for each value of the columns `by`, a part for each of its rows."""
    by = [name.strip() for name in panel.drawn["by"].split(",")]
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in result.rows:
        named = dict(zip(result.columns, row, strict=True))
        kinds.setdefault(tuple(named[name] for name in by), []).append(named)
    return [_flow(panel, by, rows) for rows in kinds.values()]


def _flow(panel: Panel, by: list[str], rows: list[dict[str, Any]]) -> Flow:
    name, count = panel.drawn["x"], panel.drawn["y"]
    total = int(rows[0][panel.drawn["total"]])
    parts, reached, other = [], 0, 0
    for row in sorted(rows, key=lambda row: -row[count]):
        colour = KINDS.get(str(row[name]).split(":")[0].split(" ")[0], "")
        if not colour:
            colour, other = f"part-{other % 3}", other + 1
        query = urlencode({"run" if each == "run_id" else each: row[each] for each in [*by, name]})
        scale = WIDTH / max(1, total)
        parts.append(FlowPart(str(row[name]), row[count], reached * scale, row[count] * scale, colour, query))
        reached += row[count]
    return Flow(" · ".join(str(rows[0][each]) for each in by), total, parts)
