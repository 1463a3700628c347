"""Panels and pages: each panel is a named query, whose first comments say how it is drawn.

A line `-- key: value` below the question of a `.sql` file is for the page, and ClickHouse reads over it:

| key | value |
| --- | --- |
| title | the panel's heading |
| plot | line, steps, bars, heat, flow, graph (of versions) or record (one row, downwards); without it: a table |
| x, y | columns: the one across, and those upwards, with commas between them |
| by | column whose values are series of their own |
| low, high | columns of the ends of an interval around each column of `y`, in their order |
| unit | unit of `y`; with commas, one for each column of `y`, which then has a plot of its own |
| total | of a flow: column of the whole of each value of `by`, to which its rows' `y` add up |
| records | named query that lists the records under a row; it takes that row's columns as parameters |
| width | `full`: as wide as the page; without it as the plot needs |
| part | of a flow: address of the list of what a part counts; it takes `x` and `by`, `run_id` as `run` |
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
    """One query and how it is drawn."""

    name: str
    question: str
    sql: str
    drawn: dict[str, str] = field(default_factory=dict)
    """The values of the keys of the module's table."""
    fault: str = ""
    """Why its comments cannot be read; empty when they can."""

    @property
    def title(self) -> str:
        return self.drawn.get("title", self.question)

    @property
    def plot(self) -> str:
        return self.drawn.get("plot", "table")

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the values that the query takes."""
        return parameters_of(self.sql)


@dataclass(frozen=True, slots=True)
class Page:
    """A view: its address, its name, and its panels in their order."""

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
"""Panels in the order in which they are seen. A browser reads those in sight, so the slowest queries come late."""
PAGES = (
    Page("run", "Run", tuple(ABOUT_RUN.split())),
    Page("rollouts", "Rollouts", ()),
    Page("users", "Users", tuple(ABOUT_USERS.split())),
    Page("weights", "Weights", ("weight_graph", "delta_sizes", "weight_versions", "proofs")),
    Page("log", "Log", tuple(ABOUT_LOG.split())),
    Page("ask", "Ask", ()),
)


def parse(name: str, text: str) -> Panel:
    """The panel of a `.sql` file. Raises ValueError for a key or a plot that does not exist."""
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
    """Every named query as a panel, by name. One whose comments cannot be read has a fault, and the others go on."""
    found = {}
    for name, text in named_sql().items():
        try:
            found[name] = parse(name, text)
        except ValueError as error:
            found[name] = Panel(name, name, text, fault=str(error))
    return found
