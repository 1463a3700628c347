"""A panel shows the same values as `tidemill query` on the same tables."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable
from functools import lru_cache
from html.parser import HTMLParser

import pytest

from tests.consumers.view.conftest import View
from tidemill.consumers.sink.query import QueryResult
from tidemill.consumers.view.drawn import cell_text, visible
from tidemill.consumers.view.panels import PAGES, Panel, panels

USED = [panels()[name] for page in PAGES for name in page.panels]


class Cells(HTMLParser):
    """The texts of a table's cells, by row; times unchanged, in UTC."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self._inside = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "td"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.rows[-1][-1] += data


def cells(page: str) -> list[list[str]]:
    parser = Cells()
    parser.feed(page)
    return [row for row in parser.rows if row]


@pytest.fixture(scope="module")
def answer_of(view: View) -> Callable[[str], QueryResult]:
    """Return the output of `tidemill query` for a name, queried once."""
    return lru_cache(view.query)


@pytest.mark.parametrize("panel", USED, ids=lambda panel: panel.name)
def test_a_panel_shows_the_rows_of_its_query(view: View, answer_of: Callable[[str], QueryResult], panel: Panel):
    answer = answer_of(panel.name)
    texts = [[cell_text(value) for value in row] for row in answer.rows]
    assert view.get(f"/panel/{panel.name}.json").json() == [
        dict(zip(answer.columns, row, strict=True)) for row in answer.rows
    ]
    header, *rows = csv.reader(io.StringIO(view.get(f"/panel/{panel.name}.csv").text, newline=""))
    assert (header, rows) == (answer.columns, texts)
    # A last cell may lead to the records under the row.
    shown, address = [], f"/rows/{panel.name}"
    while address:
        part = view.get(address).text
        shown += [row[: len(answer.columns)] for row in cells(part)]
        later = re.search(r'href="([^"]*)" data-turn>later', part)
        address = html.unescape(later[1]) if later else ""
    assert shown == [[visible(text) for text in row] for row in texts]


def test_a_chosen_run_is_chosen_in_the_query(view: View, answer_of: Callable[[str], QueryResult]):
    chosen = [panel.name for panel in USED if "run" in panel.parameters and "run_id" in answer_of(panel.name).columns]
    assert len(chosen) > 15
    for name in chosen:
        own, other = (view.get(f"/panel/{name}.json?run={run}").json() for run in ("run", "other"))
        assert (len(own), other) == (len(answer_of(name).rows), []), name


def test_most_panels_have_rows_to_compare(answer_of: Callable[[str], QueryResult]):
    empty = [panel.name for panel in USED if not answer_of(panel.name).rows]
    assert len(empty) <= len(USED) // 4, empty


@pytest.mark.parametrize("name", sorted(panels().keys() - {panel.name for panel in USED}))
def test_every_other_named_query_can_be_looked_at(view: View, name: str):
    answer = view.get(f"/panel/{name}")
    assert answer.status_code == 200 and 'class="failed"' not in answer.text


def test_a_run_is_judged_by_what_the_page_shows():
    shown = " ".join(f"{panel.title} {panel.question} {panel.sql}".lower() for panel in USED)
    for subject in ("policy lag", "reward", "held-out", "weight version", "pause", "delta_bytes"):
        assert subject in shown


def test_a_panel_that_has_not_changed_is_not_sent_again(view: View):
    first = view.get("/panel/accounting")
    again = view.get("/panel/accounting", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    # Both answers report the age of the numbers, which may have been read again in between.
    assert min(int(answer.headers["Age"]) for answer in (first, again)) >= 0
