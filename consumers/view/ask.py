"""The view Ask: SQL or a named query, and its rows as a table, as a plot, as CSV and as JSON.

The editor is a textarea: CodeMirror 5 is 170 kB without its SQL mode, CodeMirror 6 cannot be served without a build
step, and the page must load at most 300 kB.
"""

from __future__ import annotations

from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from tidemill.consumers.sink.query import QueryFailed
from tidemill.consumers.view.drawn import PARAMETER
from tidemill.consumers.view.panels import PAGES, Panel, panels
from tidemill.consumers.view.site import MOST_VALUE, Site, rows_as

MOST_BYTES = 2**18
"""Maximum size of a posted query."""
AXES = ("x", "y", "by")
KINDS = ("bars", "heat", "line", "steps")
"""Plots that the user can choose."""


def asked(values: dict[str, str]) -> Panel:
    """Return the query of an address or a form: its SQL or the named query, and how it is drawn by default."""
    sql = values.get("q", "").replace("\r\n", "\n")
    known = panels().get(values.get("name", ""))
    if known is None or (sql and sql != known.sql):
        known = Panel("", "Answer", sql)
    drawn = {**known.drawn, **{key: values[key] for key in AXES if key in values}}
    if "kind" in values:
        drawn["plot"] = values["kind"] if values["kind"] in KINDS else "table"
    return Panel(known.name, known.question, known.sql, drawn)


def routes(site: Site) -> list[BaseRoute]:
    """Return the routes of the page and of the rows of one query."""
    here = next(page for page in PAGES if page.path == "ask")

    async def page(request: Request) -> Response:
        values = dict(request.query_params)
        question = asked(values)
        name = values.get("name", "")
        unknown = name if name and name not in panels() else ""
        given = {name: values.get(PARAMETER + name, "") for name in question.parameters}
        settings = site.settings
        return site.html(
            "ask.html",
            404 if unknown else 200,
            page=here,
            question=question,
            given=given,
            chosen={key: values[key] for key in (*AXES, "kind") if key in values},
            unknown=unknown,
            named=panels(),
            columns=panels()["table_columns"],
            most_rows=settings.result_rows,
            most_seconds=settings.query_seconds,
            most_bytes=settings.query_memory_bytes,
        )

    async def rows(request: Request) -> Response:
        ending = request.path_params.get("ending", "")
        values = dict(request.query_params)
        if request.method == "POST":
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BYTES:
                    return PlainTextResponse(f"the question is longer than {MOST_BYTES} bytes\n", 413)
            values |= dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))
        question = asked(values)
        given = {name: values.get(PARAMETER + name, "")[:MOST_VALUE] for name in question.parameters}
        try:
            if ending not in ("", "json", "csv"):
                raise QueryFailed(f"rows come as json or csv, not as {ending!r}")
            if not question.sql.strip():
                raise QueryFailed("there is no question: write SQL, or choose a named query")
            result = await site.tables.ask(await site.tables.checked(question.sql), given)
        except QueryFailed as error:
            if ending:
                return PlainTextResponse(f"{error}\n", 400)
            return site.html("failed.html", panel=question, message=str(error))
        if ending:
            return rows_as(result, ending, question.name or "answer")
        return site.html("ask_rows.html", panel=question, result=result, plots=KINDS)

    return [
        Route("/ask", page),
        Route("/ask/rows", rows, methods=["GET", "POST"]),
        Route("/ask/rows.{ending}", rows, methods=["GET", "POST"]),
    ]
