"""The engines behind one interface of clickhouse-connect: chDB in this process, or a ClickHouse server.

`Reader` runs queries on the embedded engine that cannot change it: each runs on its own connection, in `readonly = 1`,
with bounds on time, memory and size, so that no state passes from one query to the next.

`readonly = 1` refuses writes, definitions and most table functions. It permits other ways to access files and
processes: the `file` function, `INTO OUTFILE`, `DESCRIBE` of a table function, `KILL`. `check` therefore decides which
statements are run: only a single query that reads tables of the engine. It checks the statement as the engine's own
parser printed it (`formatQuerySingleLine`), and that same text is run, so that comments, quoting and heredocs cannot
hide a name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import clickhouse_connect
from clickhouse_connect.driver.exceptions import ClickHouseError

from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.query import UNKNOWN_CODE, QueryFailed, escaped

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

KNOWN_STATEMENTS = 128
"""Number of checked statements that are remembered, so that they are not checked again."""
KNOWN_LENGTH = 2**14
"""Maximum characters of such a statement."""
READONLY_CODE = 164
"""ClickHouse's READONLY."""

READING = frozenset({"SELECT", "WITH", "SHOW", "DESCRIBE", "EXPLAIN", "EXISTS"})
HARMLESS_TABLE_FUNCTIONS = frozenset(
    {"format", "fuzzjson", "generaterandom", "generateseries", "generate_series", "null", "numbers", "numbers_mt"}
    | {"primes", "sqlstandardvalues", "values", "view", "viewexplain", "zeros", "zeros_mt"}
)
"""Table functions that make rows only from their arguments. All other table functions of the engine are refused."""
REACHING_FUNCTIONS = frozenset({"file", "hascolumnintable", "catboostevaluate"})
"""Ordinary functions that read a file or send a request to another host."""
_TOKEN = re.compile(r"'(?:[^'\\]|\\.|'')*'|`(?:[^`\\]|\\.|``)*`|\"(?:[^\"\\]|\\.)*\"|\w+|\S", re.DOTALL)
ALLOCATOR = "JE_MALLOC_CONF"
"""Environment variable from which the embedded engine's allocator reads its settings when it is loaded."""


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    format: str
    read_rows: int
    read_bytes: int
    elapsed_s: float


def connect(settings: SinkSettings) -> Client:
    """Return a client that may write. Raises QueryFailed if another process has the embedded engine's directory
    open, or ClickHouse's own error if the server is unreachable."""
    if not settings.embedded:
        return clickhouse_connect.get_client(
            host=settings.host,
            port=settings.port,
            username=settings.user,
            password=settings.password.get_secret_value(),
            secure=settings.secure,
            autogenerate_session_id=False,
        )
    directory, options = settings.directory, engine_options(settings)
    directory.mkdir(parents=True, exist_ok=True)
    # Takes effect only in a process that has not loaded the engine yet.
    os.environ.setdefault(ALLOCATOR, f"dirty_decay_ms:{settings.keep_freed_ms},muzzy_decay_ms:0")
    try:
        return clickhouse_connect.get_client(interface="chdb", path=str(directory), chdb_options=options)
    except ClickHouseError as error:
        raise QueryFailed(
            f"the tables in {directory} cannot be opened: another process has them open (a running sink: ask it with "
            f"`tidemill query`), this process has opened another directory, or they are damaged (delete the directory: "
            f"a sink writes them again from the log). The engine says: {error}"
        ) from error


def engine_options(settings: SinkSettings) -> dict[str, int]:
    """Return memory limits of the embedded engine, by ClickHouse's names: its defaults are gigabytes for each cache."""
    return {
        "mark_cache_size": settings.cache_bytes,
        "primary_index_cache_size": settings.cache_bytes,
        "background_pool_size": settings.merges.at_once,
        "background_merges_mutations_concurrency_ratio": 1,
    }


class Reader:
    """Read-only queries over the embedded engine, which this process has open."""

    def __init__(self, settings: SinkSettings) -> None:
        self._path = str(settings.directory)
        self._database = settings.database
        self._limits = {
            "max_execution_time": settings.query_seconds,
            "max_memory_usage": settings.query_memory_bytes,
            "max_result_bytes": settings.result_bytes,
        }
        listed = self._run("SELECT name FROM system.table_functions", "JSONCompactColumns", {}, None).body
        self._refused = refused_functions(json.loads(listed)[0])
        # A page runs the same few statements repeatedly.
        self._known = lru_cache(KNOWN_STATEMENTS)(self.check)

    def ask(
        self,
        sql: str,
        *,
        default_format: str = "TabSeparated",
        parameters: Mapping[str, str] | None = None,
        database: str | None = None,
        bounds: Mapping[str, float] | None = None,
    ) -> Answer:
        """Run one reading statement.

        Args:
            sql: SELECT, WITH, SHOW, DESCRIBE, EXPLAIN or EXISTS; its FORMAT clause has priority over `default_format`.
            parameters: values of `{name:Type}` in ClickHouse's own escaping, by name.
            database: for names without one; the sink's by default.
            bounds: lower limits, by ClickHouse's names; rows beyond `max_result_rows` or `limit` are omitted.

        Raises:
            QueryFailed: refused, not parsed, failed, or beyond a limit.
        """
        statement, own_format = self._known(sql) if len(sql) <= KNOWN_LENGTH else self.check(sql)
        chosen = own_format or default_format
        answer = self._run(statement, chosen, parameters or {}, database, bounds)
        if answer.body or chosen != "Native":
            return answer
        # Without rows the embedded engine sends nothing; a server sends the names and types of the columns.
        head, _, tail = statement.rpartition(f"FORMAT {own_format}") if own_format else (f"{statement} ", "", "")
        described = self._run(f"{head}FORMAT JSONCompact{tail}", "JSONCompact", parameters or {}, database)
        body = empty_native_block([(c["name"], c["type"]) for c in json.loads(described.body)["meta"]])
        return replace(described, body=body, format="Native")

    def check(self, sql: str) -> tuple[str, str]:
        """Return the statement as the engine's parser prints it, if it may be run, and its format, empty if it names
        none. Raises QueryFailed."""
        formatting, values = "SELECT formatQuerySingleLine({statement:String})", {"statement": escaped(sql)}
        printed = self._run(formatting, "RawBLOB", values, None).body.decode()
        return printed, check(printed, self._refused)

    def _run(
        self,
        sql: str,
        output_format: str,
        parameters: Mapping[str, str],
        database: str | None,
        bounds: Mapping[str, float] | None = None,
    ) -> Answer:
        import chdb

        connection = chdb.connect(self._path)
        try:
            quoted = (database or self._database).replace("\\", "\\\\").replace("`", "\\`")
            connection.query(f"USE `{quoted}`")
            limits = {name: min(self._limits.get(name, bound), bound) for name, bound in (bounds or {}).items()}
            if most := [limits.pop(name) for name in ("limit", "max_result_rows") if name in limits]:
                # By its overflow mode, `break`, the engine would also leave out rows beyond `max_result_bytes`.
                limits["limit"] = int(min(most))
            chosen = ", ".join(f"{name} = {value}" for name, value in {**self._limits, **limits}.items())
            connection.query(f"SET {chosen}, readonly = 1")
            result = connection.query(sql, output_format, params=dict(parameters))
            rows, n_bytes = result.storage_rows_read(), result.storage_bytes_read()
            return Answer(result.bytes(), output_format, rows, n_bytes, result.elapsed())
        except RuntimeError as error:
            found = re.search(r"Code: (\d+)", str(error))
            raise QueryFailed(str(error).strip(), int(found[1]) if found else UNKNOWN_CODE) from error
        finally:
            connection.close()


def empty_native_block(columns: list[tuple[str, str]]) -> bytes:
    """Return a block without rows in ClickHouse's Native format: column count, row count, name and type of each."""

    def varint(number: int) -> bytes:
        out = bytearray()
        while number >= 0x80:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        return bytes([*out, number])

    texts = (text.encode() for column in columns for text in column)
    return varint(len(columns)) + varint(0) + b"".join(varint(len(text)) + text for text in texts)


def refused_functions(table_functions: Iterable[str]) -> frozenset[str]:
    """Return the names that must not be called, in lower case, given the engine's table functions."""
    return (frozenset(name.lower() for name in table_functions) - HARMLESS_TABLE_FUNCTIONS) | REACHING_FUNCTIONS


def check(normalized: str, refused: frozenset[str]) -> str:
    """Check that a statement, as the engine's parser prints it, only reads the engine's tables.

    Returns its format, empty if it names none. Raises QueryFailed with the refused part and an alternative.
    """

    def refused_for(reason: str) -> QueryFailed:
        return QueryFailed(f"Code: {READONLY_CODE}. DB::Exception: {reason}. (READONLY)", READONLY_CODE)

    parts = _TOKEN.findall(normalized)  # strings, quoted names, words and single signs
    phrases = set(pairwise(part.upper() for part in parts))
    verb = next((part.upper() for part in parts if part != "("), "")
    if verb not in READING:
        raise refused_for(f"{verb}: this endpoint is read-only and answers {', '.join(sorted(READING))}")
    if ("INTO", "OUTFILE") in phrases:
        raise refused_for("INTO OUTFILE: this endpoint writes no files; redirect the answer instead")
    if ("PARALLEL", "WITH") in phrases:
        raise refused_for("PARALLEL WITH: only one statement per request")
    called = (word for word, following in pairwise(parts) if following == "(" and word[0] != "'")
    for name in (word.strip('`"').lower() for word in called):
        if name in refused or name.startswith("ai"):
            raise refused_for(f"{name}(): this endpoint reads its own tables only, no files, hosts or processes")
    formats = [name for word, name in pairwise(parts) if word == "FORMAT" and re.fullmatch(r"\w+", name)]
    return formats[-1] if formats else ""
