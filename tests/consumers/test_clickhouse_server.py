"""Sink, queries and page on a ClickHouse server, selected by settings alone: same results as the embedded engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.clickhouse_server import PASSWORD, clickhouse_server
from tests.consumers.sink_support import rows_of, small_run
from tests.consumers.view.conftest import START_S, serving, tables_process
from tests.consumers.view.run_records import SimulatedLoop, page_rows
from tests.consumers.view.tables_process import placed
from tests.records import build
from tidemill.consumers.sink.config import SinkSettings, TableEngine
from tidemill.consumers.sink.query import QueryFailed, QueryResult, ask, named_sql
from tidemill.consumers.sink.service import open_tables
from tidemill.consumers.view.panels import PAGES
from tidemill.schemas import records as r


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SinkSettings]:
    with clickhouse_server(tmp_path_factory.mktemp("server")) as settings:
        yield settings


@pytest.fixture(scope="module")
def filled(server: SinkSettings) -> SinkSettings:
    """A server to which the sink has written the run of the page's tests."""
    with open_tables(server) as (writer, url):
        assert url == server.server_url
        reached: dict[str, int] = {}
        rows = placed(page_rows(SimulatedLoop()), reached)
        assert writer.write(rows, {(topic, 0): offset for topic, offset in reached.items()}) == len(rows)
    return server


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SinkSettings]:
    """The same run in the embedded engine."""
    directory = tmp_path_factory.mktemp("embedded")
    with tables_process(directory):
        yield SinkSettings(path=str(directory))


@pytest.fixture(scope="module")
def answer(filled: SinkSettings) -> Callable[[str], QueryResult]:
    """Return the server's answer to a named query, which is asked once."""
    return functools.cache(lambda name: ask(filled, name))


@pytest.mark.parametrize("name", sorted(named_sql()))
def test_a_named_query_answers_as_on_the_embedded_engine(
    answer: Callable[[str], QueryResult], embedded: SinkSettings, name: str
):
    assert answer(name) == ask(embedded, name)


@pytest.mark.parametrize("engine", list(TableEngine))
def test_rows_are_written_once(server: SinkSettings, engine: TableEngine):
    sink = server.model_copy(update={"database": f"once_{engine.name.lower()}", "table_engine": engine})
    rows = rows_of(small_run())
    marks = {("tidemill.tasks", 0): 3}
    for written in (len(rows), 0):
        with open_tables(sink) as (writer, _):
            assert writer.write(rows, marks) == written
            assert writer.next_offsets == marks
    rollouts = sum(isinstance(row.record, r.Rollout) for row in rows)
    assert ask(sink, "SELECT toInt32(count()) FROM rollouts").rows == [[rollouts]]


def test_an_erasure_deletes(server: SinkSettings):
    sink = server.model_copy(update={"database": "erased"})
    answers = [build(r.Interaction, interaction_id=name, user_id=name, served_at=1) for name in ("ann", "bob")]
    request = build(r.UserRequest, user_id="ann", wish=r.UserWish.ERASE, at=2**60)
    with open_tables(sink) as (writer, _):
        writer.write(rows_of(answers), {})
        writer.write(rows_of([request]), {})
        assert ask(sink, "SELECT user_id FROM interactions").rows == [["bob"]]


@pytest.fixture(scope="module")
def page(filled: SinkSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a page that reads the server."""
    folder = tmp_path_factory.mktemp("page")
    settings = {"host": filled.host, "port": filled.port, "user": filled.user, "path": folder / "none"}
    words = [word for name, value in settings.items() for word in ("--set", f"sink.{name}={value}")]
    with serving(folder / "view.log", *words, TIDEMILL_SINK__PASSWORD=PASSWORD) as (url, _):
        yield url


@pytest.mark.parametrize("name", [page.panels[0] for page in PAGES if page.panels])
def test_a_panel_shows_the_rows_of_its_query(answer: Callable[[str], QueryResult], page: str, name: str):
    shown = httpx.get(f"{page}/panel/{name}.json", timeout=START_S)
    assert shown.status_code == 200, shown.text
    assert [list(row.values()) for row in shown.json()] == answer(name).rows


def asked(page: str, sql: str) -> httpx.Response:
    """Return the response of the view Ask."""
    return httpx.post(f"{page}/ask/rows.json", data={"q": sql}, timeout=START_S)


def test_a_question_is_answered_within_its_bounds(page: str):
    assert asked(page, "SELECT 2 + 3 AS five").json() == [{"five": 5}]
    assert len(asked(page, "SELECT * FROM numbers(1e9)").json()) == 5_000


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE rollouts",
        "INSERT INTO documents (text) VALUES ('x')",
        "KILL QUERY WHERE 1",
        "SELECT file('/etc/passwd')",
        "SELECT * FROM file('/etc/passwd', 'LineAsString')",
        "SELECT * FROM url('http://127.0.0.1:1', 'LineAsString')",
        "SELECT 1 INTO OUTFILE '/tmp/x'",
        "SELECT 1 SETTINGS readonly = 0",
        "SELECT 1 SETTINGS max_execution_time = 100",
    ],
)
def test_a_question_only_reads_tables(page: str, sql: str):
    refused = asked(page, sql)
    assert refused.status_code == 400 and "DB::Exception" in refused.text, refused.text


def test_a_query_only_reads(filled: SinkSettings):
    for sql in (
        "DROP TABLE rollouts",
        "INSERT INTO documents (text) VALUES ('x')",
        "CREATE TABLE t (a Int8) ENGINE Log",
    ):
        with pytest.raises(QueryFailed, match="READONLY"):
            ask(filled, sql)


def test_a_wrong_password_is_a_clear_error(server: SinkSettings):
    with pytest.raises(QueryFailed, match="password is incorrect"):
        ask(server.model_copy(update={"password": type(server.password)("wrong")}), "SELECT 1")
