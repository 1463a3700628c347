"""ClickHouse's HTTP protocol as its clients use it, and the requests that the read-only endpoint refuses."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError

from tests.consumers.sink_support import rows_of, small_run
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import (
    Reader,
    check,
    connect,
    empty_native_block,
    refused_functions,
)
from tidemill.consumers.sink.http_api import query_server
from tidemill.consumers.sink.query import QueryFailed
from tidemill.consumers.sink.writer import Writer
from tidemill.schemas.config import HttpSettings

DEADLINE_S = 180.0


@pytest.fixture(scope="module")
def sink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SinkSettings]:
    sink = SinkSettings(path=str(tmp_path_factory.mktemp("engine")), http_port=0, result_bytes=2**20)
    client = connect(sink)
    Writer(client, sink.database, sink.table_engine).write(rows_of(small_run()), {})
    yield sink
    client.close()


@pytest.fixture(scope="module")
def url(sink: SinkSettings) -> Iterator[str]:
    with query_server(sink) as server:
        yield server.url


@pytest.fixture(scope="module")
def hasty_url(sink: SinkSettings) -> Iterator[str]:
    """The address of a server with a low time limit."""
    with query_server(sink.model_copy(update={"query_seconds": 1.0})) as server:
        yield server.url


def test_a_connection_that_says_nothing_is_closed(sink: SinkSettings):
    with query_server(sink.model_copy(update={"http": HttpSettings(header_timeout_s=0.5)})) as server:
        address = httpx.URL(server.url)
        with closing(socket.create_connection((address.host, address.port), timeout=DEADLINE_S)) as connection:
            assert connection.recv(1) == b""


def ask(url: str, sql: str, **parameters: str) -> httpx.Response:
    return httpx.get(url, params={"query": sql, **parameters}, timeout=DEADLINE_S)


def post(url: str, **options: Any) -> httpx.Response:
    return httpx.post(url, timeout=DEADLINE_S, **options)


def test_ping(url: str):
    for path in ("/ping", "/"):
        reply = httpx.get(url + path, timeout=DEADLINE_S)
        assert (reply.status_code, reply.text) == (200, "Ok.\n")
        assert reply.headers["X-Tidemill-Pid"] == str(os.getpid())


@pytest.mark.parametrize(
    ("clause", "body"),
    [
        ("", "1\ta\n"),
        ("FORMAT TabSeparated", "1\ta\n"),
        ("FORMAT CSV", '1,"a"\n'),
        ("FORMAT JSONEachRow", '{"n":1,"s":"a"}\n'),
        ("FORMAT TSVWithNames", "n\ts\n1\ta\n"),
    ],
)
def test_the_format_clause_decides(url: str, clause: str, body: str):
    reply = ask(url, f"SELECT 1 AS n, 'a' AS s {clause}")
    assert reply.text == body
    assert reply.headers["X-ClickHouse-Format"] == (clause.removeprefix("FORMAT ") or "TabSeparated")


def test_default_format_header_and_parameter(url: str):
    document = ask(url, "SELECT count() AS n FROM rollouts", default_format="JSON").json()
    assert document["data"] == [{"n": 6}]
    by_header = post(url, content="SELECT 1", headers={"X-ClickHouse-Format": "JSONCompact"})
    assert by_header.json()["data"] == [[1]]
    assert "│ 1 │" in ask(url, "SELECT 1 FORMAT Pretty").text


def test_query_in_the_body_in_the_parameter_and_in_both(url: str):
    assert post(url, content="SELECT 1").text == "1\n"
    assert post(url, params={"query": "SELECT 1 +"}, content="1").text == "2\n"
    chunked = post(url, content=iter([b"SELECT", b" 3"]))
    assert chunked.text == "3\n"


def test_query_parameters_are_bound_and_not_inserted_as_text(url: str):
    sql = "SELECT {x:UInt64} + 1, {y:String}, {z:Array(String)}"
    reply = ask(url, sql, param_x="2", param_y="a'); DROP TABLE tasks", param_z="['p','q']")
    assert reply.text == "3\ta\\'); DROP TABLE tasks\t['p','q']\n"


def test_errors_carry_clickhouses_code(url: str):
    for sql, status, code in (
        ("SELEC 1", 400, "62"),
        ("SELECT nothing", 404, "47"),
        ("SELECT * FROM nowhere", 404, "60"),
        ("SELECT 1; SELECT 2", 400, "62"),
        ("SELECT throwIf(1)", 400, "395"),
        ("SELECT number FROM numbers(10000000)", 400, "396"),
    ):
        reply = ask(url, sql)
        assert (reply.status_code, reply.headers["X-ClickHouse-Exception-Code"]) == (status, code), reply.text
        assert reply.text.startswith("Code: ")


def test_bad_requests_are_answered(url: str):
    assert "Empty query" in post(url, content=b"").text
    assert "not UTF-8" in post(url, content=b"SELECT '\xff'").text
    too_long = post(url, content=b"SELECT 1" + b" " * 2**20)
    assert too_long.status_code == 400
    assert httpx.put(url, content=b"SELECT 1", timeout=DEADLINE_S).status_code == 405
    assert ask(url, "SELECT 1", database="nowhere").status_code == 404
    assert ask(url, "SELECT 1", default_format="Nonsense").headers["X-ClickHouse-Exception-Code"] == "73"


@pytest.mark.parametrize("query_id", ["日本", "é", "a\r\nX-Evil: 1", "a\x7f"])
def test_a_query_id_that_no_header_can_hold_is_replaced(url: str, query_id: str):
    reply = ask(url, "SELECT 1", query_id=query_id)
    assert (reply.status_code, reply.text) == (200, "1\n")
    assert len(reply.headers["X-ClickHouse-Query-Id"]) == 36
    assert ask(url, "SELECT 1", query_id="mine").headers["X-ClickHouse-Query-Id"] == "mine"


HEAVY = "SELECT sum(sipHash64(number)) FROM numbers(100000000000)"


def test_a_query_is_stopped_at_its_time_limit(hasty_url: str):
    reply = ask(hasty_url, HEAVY)
    assert (reply.status_code, reply.headers["X-ClickHouse-Exception-Code"]) == (408, "159")


@pytest.mark.parametrize("name", ["max_execution_time", "max_memory_usage", "max_result_rows", "limit"])
@pytest.mark.parametrize(
    "value",
    ["", "0", "-1", "nan", "inf", "-inf", "1e999", "none", "1; DROP TABLE tasks", "1, readonly = 0", "9" * 5000],
)
def test_a_limit_that_sets_no_limit_is_refused(url: str, name: str, value: str):
    reply = ask(url, "SELECT 1", **{name: value})
    assert (reply.status_code, reply.headers["X-ClickHouse-Exception-Code"]) == (400, "62"), reply.text


def test_a_limit_can_be_lowered_but_not_raised(url: str, hasty_url: str):
    for of, given in ((url, "0.001"), (url, "1e-300"), (hasty_url, "1e9")):
        reply = ask(of, HEAVY, max_execution_time=given)
        assert reply.headers["X-ClickHouse-Exception-Code"] in ("159", "62"), given
    memory = "SELECT groupArray(number) FROM numbers(100000000)"
    assert ask(url, memory, max_memory_usage="1000000").headers["X-ClickHouse-Exception-Code"] == "241"
    assert ask(url, memory, max_memory_usage=str(2**62)).headers["X-ClickHouse-Exception-Code"] in ("241", "396", "159")
    for rows in ({"max_result_rows": "10"}, {"limit": "10"}, {"max_result_rows": "20", "limit": "10"}):
        cut = ask(url, "SELECT number FROM numbers(10000000)", **rows)
        assert (cut.status_code, len(cut.text.splitlines())) == (200, 10)
    # Only the limit on the number of rows truncates a result; a result of too many bytes is an error.
    large = ask(url, "SELECT repeat(toString(number), 10000) FROM numbers(1000)", max_result_rows="1000")
    assert large.headers["X-ClickHouse-Exception-Code"] == "396"


REFUSED = [
    "INSERT INTO tasks (task_id) VALUES ('x')",
    "CREATE TABLE t (a Int8) ENGINE = Memory",
    "CREATE TEMPORARY TABLE t (a Int8)",
    "DROP TABLE tasks",
    "ATTACH TABLE t",
    "ALTER TABLE tasks DELETE WHERE 1",
    "TRUNCATE TABLE tasks",
    "OPTIMIZE TABLE tasks",
    "SYSTEM STOP MERGES",
    "KILL QUERY WHERE 1",
    "SET readonly = 0",
    "USE system",
    "SELECT 1 SETTINGS readonly = 0",
    "SELECT * FROM tasks INTO OUTFILE '{path}'",
    "SELECT * FROM file('{path}', 'LineAsString')",
    "SELECT * FROM `file`('{path}', 'LineAsString')",
    "SELECT * FROM \"file\"/* */('{path}', 'LineAsString')",
    "SELECT file('{path}')",
    "SELECT * FROM (SELECT * FROM file -- \n ('{path}', 'LineAsString'))",
    "WITH x AS (SELECT * FROM file('{path}')) SELECT * FROM x",
    "DESCRIBE TABLE file('{path}', 'CSV')",
    "EXPLAIN SELECT * FROM file('{path}', 'LineAsString')",
    "SELECT 1 IN (SELECT * FROM url('http://127.0.0.1:1/', 'CSV', 'a Int8'))",
    "DESCRIBE TABLE s3('http://127.0.0.1:1/bucket/x.csv', 'CSV')",
    "SELECT * FROM remote('127.0.0.1:1', system.one)",
    "SELECT * FROM executable('id', 'CSV', 'a String')",
    "SELECT * FROM python('sink')",
    "SELECT * FROM sqlite('{path}', 't')",
    "SELECT * FROM filesystem('/')",
    "SELECT hasColumnInTable('127.0.0.2', 'default', '', 'system', 'one', 'dummy')",
    "SELECT * FROM merge('system', '.*')",
]


@pytest.mark.parametrize("sql", REFUSED)
def test_writes_and_outside_access_are_refused(url: str, sql: str, tmp_path):
    path = tmp_path / "secret"
    if "OUTFILE" not in sql:
        path.write_text("secret")
    reply = ask(url, sql.replace("{path}", str(path)))
    assert (reply.status_code, reply.headers["X-ClickHouse-Exception-Code"]) == (403, "164"), reply.text
    assert path.exists() == ("OUTFILE" not in sql)
    assert ask(url, "SELECT count() FROM tasks").text == "3\n"


def test_the_same_words_are_harmless_in_strings_and_names(url: str):
    assert ask(url, "SELECT 'INSERT INTO file(1) INTO OUTFILE' AS `file`, $$url('x')$$").status_code == 200
    assert ask(url, "SELECT sum(number) FROM numbers(4)").text == "6\n"
    assert "rollouts" in ask(url, "SHOW TABLES").text


def test_each_layer_refuses_by_itself(sink: SinkSettings):
    reader = Reader(sink)
    for sql in (
        "TRUNCATE TABLE tasks",
        "SELECT * FROM url('http://127.0.0.1:1/', 'CSV', 'a Int8')",
    ):
        with pytest.raises(QueryFailed) as by_engine:
            reader._run(sql, "CSV", {}, None)
        assert by_engine.value.code == 164
        with pytest.raises(QueryFailed):
            check(sql, refused_functions(["url", "numbers"]))


def test_clickhouse_connects_ordinary_client(url: str):
    with connect(SinkSettings(host="127.0.0.1", port=int(url.rpartition(":")[2]))) as client:
        assert client.write_compression in ("lz4", "zstd"), "else a sink sends its inserts to a server uncompressed"
        assert client.query("SELECT 1").result_rows == [(1,)]
        found = client.query(
            "SELECT rollout_id, mode, token_ids, spans.version, reward FROM rollouts ORDER BY rollout_id"
        )
        assert found.result_rows[1] == ("b", "train", [0, 1, 2, 3], [1, 2], 0.0)
        empty = client.query("SELECT * FROM documents")
        assert (empty.result_rows, "text" in empty.column_names) == ([], True)
        bound = client.query("SELECT count() FROM rollouts WHERE mode = {m:String}", parameters={"m": "eval"})
        assert bound.result_rows == [(1,)]
        assert client.query_arrow("SELECT number FROM numbers(5)").num_rows == 5
        assert client.command("SELECT count() FROM tidemill.tasks") == 3
        with pytest.raises(DatabaseError, match="READONLY"):
            client.command("DROP TABLE tidemill.tasks")


def test_queries_run_at_once_and_share_no_state(url: str):
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda n: ask(url, f"SELECT {n}, count() FROM rollouts", session_id="s").text, range(24)))
    assert found == [f"{n}\t6\n" for n in range(24)]


def test_an_empty_native_block_names_its_columns():
    assert empty_native_block([("a", "UInt8")]) == b"\x01\x00\x01a\x05UInt8"
    assert len(empty_native_block([("x" * 200, "T")])) == 2 + 2 + 200 + 2


def test_a_second_directory_in_one_process_is_a_clear_error(sink: SinkSettings, tmp_path):
    with pytest.raises(QueryFailed, match="another process"):
        connect(SinkSettings(path=str(tmp_path)))


def test_the_summary_counts_what_was_read(url: str):
    summary = json.loads(ask(url, "SELECT sum(length(token_ids)) FROM rollouts").headers["X-ClickHouse-Summary"])
    assert int(summary["read_rows"]) == 6
