"""The common part of all views of the page: templates and panels."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from tidemill.consumers.sink.query import QueryFailed
from tidemill.consumers.view import drawn
from tidemill.consumers.view.config import ViewSettings
from tidemill.consumers.view.panels import PAGES, Page, Panel, panels
from tidemill.consumers.view.tables import TableRows, Tables

HERE = Path(__file__).parent
MOST_VALUE = 2000
"""Maximum characters of a parameter's value."""
ROWS = 100
"""Number of rows of a panel's table shown at a time."""
READ_ROWS = 50_000
"""Maximum rows read for a panel's query: a plot shows all of them."""


class Site:
    """The tables, templates and settings for the responses of all addresses."""

    def __init__(self, tables: Tables, settings: ViewSettings) -> None:
        self.tables, self.settings = tables, settings
        self._templates = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals |= {"pages": PAGES, "refresh_ms": round(settings.refresh_s * 1000), "query": urlencode}
        self._templates.globals |= {"link": drawn.link, "asked_at": drawn.asked_at, "flows": drawn.flows}
        self._templates.globals |= {"graphs": drawn.graphs, "marks": drawn.MARKS, "most_rows": ROWS}
        self._templates.globals |= {"table_body": drawn.table_body, "cell_of": drawn.cell}
        self._templates.filters |= {"cell": drawn.shown_text, "numeric": drawn.numeric, "clipped": drawn.clipped}

    def html(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:  # noqa: ANN401 - a template's values
        """Return a rendered template as a response; every value is escaped."""
        return HTMLResponse(self._templates.get_template(template).render(**values), status)

    def page(self, page: Page, values: dict[str, str], **more: Any) -> HTMLResponse:  # noqa: ANN401 - a template's values
        """Return the shell of a page: the browser requests its panels, with the parameters of their queries."""
        return self.html("page.html", page=page, panels=[panels()[name] for name in page.panels], values=values, **more)

    async def runs(self, request: Request) -> Response:
        """Return the runs in the tables, for the user to choose one."""
        values = request.query_params
        try:
            result = await self.tables.kept(panels()["runs"].sql)
        except QueryFailed:
            # Each panel shows the reason itself.
            return HTMLResponse("")
        path = urlsplit(values.get("path", "")).path
        return unless_same(request, self.html("runs.html", result=result, run=values.get("run", ""), path=path))

    async def panel(self, request: Request) -> Response:
        """Return one panel: as HTML, or its rows as JSON or CSV, depending on the ending of the address."""
        name, _, ending = request.path_params["name"].partition(".")
        panel = panels().get(name)
        if panel is None or ending not in ("", "json", "csv"):
            return PlainTextResponse(f"no panel {request.path_params['name']!r}\n", 404)
        values = dict(request.query_params)
        try:
            if panel.fault:
                raise QueryFailed(panel.fault)
            result = await self.tables.kept(panel.sql, arguments(panel, values), READ_ROWS)
        except QueryFailed as error:
            if ending:
                return PlainTextResponse(f"{error}\n", 502)
            return self.html("failed.html", 200, panel=panel, message=str(error))
        # Skipped for a query with the parameter `run`: it has filtered itself, and some records name no run.
        if (run := values.get("run")) and "run_id" in result.columns and "run" not in panel.parameters:
            place = result.columns.index("run_id")
            result = replace(result, rows=[row for row in result.rows if row[place] == run])
        if ending and result.cut:
            return PlainTextResponse(f"more than {READ_ROWS} rows: take them with `tidemill query {name}`\n", 413)
        if ending:
            return rows_as(result, ending, name)
        whole = not request.url.path.startswith("/rows/")
        answer = self.html(
            "panel.html" if whole else "rows.html", panel=panel, result=result, begin=place_in(values), values=values,
            plot=drawn.plotted(panel, result) if whole and panel.plot in drawn.PLOTTED else None,
            here=request.url.path, own={key: value for key, value in values.items() if key != "from"},
        )  # fmt: skip
        sent = unless_same(request, answer)
        sent.headers["Age"] = str(round(time.monotonic() - result.asked))
        return sent


def arguments(panel: Panel, values: dict[str, str]) -> dict[str, str]:
    """Return the parameters of a panel's query from an address; missing ones are empty."""
    return {name: values.get(name, "")[:MOST_VALUE] for name in panel.parameters}


def place_in(values: dict[str, str]) -> int:
    """Return the index, from 0, of the first row or token to show: `from` in the address."""
    given = values.get("from", "")
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 12 else 0


def rows_as(result: TableRows, ending: str, name: str) -> Response:
    """Return rows as a download: `json`, one object for each row, or `csv`."""
    headers = {"Content-Disposition": f'attachment; filename="{name}.{ending}"'}
    if ending == "json":
        objects = [dict(zip(result.columns, row, strict=True)) for row in result.rows]
        return Response(json.dumps(objects), media_type="application/json", headers=headers)
    text = io.StringIO()
    csv.writer(text).writerows([result.columns, *([drawn.cell_text(value) for value in row] for row in result.rows)])
    return Response(text.getvalue(), media_type="text/csv", headers=headers)


def unless_same(request: Request, answer: Response) -> Response:
    """Return the response, or 304 if the browser has it already."""
    tag = f'"{hashlib.sha256(bytes(answer.body)).hexdigest()[:24]}"'
    answer.headers["ETag"] = tag
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return answer
