"""The rows of a plot for the browser: the columns that are drawn, and no more places than can be seen. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
