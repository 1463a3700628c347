"""Queries to ClickHouse about a run: SQL or a named query, to a running sink, a server, or the tables on disk.

The statement only reads, in either engine. One process owns the embedded engine's directory, so queries to a running
sink are sent over HTTP, to the address in its state file; if none runs, this process opens the directory for the query.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx

from tidemill.consumers.sink.config import SinkSettings

FORMAT = "JSONCompact"
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", "\t": r"\t", "\r": r"\r", "\0": r"\0"})
_PARAMETER = re.compile(r"\{(\w+):[^}]+\}")
_NUMBER = re.compile(r"to((?:U?Int|Float)\d+)Or(?:Zero|Null)\(\{(\w+):String\}")
"""A parameter of a named query that the query reads as a number; it would read other text as 0 or NULL."""
_FLOAT = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"-?\d{1,20}", re.ASCII)
_INSERT = re.compile(r"^ *-- insert: (\w+)\n", re.MULTILINE)
PING_S = 2.0
EXTRA_S = 10.0
"""Seconds that an answer may take to arrive beyond the query's own limit."""


UNKNOWN_CODE = 1002
"""ClickHouse's UNKNOWN_EXCEPTION, for a message without a code."""


class QueryFailed(RuntimeError):
    """The query was refused or failed, or no engine could answer it; the message says which and what to do.

    `code` is ClickHouse's.
    """

    def __init__(self, message: str, code: int = UNKNOWN_CODE) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Results. Numbers are numbers, arrays are lists, maps are dicts, times are text in UTC, NULL is None.

    The result of a query with its own FORMAT clause has one column, named after the format, and one row with the text.
    """

    columns: list[str]
    rows: list[list[Any]]


@cache
def named_sql() -> Mapping[str, str]:
    """Return the SQL of each named query, by name. A line `-- insert: NAME` is replaced by the file `_NAME.sql`."""
    folder = files("tidemill.consumers.sink") / "queries"
    found = sorted(folder.iterdir(), key=lambda entry: entry.name)
    texts = {e.name.removesuffix(".sql"): e.read_text("utf-8") for e in found if e.name.endswith(".sql")}
    whole = {name: _INSERT.sub(lambda line: texts[f"_{line[1]}"], text) for name, text in texts.items()}
    return {name: text for name, text in whole.items() if not name.startswith("_")}


def named_queries() -> dict[str, str]:
    """Return the question that each named query answers, by name."""
    return {name: text.splitlines()[0].removeprefix("--").strip() for name, text in named_sql().items()}


def parameters_of(sql: str) -> tuple[str, ...]:
    """Return the parameter names of a statement: its `{name:Type}`, in order."""
    return tuple(dict.fromkeys(_PARAMETER.findall(sql)))


def unreadable(sql: str, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each parameter that a named query reads as a number and whose value is no such number, with the type."""
    for kind, name in _NUMBER.findall(sql):
        value = values.get(name) or "0"
        if kind.startswith("Float"):
            fits = _FLOAT.fullmatch(value) is not None
        else:
            bits = int(kind.removeprefix("U").removeprefix("Int")) - (not kind.startswith("U"))
            least = 0 if kind.startswith("U") else -(2**bits)
            fits = _INTEGER.fullmatch(value) is not None and least <= int(value) < 2**bits
        if not fits:
            yield name, kind


def sql_of(sql_or_name: str) -> str:
    """Return the SQL of a named query, or SQL unchanged. Raises QueryFailed for a single word that names no query."""
    known = named_sql()
    word = sql_or_name.strip()
    if not re.fullmatch(r"\w+", word):
        return sql_or_name
    if word not in known:
        close = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise QueryFailed(f"no named query {word!r}: {hint}`tidemill query --list` shows them all")
    return known[word]


def escaped(value: str) -> str:
    """Return a query parameter's value in ClickHouse's own escaping."""
    return value.translate(_ESCAPES)


def http_request(sink: SinkSettings, sql: str, parameters: Mapping[str, str], **settings: str) -> dict[str, Any]:
    """Return the httpx arguments of a read-only query over ClickHouse's HTTP protocol, by default in `FORMAT`.

    Args:
        parameters: values of its `{name:Type}`.
        settings: ClickHouse settings for this query.
    """
    values = {f"param_{name}": escaped(value) for name, value in parameters.items()}
    # A server may not write, and a statement may not raise the limits; the sink's own endpoint forbids both anyway. A
    # server answers only when the query has ended: an error after the first rows would be a part of the result.
    own = {} if sink.embedded else {"readonly": "1", "wait_end_of_query": "1"}
    key = {"X-ClickHouse-User": sink.user, "X-ClickHouse-Key": sink.password.get_secret_value()}
    return {
        "params": {"default_format": FORMAT, "database": sink.database, **settings, **own, **values},
        "headers": {} if sink.embedded else key,
        "content": sql.encode(),
    }


def ask(sink: SinkSettings, sql_or_name: str, parameters: Mapping[str, str] | None = None) -> QueryResult:
    """Run a query over the sink's tables.

    Args:
        parameters: values of the query's `{name:Type}`. A missing parameter of a named query is empty.

    Raises:
        QueryFailed: also for a parameter that the query does not take, or of another type.
    """
    sql = sql_of(sql_or_name)
    given = parameters or {}
    taken = parameters_of(sql)
    foreign = sorted(given.keys() - set(taken))
    if foreign:
        raise QueryFailed(f"the query takes no parameter {foreign[0]!r}; it takes {', '.join(taken) or 'none'}")
    if sql != sql_or_name:
        given = dict.fromkeys(taken, "") | dict(given)
        for name, kind in unreadable(sql, given):
            raise QueryFailed(f"parameter {name!r} of {sql_or_name.strip()} is a number, not {given[name]!r} ({kind})")
    try:
        return _answer(sink, sql, given)
    except QueryFailed as error:
        if sql == sql_or_name or not re.search(r"\((UNKNOWN_TABLE|UNKNOWN_IDENTIFIER)\)", str(error)):
            raise
        raise QueryFailed(
            f"the tables of database {sink.database!r} lack something that the query {sql_or_name.strip()} reads: an "
            "older release made them, or no sink did. `tidemill sink` and `tidemill view DIRECTORY` add it. The engine "
            f"says: {error}"
        ) from error


def _answer(sink: SinkSettings, sql: str, values: Mapping[str, str]) -> QueryResult:
    state = read_state(sink.directory) if sink.embedded else None
    if sink.embedded and (state is None or not answers(state)):
        if not sink.has_tables:
            raise QueryFailed(
                f"there are no tables in {sink.directory}: start `tidemill sink`, or name its directory (that of a "
                "demonstration is DIRECTORY/clickhouse)"
            )
        # Imported here, since most queries go over HTTP and do not need the engine.
        from tidemill.consumers.sink.engine import Reader, connect

        with closing(connect(sink)):
            given = {name: escaped(value) for name, value in values.items()}
            answer = Reader(sink).ask(sql, default_format=FORMAT, parameters=given)
        return _parsed(answer.body, answer.format)
    url = sink.server_url if state is None else state.url
    try:
        reply = httpx.post(url, **http_request(sink, sql, values), timeout=sink.query_seconds + EXTRA_S)
    except httpx.HTTPError as error:
        raise QueryFailed(f"{url} did not answer: {type(error).__name__}: {error}") from error
    if reply.status_code != httpx.codes.OK:
        raise QueryFailed(reply.text.strip())
    return _parsed(reply.content, reply.headers.get("X-ClickHouse-Format", FORMAT))


def answers(state: SinkState) -> bool:
    """Whether the sink of a state file still runs: another process may use its port now."""
    try:
        reply = httpx.get(f"{state.url}/ping", timeout=PING_S)
    except httpx.TransportError:
        return False
    return bool(reply.headers.get("X-Tidemill-Pid") == str(state.pid))


def _parsed(body: bytes, output_format: str) -> QueryResult:
    if output_format != FORMAT:
        return QueryResult([output_format], [[body.decode("utf-8", "replace")]])
    document = json.loads(body)
    return QueryResult([column["name"] for column in document["meta"]], document["data"])


STATE_FILE = "tidemill-sink.json"


@dataclass(frozen=True, slots=True)
class SinkState:
    pid: int
    url: str
    database: str


def write_state(directory: Path, state: SinkState) -> None:
    """Write the state file atomically: a reader sees the complete file or none."""
    fresh = directory / f"{STATE_FILE}.{os.getpid()}"
    fresh.write_text(json.dumps(asdict(state)), "utf-8")
    fresh.replace(directory / STATE_FILE)


def read_state(directory: Path) -> SinkState | None:
    """Return the sink that last wrote the state file, which may have been killed since; None if there is none.

    Raises QueryFailed if the file does not describe a sink.
    """
    file = directory / STATE_FILE
    try:
        state = SinkState(**json.loads(file.read_text("utf-8")))
        if not (isinstance(state.pid, int) and httpx.URL(state.url).host):
            raise ValueError(f"{state} is no running sink")
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, httpx.InvalidURL) as error:
        raise QueryFailed(
            f"{file} does not describe a sink ({error}): delete the file, and if a sink has these tables open, start "
            "it again"
        ) from error
    return state
