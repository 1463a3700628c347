"""ClickHouse's HTTP protocol over the embedded engine, read-only, and the thread that serves it.

Supports what clients of a ClickHouse server use: `GET /ping`, queries in `?query=` or the body or both,
`default_format`, `database`, `param_*`, errors with ClickHouse's code in `X-ClickHouse-Exception-Code`. Requests are
independent: `session_id`, compression flags and progress settings are accepted and have no effect. Limits on time,
memory and rows can only be lowered.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import READONLY_CODE, Reader
from tidemill.consumers.sink.query import QueryFailed
from tidemill.schemas.http_connections import bind
from tidemill.schemas.http_server import BoundedConfig, ThreadServer

EXCEPTION_CODE = "X-ClickHouse-Exception-Code"
PID_HEADER = "X-Tidemill-Pid"
"""Distinguishes the sink of a state file from another process that uses its port later."""
SYNTAX_ERROR = 62
STATUS_OF_CODE = {46: 404, 47: 404, 60: 404, 81: 404, 159: 408, READONLY_CODE: 403}
"""Unknown function, identifier, table, database; timeout; read-only. Any other error of a query is 400."""
CONTENT_TYPES = {
    **dict.fromkeys(("TabSeparated", "TSV", "TabSeparatedWithNames"), "text/tab-separated-values; charset=UTF-8"),
    "CSV": "text/csv; charset=UTF-8; header=absent",
    "CSVWithNames": "text/csv; charset=UTF-8; header=present",
    **dict.fromkeys(("JSON", "JSONCompact"), "application/json; charset=UTF-8"),
    "JSONEachRow": "application/x-ndjson; charset=UTF-8",
    **dict.fromkeys(("Native", "Arrow", "ArrowStream", "Parquet", "RowBinary"), "application/octet-stream"),
}
MAX_QUERY_BYTES = 2**20
BOUNDS = ("max_execution_time", "max_memory_usage", "max_result_rows", "limit")
"""Limits that a client may lower for its query."""
MIN_SECONDS = 0.001
"""Minimum time limit: the engine counts microseconds, and 0 means no limit."""


def _headers(request: Request) -> dict[str, str]:
    query_id = request.query_params.get("query_id", "")
    # The server cannot send other characters in a header.
    if not (query_id.isascii() and query_id.isprintable()):
        query_id = ""
    return {
        PID_HEADER: str(os.getpid()),
        "X-ClickHouse-Server-Display-Name": "tidemill-sink",
        "X-ClickHouse-Query-Id": query_id or str(uuid.uuid4()),
        "X-ClickHouse-Timezone": "UTC",
    }


def malformed(reason: str) -> QueryFailed:
    return QueryFailed(f"Code: {SYNTAX_ERROR}. {reason}", SYNTAX_ERROR)


async def _statement(request: Request) -> str:
    """Return the query parameter followed by the body. Raises QueryFailed if both are empty or they are too long."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_QUERY_BYTES:
            raise malformed(f"The query is longer than {MAX_QUERY_BYTES} bytes")
    try:
        sql = "\n".join(part for part in (request.query_params.get("query", ""), body.decode()) if part.strip())
    except UnicodeDecodeError as error:
        raise malformed(f"The query is not UTF-8: {error}") from error
    if not sql:
        raise malformed("Empty query: send SQL as ?query= or as the body")
    return sql


def _bounds(request: Request) -> dict[str, float]:
    """Return the lower limits of a request. Raises QueryFailed for a limit that is not a positive number."""
    given = {name: request.query_params[name] for name in BOUNDS if name in request.query_params}
    try:
        bounds = {name: float(value) if name == "max_execution_time" else int(value) for name, value in given.items()}
    except ValueError as error:
        raise malformed(f"A limit is no number: {given}") from error
    shortest = bounds.get("max_execution_time", MIN_SECONDS)
    if any(not 0 < value < math.inf for value in bounds.values()) or shortest < MIN_SECONDS:
        raise malformed(f"A limit must be above 0, and a time at least {MIN_SECONDS} s: {given}")
    return bounds


def application(reader: Reader, executor: Executor) -> Starlette:
    """Return the protocol as an ASGI application; queries run in `executor`, so that they do not block the server."""

    async def ping(request: Request) -> Response:
        return PlainTextResponse("Ok.\n", headers=_headers(request))

    async def query(request: Request) -> Response:
        values = request.query_params
        asked = values.get("default_format") or request.headers.get("X-ClickHouse-Format")
        try:
            ask = partial(
                reader.ask,
                await _statement(request),
                default_format=asked or "TabSeparated",
                parameters={k.removeprefix("param_"): v for k, v in values.items() if k.startswith("param_")},
                database=values.get("database") or request.headers.get("X-ClickHouse-Database"),
                bounds=_bounds(request),
            )
            answer = await asyncio.get_running_loop().run_in_executor(executor, ask)
        except QueryFailed as error:
            headers = {**_headers(request), EXCEPTION_CODE: str(error.code)}
            return PlainTextResponse(f"{error}\n", STATUS_OF_CODE.get(error.code, 400), headers)
        elapsed = int(answer.elapsed_s * 1e9)
        fields = {"read_rows": answer.read_rows, "read_bytes": answer.read_bytes, "elapsed_ns": elapsed}
        summary = json.dumps({name: str(value) for name, value in fields.items()})
        headers = {**_headers(request), "X-ClickHouse-Format": answer.format, "X-ClickHouse-Summary": summary}
        kind = CONTENT_TYPES.get(answer.format, "text/plain; charset=UTF-8")
        return Response(answer.body, headers={**headers, "Content-Type": kind})

    async def root(request: Request) -> Response:
        no_query = request.method == "GET" and "query" not in request.query_params
        return await (ping(request) if no_query else query(request))

    return Starlette(routes=[Route("/ping", ping), Route("/", root, methods=["GET", "POST"])])


LOOPBACK = "127.0.0.1"
GRACE_S = 5
BACKLOG = 128


@contextmanager
def query_server(settings: SinkSettings) -> Iterator[ThreadServer]:
    """Serve queries while the context is entered. Raises OSError."""
    listener = bind(LOOPBACK, settings.http_port, "sink.http_port", BACKLOG)
    executor = ThreadPoolExecutor(settings.query_threads, thread_name_prefix="sink-query")
    app = application(Reader(settings), executor)
    config = BoundedConfig(app, settings.http, lifespan="off", grace_s=GRACE_S)
    try:
        with ThreadServer("sink-http", listener, config) as server:
            yield server
    finally:
        # The engine must outlive the queries that run in it; their time is bounded by `query_seconds`.
        executor.shutdown(wait=True, cancel_futures=True)
