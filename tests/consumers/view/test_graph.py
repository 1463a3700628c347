"""The graph of versions and the bars of endings, as drawn from rows; and the pages of a step and of a version."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.view.app import application
from tidemill.consumers.view.config import ViewSettings
from tidemill.consumers.view.drawn import Graph, flows, graphs
from tidemill.consumers.view.panels import panels
from tidemill.consumers.view.tables import TableRows, Tables

COLUMNS = (
    "run_id",
    "branch",
    "incarnation",
    "kind",
    "version",
    "base",
    "fingerprint",
    "bytes",
    "anchor",
    "reason",
    "place",
)


def drawn(*rows: tuple[Any, ...]) -> Graph:
    """Return a graph of rows (branch, kind, version, base, fingerprint)."""
    kept = [["run", b, "i" if k == "version" else "", k, v, base, f, 7, base is None, "why", n]
            for n, (b, k, v, base, f) in enumerate(rows)]  # fmt: skip
    (graph,) = graphs(TableRows(COLUMNS, ("String",) * len(COLUMNS), kept, False, 0.0))
    return graph


def edges(graph: Graph, kind: str) -> list[str]:
    return [edge["title"].split(":")[0] for edge in graph.edges if edge["kind"] == kind]


def test_deltas_anchors_and_skip_deltas():
    chain = [("main", "version", n, n - 1 if n else None, f"f{n}") for n in range(5)]
    graph = drawn(*chain, ("main", "skip-delta", 4, 0, ""), ("main", "skip-delta", 4, -9, ""))
    assert edges(graph, "delta") == ["0 to 1", "1 to 2", "2 to 3", "3 to 4"]
    assert edges(graph, "skip-delta") == ["0 to 4"]
    assert [node.anchor for node in graph.nodes] == [True, False, False, False, False]
    assert len({node.y for node in graph.nodes}) == 1
    assert graph.nodes[3].address == "/weights/3?run=run&branch=main"


def test_a_version_that_continues_an_older_one_has_a_lane_of_its_own():
    graph = drawn(*[("main", "version", v, p, f"f{v}") for v, p in ((0, None), (1, 0), (2, 1), (3, 1), (4, 3))])
    heights = [node.y for node in graph.nodes]
    assert heights[0] == heights[1] == heights[2] < heights[3] == heights[4]
    assert edges(graph, "delta") == ["0 to 1", "1 to 2", "1 to 3", "3 to 4"]


def test_a_fork_leads_from_the_version_with_the_same_weights():
    main = [("main", "version", n, n - 1 if n else None, f"f{n}") for n in range(3)]
    graph = drawn(("a-fork", "version", 2, None, "f2"), ("a-fork", "version", 3, 2, "g3"), *main)
    assert edges(graph, "fork") == ["2 to 2"] and [name for name, _ in graph.lanes] == ["a-fork", "main"]
    other = drawn(("a-fork", "version", 2, None, "else"), *main)
    assert edges(other, "fork") == []


def test_a_roll_back_leads_from_the_served_version():
    chain = [("main", "version", n, n - 1 if n else None, f"f{n}") for n in range(4)]
    decided = [
        ("main", kind, v, None, "") for kind, v in (("promote", 1), ("promote", 3), ("roll_back", 1), ("reject", 77))
    ]
    graph = drawn(*chain, *decided)
    assert edges(graph, "roll_back") == ["3 to 1"]
    assert [list(node.marks) for node in graph.nodes] == [[], ["promote", "roll_back"], [], ["promote"]]


@pytest.mark.parametrize(("total", "missing"), [(10, 0), (12, 2)])
def test_parts_that_do_not_add_up_are_reported(total: int, missing: int):
    rows = [["run\u202e", "train", "trained", 6, total], ["run\u202e", "train", "excluded: <b>\0", 4, total]]
    columns = ("run_id", "mode", "ending", "rollouts", "total")
    (flow,) = flows(panels()["accounting"], TableRows(columns, ("String",) * 5, rows, False, 0.0))
    assert flow["missing"] == missing and [part["count"] for part in flow["parts"]] == [6, 4]
    assert (flow["name"], flow["parts"][1]["name"]) == ("run⟨U+202E⟩ · train", "excluded: <b>␀")
    assert flow["parts"][1]["query"] == "run=run%E2%80%AE&mode=train&ending=excluded%3A+%3Cb%3E%00"


def test_a_step_and_a_version_have_pages_and_other_words_have_none():
    view = ViewSettings()
    page = TestClient(application(Tables(SinkSettings(), view), view), base_url="http://127.0.0.1")
    step = page.get("/run/step/12?run=r%22%3E<script>").text
    assert "Step 12" in step and 'step_inputs?run=r%22%3E%3Cscript%3E&amp;step=12"' in step
    assert "version_proofs?branch=b&amp;version=3" in page.get("/weights/3?branch=b").text
    assert [page.get(path).status_code for path in ("/run/step/x", "/run/step/-1", "/weights/1.5")] == [404] * 3
