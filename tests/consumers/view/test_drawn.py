"""The rows of a panel that are read, drawn and shown, within the limits of the engine, the network and the reader."""

from __future__ import annotations

import asyncio
import html
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from starlette.testclient import TestClient

from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.query import QueryFailed
from tidemill.consumers.view import tables as module
from tidemill.consumers.view.app import application
from tidemill.consumers.view.config import ViewSettings
from tidemill.consumers.view.drawn import PLACES, link, plotted, table_body
from tidemill.consumers.view.panels import PAGES, Panel, panels
from tidemill.consumers.view.site import IN_SIGHT, READ_ROWS, Site, arguments
from tidemill.consumers.view.tables import STATE, TableRows, Tables

if TYPE_CHECKING:
    from collections.abc import Mapping

COLUMNS = ("run_id", "step", "environment", "groups", "reward", "reward_low", "reward_high")
TYPES = ("String", "Int64", "String", "UInt64", "Float64", "Float64", "Float64")


def rewards(steps: int, seconds: float = 0.0) -> TableRows:
    """Rows of `reward_by_environment`, two a step."""
    rows = [["r", step, kind, 3, 0.5, 0.4, 0.6] for step in range(steps) for kind in ("<a>", "b")]
    return TableRows(COLUMNS, TYPES, rows, False, seconds)


class Counted(Tables):
    """Tables that count the queries; `position` is how far they have read."""

    def __init__(self, rows: TableRows) -> None:
        super().__init__(SinkSettings(), ViewSettings())
        self.rows, self.position, self.asked = rows, 0, 0
        self.ready = asyncio.Event()
        self.ready.set()
        self.failure: QueryFailed | None = None

    async def ask(self, sql: str, parameters: Mapping[str, str] | None = None, most: int = 0) -> TableRows:
        """The rows."""
        if sql == STATE:
            return TableRows(("n",), ("UInt64",), [[self.position]], False, 0.0)
        self.asked += 1
        await self.ready.wait()
        if self.failure:
            raise self.failure
        return self.rows


def test_a_plot_is_of_a_part_of_many_steps_and_of_the_last():
    panel = panels()["reward_by_environment"]
    few, many = plotted(panel, rewards(PLACES)), plotted(panel, rewards(10 * PLACES + 1))
    assert (few["every"], len(few["rows"])) == (1, 2 * PLACES)
    steps = [row[few["columns"].index("step")] for row in many["rows"]]
    assert (many["every"], steps[-1], len(set(steps)) <= PLACES) == (11, 10 * PLACES, True)
    hidden = plotted(panel, replace(rewards(1), rows=[["a\u202eb", *rewards(1).rows[0][1:]]]))
    assert hidden["rows"][0][0] == "a⟨U+202E⟩b"
    assert few["columns"] == ["run_id", "step", "reward", "environment", "reward_low", "reward_high"]


def test_a_long_table_comes_in_parts_and_a_plot_says_what_it_leaves_out():
    client = TestClient(application(Counted(rewards(3 * PLACES)), ViewSettings()), base_url="http://127.0.0.1")
    panel = client.get("/panel/reward_by_environment").text
    assert "One in 3 values of step is drawn" in panel and "<td" not in panel
    steps, address = list[str](), "/rows/reward_by_environment"
    while address:
        part = client.get(address).text
        steps += re.findall(r'href="/run/step/(\d+)', part)
        later = re.search(r'href="([^"]*)" data-turn>later', part)
        address = html.unescape(later[1]) if later else ""
    assert steps == [str(n) for n in range(3 * PLACES) for _ in range(2)]
    assert "&lt;a&gt;" in part and "<a>" not in part


def test_simultaneous_readers_share_one_query():
    tables = Counted(rewards(1))

    async def look() -> None:
        await asyncio.gather(*(tables.kept("SELECT 1") for _ in range(5)))
        await tables.kept("SELECT 2")

    asyncio.run(look())
    assert tables.asked == 2


@pytest.mark.parametrize(
    ("seconds", "moved", "asked"), [(0.0, False, 1), (0.0, True, 2), (9.0, True, 1)], ids=["same", "moved", "costly"]
)
def test_an_answer_is_kept_until_new_rows_arrive_and_longer_if_it_was_costly(
    monkeypatch: pytest.MonkeyPatch, seconds: float, moved: bool, asked: int
):
    monkeypatch.setattr(module, "STATE_S", -1.0)
    tables = Counted(rewards(1, seconds))

    async def look() -> None:
        await tables.kept("SELECT 1")
        tables.position += moved
        await tables.kept("SELECT 1")

    asyncio.run(look())
    assert tables.asked == asked


def test_the_known_answer_is_the_last_one_up_to_an_age(monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    tables = Counted(rewards(1))
    assert tables.known("SELECT 1") is None

    async def look() -> None:
        nonlocal now
        first = await tables.kept("SELECT 1")
        assert tables.known("SELECT 1") is first
        now += module.LONGEST_S + 1
        tables.position, tables.rows = 1, rewards(2)
        assert tables.known("SELECT 1") is None and tables.asked == 1
        assert tables.known("SELECT 1", oldest=module.LONGEST_S + 2) is first and tables.asked == 1
        assert await tables.kept("SELECT 1") is tables.known("SELECT 1") is tables.rows

    asyncio.run(look())
    assert tables.asked == 2


def test_every_view_is_read_before_its_first_reader():
    tables = Counted(rewards(1))
    page = application(tables, ViewSettings())
    with TestClient(page, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        asked = tables.asked
        for panel in (panels()[name] for page in PAGES for name in page.panels):
            assert tables.known(panel.sql, arguments(panel, {}), READ_ROWS) is tables.rows, panel.name
        client.get("/part/rollouts")  # It is asked for before it is drawn, which these rows cannot be.
        assert tables.asked == asked


def test_the_shell_holds_the_known_panels_as_they_are_requested():
    class OnlyRewards(Counted):
        async def ask(self, sql: str, parameters: Mapping[str, str] | None = None, most: int = 0) -> TableRows:
            if sql not in (STATE, panels()["reward_by_environment"].sql):
                raise QueryFailed("no such rows")
            return await super().ask(sql, parameters, most)

    client = TestClient(application(OnlyRewards(rewards(2)), ViewSettings()), base_url="http://127.0.0.1")
    assert "mean reward" not in client.get("/run?run=r").text
    panel = client.get("/panel/reward_by_environment?run=r")
    shell, other = client.get("/run?run=r").text, client.get("/run?run=other").text
    assert panel.text in shell and panel.headers["ETag"].strip('"') in shell
    assert "mean reward" not in other


def test_the_queries_of_the_panels_in_sight_begin_with_the_page():
    tables = Counted(rewards(1))

    async def look() -> None:
        page = await Site(tables, ViewSettings()).page(PAGES[0], {})
        assert page.body.count(b'class="wait"') == len(PAGES[0].panels)
        while tables.asked < IN_SIGHT:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(look(), 180))
    assert tables.asked == IN_SIGHT < len(PAGES[0].panels)


@pytest.mark.parametrize("seconds", [0.0, 9.0], ids=["same", "costly"])
def test_an_answer_expires(monkeypatch: pytest.MonkeyPatch, seconds: float):
    monkeypatch.setattr(module, "LONGEST_S", -1.0)
    monkeypatch.setattr(module, "REST_S", 0.0)
    tables = Counted(rewards(1, seconds))
    asyncio.run(tables.kept("SELECT 1"))
    asyncio.run(tables.kept("SELECT 1"))
    assert tables.asked == 2


def test_a_slow_answer_is_not_waited_for_if_an_older_one_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "STATE_S", -1.0)
    monkeypatch.setattr(module, "PATIENCE_S", 0.001)
    tables = Counted(rewards(1))

    async def look() -> None:
        first = await tables.kept("SELECT 1")
        tables.position, tables.rows = 1, rewards(2)
        tables.ready.clear()
        assert await tables.kept("SELECT 1") is await tables.kept("SELECT 1") is first
        tables.ready.set()
        while await tables.kept("SELECT 1") is not tables.rows:
            pass

    asyncio.run(asyncio.wait_for(look(), 180))
    assert tables.asked == 2


def test_a_failure_removes_the_kept_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "STATE_S", -1.0)
    tables = Counted(rewards(1))

    async def look() -> None:
        await tables.kept("SELECT 1")
        tables.position, tables.failure = 1, QueryFailed("ClickHouse does not answer")
        for _ in range(2):
            with pytest.raises(QueryFailed):
                await tables.kept("SELECT 1")

    asyncio.run(look())


@pytest.mark.parametrize(("queries", "asked"), [(1, 2), (3, 3)])
def test_all_open_panels_share_one_query_budget(monkeypatch: pytest.MonkeyPatch, queries: int, asked: int):
    now = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    tables = Counted(replace(rewards(1), seconds=1 / module.REST))

    async def look() -> None:
        await asyncio.gather(*(tables.kept(f"SELECT {number}") for number in range(queries)))
        tables.position += 1

    asyncio.run(look())
    now += 2.0  # Alone, an answer is kept for a second; with two others, for three.
    asyncio.run(look())
    assert tables.asked == asked


def test_a_header_that_cannot_be_read_is_the_fault_of_its_panel_alone(monkeypatch: pytest.MonkeyPatch):
    texts = {"good": "-- Good?\n-- title: Good\nSELECT 1", "bad": "-- Bad?\n-- colour: red\nSELECT 1"}
    monkeypatch.setattr("tidemill.consumers.view.panels.named_sql", lambda: texts)
    panels.cache_clear()
    try:
        client = TestClient(application(Counted(rewards(1)), ViewSettings()), base_url="http://127.0.0.1")
        assert "bad.sql: no key &#39;colour&#39;" in client.get("/panel/bad").text
        assert 'role="alert"' not in client.get("/panel/good").text
    finally:
        panels.cache_clear()


@pytest.mark.parametrize(
    ("topic", "address"),
    [("groups", "/groups/x"), ("tidemill.online-batches", ""), ("interactions", "/users/x")],
)
def test_an_input_of_a_step_leads_to_its_kind(topic: str, address: str):
    assert link("group_id", ["x", topic], ("group_id", "topic")) == address


@pytest.mark.parametrize(("version", "address"), [(0, "/weights/0"), (-1, ""), (None, "")])
def test_a_version_leads_to_its_page_and_no_version_nowhere(version: int | None, address: str):
    assert link("version", [version], ("version",)) == address


def test_a_row_leads_to_the_records_under_it():
    rows = TableRows(("run_id", "step"), ("String", "Int64"), [["a&b", 3]], False, 0.0)
    assert 'href="/ask?name=step_inputs&amp;param_step=3&amp;param_run=a%26b"' in table_body(rows, "step_inputs")
    assert "records" not in table_body(rows, "")


def test_every_query_of_records_is_there():
    named = {panel.name: panel.drawn["records"] for panel in panels().values() if "records" in panel.drawn}
    assert len(named) > 6 and set(named.values()) <= set(panels())
    assert not [panel.name for panel in panels().values() if isinstance(panel, Panel) and panel.fault]
