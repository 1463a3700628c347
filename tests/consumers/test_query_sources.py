"""The server or directory that answers a query, its parameters, and the errors."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from tests.consumers.sink_support import fill, small_run
from tidemill.consumers.sink import query
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
from tidemill.consumers.sink.query import QueryFailed, QueryResult, SinkState, ask, read_state, sql_of, write_state
from tidemill.consumers.sink.service import open_tables
from tidemill.consumers.view import app as view_app
from tidemill.consumers.view.config import ViewSettings
from tidemill.schemas.http_connections import bind

HOLDS_ENGINE = """
import sys
from tidemill.consumers.sink import query
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
client = connect(SinkSettings(path=sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def sink(tmp_path_factory: pytest.TempPathFactory) -> SinkSettings:
    """The tables of a small run, which no process has open."""
    sink = SinkSettings(path=str(tmp_path_factory.mktemp("run")), http_port=0)
    fill(sink, small_run())
    return sink


def test_a_running_sink_is_queried_over_http_and_the_state_of_a_dead_one_is_ignored(sink: SinkSettings):
    with open_tables(sink):
        state = read_state(sink.directory)
        assert ask(sink, "SELECT count() FROM rollouts").rows == [[6]]
        assert ask(sink, "SELECT 1 AS a FORMAT CSVWithNames") == QueryResult(["CSVWithNames"], [['"a"\n1\n']])
        with pytest.raises(QueryFailed, match="READONLY"):
            ask(sink, "DROP TABLE rollouts")
    assert state is not None and read_state(sink.directory) is None
    write_state(sink.directory, state)
    assert ask(sink, "SELECT count() FROM rollouts").rows == [[6]]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", "7", '{"pid": 1}', '{"pid": 1, "url": 2, "database": "d"}', "\udcff"],
    ids=["empty", "cut", "list", "number", "incomplete", "types", "bytes"],
)
def test_a_state_file_that_cannot_be_read_is_named_with_the_remedy(tmp_path: Path, content: str):
    (tmp_path / query.STATE_FILE).write_text(content, "utf-8", "surrogateescape")
    with pytest.raises(QueryFailed, match=rf"{query.STATE_FILE} does not describe a sink .*: delete the file"):
        ask(SinkSettings(path=str(tmp_path)), "SELECT 1")


HOSTILE = "a'b\\c\n{x:String}); DROP TABLE tasks --\t\u202e"


def test_parameters_reach_the_query_unchanged_from_disk_and_over_http(sink: SinkSettings):
    sql = "SELECT {text:String} AS text, count() AS n FROM rollouts WHERE rollout_id = {id:String}"
    values = {"text": HOSTILE, "id": "a"}
    assert ask(sink, sql, values).rows == [[HOSTILE, 1]]
    with open_tables(sink):
        assert ask(sink, sql, values).rows == [[HOSTILE, 1]]
        with pytest.raises(QueryFailed, match="takes no parameter 'ids'; it takes text, id"):
            ask(sink, sql, {"ids": "a"})
        with pytest.raises(QueryFailed, match="Substitution `id` is not set"):
            ask(sink, sql, {"text": ""})


def test_a_parameter_of_a_named_query_that_is_not_given_is_empty(sink: SinkSettings, monkeypatch: pytest.MonkeyPatch):
    condition = "rollout_id = {id:String} OR {id:String} = ''"
    sql = f"-- Which is it?\nSELECT rollout_id FROM rollouts WHERE {condition} ORDER BY rollout_id"
    monkeypatch.setattr(query, "named_sql", lambda: {"which": sql})
    assert len(ask(sink, "which").rows) == 6
    assert ask(sink, "which", {"id": "a"}).rows == [["a"]]
    assert ask(sink, "which", {"id": "nobody"}).rows == []


def test_a_text_for_a_number_of_a_named_query_is_refused(sink: SinkSettings):
    for name, parameter, wrong in (
        ("step", "step", "abc"),
        ("step", "step", str(2**63)),
        ("rollout_list", "reward_min", "1,5"),
        ("rollout", "partition", str(2**32)),
        ("rollout_task", "from", "-1"),
    ):
        with pytest.raises(QueryFailed, match=f"parameter '{parameter}' of {name} is a number, not '{wrong}'"):
            ask(sink, name, {parameter: wrong})
    for number in ("-1", str(-(2**63))):
        assert ask(sink, "step", {"step": number}).rows == []
    for number in ("1e3", "1E+3", "1000."):
        assert ask(sink, "rollout_list", {"reward_min": number}).rows == []
    assert ask(sink, "rollout_list", {"reward_min": ".5"}).rows != []


def test_another_program_on_the_sinks_port_is_not_queried(sink: SinkSettings):
    with open_tables(sink) as (_, url):
        write_state(sink.directory, SinkState(1, url, sink.database))
        assert ask(sink, "SELECT count() FROM tasks").rows == [[3]]


def test_an_unreachable_server_is_a_clear_error():
    with bind("127.0.0.1", 0, "sink.http_port") as listener:
        port = listener.getsockname()[1]
    with pytest.raises(QueryFailed, match="did not answer"):
        ask(SinkSettings(host="127.0.0.1", port=port), "SELECT 1")
    with pytest.raises(QueryFailed, match=r"ClickHouse failed: .*refused"):
        open_tables(SinkSettings(host="127.0.0.1", port=port)).__enter__()


def test_tables_that_the_engine_cannot_read_are_a_clear_error(tmp_path: Path):
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "tidemill.sql").touch()  # as a full disk leaves it
    opened = subprocess.run([sys.executable, "-c", HOLDS_ENGINE, tmp_path], capture_output=True, text=True, input="")
    assert "QueryFailed" in opened.stderr and "they are damaged (delete the directory" in opened.stderr


def test_a_directory_that_another_process_owns_is_a_clear_error(sink: SinkSettings):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_ENGINE, sink.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(QueryFailed, match="another process has them open"):
            ask(sink, "SELECT 1")
        holder.communicate("")


def test_a_server_answers_when_a_query_has_ended():
    """Otherwise the text of an error after the first rows would be a part of a result with status 200."""
    assert query.http_request(SinkSettings(host="clickhouse"), "SELECT 1", {})["params"]["wait_end_of_query"] == "1"
    assert "wait_end_of_query" not in query.http_request(SinkSettings(), "SELECT 1", {})["params"]


def test_missing_tables_and_unknown_names_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(QueryFailed, match="start `tidemill sink`"):
        ask(SinkSettings(path=str(tmp_path / "absent")), "SELECT 1")
    assert not (tmp_path / "absent").exists()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(QueryFailed, match="there are no tables in"):
        ask(SinkSettings(path=str(tmp_path)), "runs")
    monkeypatch.setattr(view_app, "stop_on_signals", threading.Event)
    with pytest.raises(FileNotFoundError, match="there are no tables in"):
        view_app.run(SinkSettings(path=str(tmp_path)), ViewSettings(port=0), open_tables=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(QueryFailed, match="did you mean accounting"):
        sql_of("acounting")


def test_tables_of_an_older_release_are_named_in_the_error(tmp_path: Path):
    sink = SinkSettings(path=str(tmp_path / "old"))
    with closing(connect(sink)) as client:
        client.command("CREATE DATABASE tidemill")
        client.command("CREATE TABLE tidemill.train_steps (step Int64) ENGINE = MergeTree ORDER BY step")
        for name in ("step", "runs"):
            with pytest.raises(QueryFailed, match=f"lack something that the query {name} reads: an older release"):
                ask(sink, name)
        with pytest.raises(QueryFailed, match="UNKNOWN_TABLE") as own:
            ask(sink, "SELECT * FROM rollouts")
        assert "older release" not in str(own.value)
