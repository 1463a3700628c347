"""Panels and pages: each panel is a named query, whose first comments define how it is drawn.

A line `-- key: value` below the question of a `.sql` file is for the page; ClickHouse ignores it:

| key | value |
| --- | --- |
| title | the panel's heading |
| plot | line, steps, bars, heat, flow, graph (of versions) or record (one row, vertical); default: a table |
| x, y | columns: one for the horizontal axis, and those for the vertical axis, separated by commas |
| by | column; each of its values is a series |
| low, high | columns with the ends of an interval around each column of `y`, in the same order |
| unit | unit of `y`; or, separated by commas, one for each column of `y`, which then has its own plot |
| total | for a flow: column with the total of each value of `by`, which is the sum of its rows' `y` |
| records | named query that lists the records of a row; it takes that row's columns as parameters |
| width | `full`: as wide as the page; default: the width that the plot needs |
| part | for a flow: address of the list of the items of a part; it takes `x` and `by`, `run_id` as `run` |
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile

from tidemill.consumers.sink.query import named_sql, parameters_of

KEYS = frozenset({"title", "plot", "x", "y", "by", "low", "high", "unit", "total", "part", "records", "width"})
PLOTS = frozenset({"line", "steps", "bars", "heat", "flow", "graph", "record", "table"})


@dataclass(frozen=True, slots=True)
class Panel:
    """One query, and the settings for drawing it."""

    name: str
    question: str
    sql: str
    drawn: dict[str, str] = field(default_factory=dict)
    """The values of the keys of the module's table."""
    fault: str = ""
    """The reason if its comments cannot be parsed; otherwise empty."""

    @property
    def title(self) -> str:
        return self.drawn.get("title", self.question)

    @property
    def plot(self) -> str:
        return self.drawn.get("plot", "table")

    @property
    def parameters(self) -> tuple[str, ...]:
        return parameters_of(self.sql)


@dataclass(frozen=True, slots=True)
class Page:
    """A view: its address, its name, and its panels in order."""

    path: str
    title: str
    panels: tuple[str, ...]


ABOUT_RUN = """
    held_out_by_version reward_by_environment lag_by_step policy_lag_histogram mismatch mismatch_by_step
    delta_by_version served_by_replica accounting overlap_by_step replicas refusals"""
ABOUT_USERS = """
    reward_by_arm outcomes_by_reason online_accounting gate_timeline gate_evidence feedback_to_served arms
    interaction_list"""
ABOUT_LOG = "log_topics log_rates log_dead_letters failures log_gaps log_prefixes log_results"
"""Panels in their order on the page. A browser requests the visible ones, so the slowest queries are last."""
PAGES = (
    Page("run", "Run", tuple(ABOUT_RUN.split())),
    Page("rollouts", "Rollouts", ()),
    Page("users", "Users", tuple(ABOUT_USERS.split())),
    Page("weights", "Weights", ("weight_graph", "delta_sizes", "weight_versions", "proofs")),
    Page("log", "Log", tuple(ABOUT_LOG.split())),
    Page("ask", "Ask", ()),
)


def parse(name: str, text: str) -> Panel:
    """Parse the panel of a `.sql` file. Raises ValueError for a key or a plot that does not exist."""
    lines = takewhile(lambda line: line.startswith("--"), text.split("\n"))
    comments = [line.removeprefix("--").strip() for line in lines]
    drawn: dict[str, str] = {}
    for line in comments[1:]:
        key, colon, value = line.partition(": ")
        if not colon or not re.fullmatch(r"[a-z]+", key):
            continue
        if key not in KEYS:
            raise ValueError(f"{name}.sql: no key {key!r}; there are {', '.join(sorted(KEYS))}")
        drawn[key] = value.strip()
    if drawn.get("plot", "table") not in PLOTS:
        raise ValueError(f"{name}.sql: no plot {drawn['plot']!r}; there are {', '.join(sorted(PLOTS))}")
    return Panel(name, comments[0] if comments else name, text, drawn)


@lru_cache(maxsize=1)
def panels() -> dict[str, Panel]:
    """Return every named query as a panel, by name. If its comments cannot be parsed, only that panel has a fault."""
    found = {}
    for name, text in named_sql().items():
        try:
            found[name] = parse(name, text)
        except ValueError as error:
            found[name] = Panel(name, name, text, fault=str(error))
    return found
