"""The versions of a run as a graph: deltas, anchors, skip-deltas, forks and the decisions about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from tidemill.consumers.view.tables import TableRows

STEP, LANE, EDGE = 34, 78, 44
MARKS = {"promote": "▲", "canary": "◇", "admit": "✓", "hold": "‖", "reject": "✕", "roll_back": "↩"}
"""Under a version, what was decided about it."""

Named = dict[str, Any]


@dataclass(slots=True)
class GraphNode:
    """One version of a branch."""

    name: str
    address: str
    anchor: bool
    x: int
    y: int
    marks: dict[str, str] = field(default_factory=dict)
    """The newest reason of each kind of decision."""


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """A way from one version to another."""

    kind: str
    """`delta`, `skip-delta`, `fork` or `roll_back`."""
    path: str
    title: str


@dataclass(slots=True)
class Graph:
    """The graph of one run, with the size of its drawing."""

    run: str
    nodes: list[GraphNode] = field(default_factory=list)
    edges: list[GraphEdge] = field(default_factory=list)
    lanes: list[tuple[str, int]] = field(default_factory=list)
    """Each branch's name, and the height at which it begins."""
    width: int = 0
    height: int = 0
    first: int = 0
    """The oldest version that is shown."""


def graphs(result: TableRows) -> list[Graph]:
    """A graph for each run of the query `weight_graph`."""
    runs: dict[str, list[Named]] = {}
    for row in result.rows:
        named = dict(zip(result.columns, row, strict=True))
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
            # It continues an older version: the path that was left stays where it is.
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


def _edge(kind: str, start: GraphNode, end: GraphNode, title: str) -> GraphEdge:
    bend = {"skip-delta": -26, "roll_back": 34}.get(kind, 0)
    middle, height = (start.x + end.x) / 2, (start.y + end.y) / 2 + 2 * bend
    return GraphEdge(
        kind, f"M{start.x} {start.y}Q{middle:g} {height:g} {end.x} {end.y}", f"{start.name} to {end.name}: {title}"
    )
