"""Access of the page to the sink's tables: only over HTTP, with limits, in the same way for all engines."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import check, refused_functions
from tidemill.consumers.sink.query import FORMAT, QueryFailed, http_request, read_state
from tidemill.consumers.view.config import ViewSettings

EXTRA_S = 2.0
"""Seconds that a response may take to arrive beyond the query's own limit."""
REST = 40
"""If all queries in view take t seconds, a cached result is valid for REST times t: they use 2.5 % of the time."""
REST_S = 30.0
"""Maximum validity for that reason, in seconds."""
PATIENCE_S = 0.1
"""Seconds after which a reader that waits for a new result gets the cached one; the next request gets the new one."""
LONGEST_S = 60.0
"""Maximum validity of a result, in seconds, while the tables read no further records."""
STATE_S = 0.5
"""Maximum age, in seconds, of the known read progress of the tables."""
MOST_KEPT = 128
"""Maximum number of cached results."""
STATE = "SELECT sum(next) FROM (SELECT max(next_offset) AS next FROM sink_watermarks GROUP BY _topic, _partition)"


@dataclass(frozen=True, slots=True)
class TableRows:
    """Results. Numbers are numbers, arrays are lists, maps are dicts, times are text in UTC, NULL is None."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    """ClickHouse types, by column."""
    rows: list[list[Any]]
    cut: bool = False
    """Whether the engine had more rows than these."""
    seconds: float = 0.0
    asked_at: float = field(default_factory=time.monotonic)
    """Time of the query, on the monotonic clock."""

    def named(self) -> list[dict[str, Any]]:
        """Return the values of each row by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def part(self, begin: int, rows: int) -> TableRows:
        return replace(self, rows=self.rows[begin : begin + rows])


@dataclass(slots=True)
class _Kept:
    """The newest result of a query."""

    rows: TableRows | None = None
    asking: asyncio.Task[TableRows] | None = None
    """The task of the current query for a newer result, or of the last one."""
    at: float = -math.inf
    """Time of the query, on the monotonic clock."""
    looked: float = -math.inf
    """Time of the last request for it."""
    cost: float = math.inf
    """Seconds that the query takes when little else runs."""
    state: Any = None
    """Read progress of the tables before the query."""


def _key(sql: str, given: Mapping[str, str], most: int) -> tuple[str, ...]:
    return (sql, str(most), *(f"{name}={given[name]}" for name in sorted(given)))


class Tables:
    """Bounded, read-only queries.

    Args:
        sink: the engine. A running sink is found by its state file at each query, since its address may change.
    """

    def __init__(self, sink: SinkSettings, view: ViewSettings) -> None:
        self._sink, self._view = sink, view
        self._client = httpx.AsyncClient(timeout=view.query_seconds + EXTRA_S)
        self._kept: OrderedDict[tuple[str, ...], _Kept] = OrderedDict()
        self._refused: frozenset[str] = frozenset()
        """Functions of a server that its statements must not call; empty until they have been queried."""
        self._reading_state = asyncio.Lock()
        self._known: tuple[float, Any] = (-math.inf, None)
        """The time of the last query for the read progress of the tables, and its result."""

    async def close(self) -> None:
        await self._client.aclose()

    async def kept(self, sql: str, parameters: Mapping[str, str] | None = None, most: int = 0) -> TableRows:
        """Run `ask` once for all simultaneous readers, and cache the result.

        It is valid for `REST` times the time of all queries in view, and longer while the tables read no further.
        """
        given = parameters or {}
        key = _key(sql, given, most)
        one = self._kept.setdefault(key, _Kept())
        self._kept.move_to_end(key)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        now = one.looked = time.monotonic()
        # Total seconds of the queries that were requested recently.
        cost = sum(each.cost for each in self._kept.values() if each.rows is not None and now - each.looked < LONGEST_S)
        if one.rows is not None and now - one.at < min(REST * cost, REST_S):
            return one.rows
        if one.asking is None or one.asking.done():
            one.asking = asyncio.create_task(self._renewed(one, sql, given, most))
            # A failure without a waiting reader appears at the next request, which has no cached result.
            one.asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        old = one.rows if time.monotonic() - one.at < LONGEST_S + REST_S else None
        done, _ = await asyncio.wait({one.asking}, timeout=None if old is None else PATIENCE_S)
        return one.asking.result() if done or old is None else old

    def known(
        self, sql: str, parameters: Mapping[str, str] | None = None, most: int = 0, oldest: float = LONGEST_S
    ) -> TableRows | None:
        """Return the cached result of `kept`, valid or not; None if there is none that is at most `oldest` s old."""
        one = self._kept.get(_key(sql, parameters or {}, most))
        return one.rows if one is not None and time.monotonic() - one.at < oldest else None

    async def _renewed(self, one: _Kept, sql: str, given: Mapping[str, str], most: int) -> TableRows:
        try:
            async with self._reading_state:
                at, state = self._known
                if time.monotonic() - at > STATE_S:
                    at, state = time.monotonic(), (await self.ask(STATE)).rows[0][0]
                    self._known = at, state
            if one.rows is None or state != one.state or time.monotonic() - one.at > LONGEST_S:
                at = time.monotonic()
                one.rows = await self.ask(sql, given, most)
                one.at, one.state = at, state
                # While other queries run, a query takes longer than its own cost.
                one.cost = min(one.rows.seconds, 1.5 * one.cost)
        except QueryFailed:
            one.rows = None
            raise
        return one.rows

    async def checked(self, sql: str) -> str:
        """Return a user's statement if it only reads tables. Raises QueryFailed.

        The embedded engine's endpoint checks each statement. A server in `readonly = 1` permits KILL and the function
        `file`: its statements are checked here, as the server's parser prints them.
        """
        if self._sink.embedded:
            return sql
        if not self._refused:
            known = await self.ask("SELECT name FROM system.table_functions", most=10_000)
            self._refused = refused_functions(row[0] for row in known.rows)
        printed = await self.ask("SELECT formatQuerySingleLine({statement:String})", {"statement": sql})
        statement: str = printed.rows[0][0]
        check(statement, self._refused)
        return statement

    async def ask(self, sql: str, parameters: Mapping[str, str] | None = None, most: int = 0) -> TableRows:
        """Return the rows of one read-only statement.

        Args:
            sql: a statement without a FORMAT clause.
            parameters: values of `{name:Type}`, by name.
            most: maximum rows to read; 0: `view.result_rows`.

        Raises:
            QueryFailed: refused, not parsed, beyond a limit, or no response.
        """
        sink, most = self._sink, most or self._view.result_rows
        url = sink.server_url
        if sink.embedded:
            state = read_state(sink.directory)
            if state is None:
                raise QueryFailed(f"no sink has the tables in {sink.directory} open: start `tidemill sink`")
            url = state.url
        bounds = {
            "max_execution_time": str(self._view.query_seconds),
            "max_memory_usage": str(self._view.query_memory_bytes),
            # One more than are shown, to know whether there are more. ClickHouse's own limit on rows would be an error,
            # or, by its overflow mode `break`, would also leave out rows beyond a limit on bytes.
            "limit": str(most + 1),
        }
        began = time.monotonic()
        try:
            reply = await self._client.post(url, **http_request(sink, sql, parameters or {}, **bounds))
        except httpx.HTTPError as error:
            raise QueryFailed(
                f"ClickHouse at {url} does not answer ({type(error).__name__}); is it running?"
            ) from error
        if reply.status_code != httpx.codes.OK:
            raise QueryFailed(reply.text.strip())
        if reply.headers.get("X-ClickHouse-Format", FORMAT) != FORMAT:
            raise QueryFailed("leave the FORMAT clause out: the page takes the rows, and offers CSV and JSON")
        document = reply.json()
        return TableRows(
            tuple(column["name"] for column in document["meta"]),
            tuple(column["type"] for column in document["meta"]),
            document["data"][:most],
            len(document["data"]) > most,
            time.monotonic() - began,
            began,
        )
