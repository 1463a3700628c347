"""The common part of all views of the page: templates and panels."""

from __future__ import annotations

import asyncio
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
from tidemill.consumers.view.tables import LONGEST_S, TableRows, Tables

HERE = Path(__file__).parent
MOST_VALUE = 2000
"""Maximum characters of a parameter's value."""
ROWS = 50
"""Number of rows of a panel's table shown at a time."""
IN_SIGHT = 6
"""Number of panels that a browser shows at first."""
OLDEST_S = 900.0
"""Maximum age, in seconds, of a view's numbers that are shown until newer ones arrive."""
READ_ROWS = 50_000
"""Maximum rows read for a panel's query: a plot shows all of them."""
STATIC = {
    file.relative_to(HERE / "static").as_posix(): (
        f"/{file.relative_to(HERE).as_posix()}?{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    )
    for file in (HERE / "static").rglob("*.*")
}
"""The address of each script and style. It changes with the content, so that a browser may keep the content."""


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
        self._templates.globals |= {"static": STATIC, "table_body": drawn.table_body, "cell_of": drawn.cell}
        self._templates.filters |= {"cell": drawn.shown_text, "numeric": drawn.numeric, "clipped": drawn.clipped}

    def html(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:  # noqa: ANN401 - a template's values
        """Return a rendered template as a response; every value is escaped."""
        answer = HTMLResponse(self._templates.get_template(template).render(**values), status)
        answer.headers["ETag"] = f'"{hashlib.sha256(bytes(answer.body)).hexdigest()[:24]}"'
        return answer

    async def page(
        self, page: Page, values: dict[str, str], *, template: str = "page.html", path: str = ""
    ) -> HTMLResponse:
        """Return a page with the panels whose results are known; the browser requests the others, and old ones again.

        Args:
            values: the parameters of the panels' queries.
            path: address of the page, if it is not that of a view.
        """
        path = path or f"/{page.path}"
        known = dict[str, HTMLResponse]()
        if (runs := self.tables.known(panels()["runs"].sql)) is not None:
            known["runs"] = self.html("runs.html", result=runs, run=values.get("run", ""), path=path)
        shown = [panels()[name] for name in page.panels]
        # An interaction is not shown long after its user was erased.
        oldest = OLDEST_S if page in PAGES else LONGEST_S
        for place, panel in enumerate(shown):
            result = self.tables.known(panel.sql, arguments(panel, values), READ_ROWS, oldest)
            if result is not None:
                known[panel.name] = self._panel(panel, result, values)
            if place < IN_SIGHT and not panel.fault:
                # The browser, which loads its scripts meanwhile, joins the query, if there is one.
                task = asyncio.create_task(self.result(panel, values))
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self.html(template, page=page, panels=shown, values=values, path=path, known=known)

    async def result(self, panel: Panel, values: dict[str, str]) -> TableRows:
        """Return the rows of a panel's query with its parameters from an address. Raises QueryFailed."""
        return await self.tables.kept(panel.sql, arguments(panel, values), READ_ROWS)

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
            result = await self.result(panel, values)
        except QueryFailed as error:
            if ending:
                return PlainTextResponse(f"{error}\n", 502)
            return self.html("failed.html", 200, panel=panel, message=str(error))
        if ending and result.cut:
            return PlainTextResponse(f"more than {READ_ROWS} rows: take them with `tidemill query {name}`\n", 413)
        if ending:
            return rows_as(of_run(panel, result, values), ending, name)
        return unless_same(request, self._panel(panel, result, values, whole=request.url.path.startswith("/panel/")))

    def _panel(self, panel: Panel, result: TableRows, values: dict[str, str], *, whole: bool = True) -> HTMLResponse:
        """Return the HTML of a panel or, if not `whole`, of its table alone; the header Age is that of its numbers."""
        result = of_run(panel, result, values)
        answer = self.html(
            "panel.html" if whole else "rows.html", panel=panel, result=result, begin=place_in(values), values=values,
            plot=drawn.plotted(panel, result) if whole and panel.plot in drawn.PLOTTED else None,
            here=f"/{'panel' if whole else 'rows'}/{panel.name}",
            own={key: value for key, value in values.items() if key != "from"},
        )  # fmt: skip
        answer.headers["Age"] = str(round(time.monotonic() - result.asked_at))
        return answer


def arguments(panel: Panel, values: dict[str, str]) -> dict[str, str]:
    """Return the parameters of a panel's query from an address; missing ones are empty."""
    return {name: values.get(name, "")[:MOST_VALUE] for name in panel.parameters}


def of_run(panel: Panel, result: TableRows, values: dict[str, str]) -> TableRows:
    """Return the rows of the run in the address; all rows if it names none."""
    run = values.get("run")
    # A query with the parameter `run` has filtered itself, and some records name no run.
    if not run or "run_id" not in result.columns or "run" in panel.parameters:
        return result
    place = result.columns.index("run_id")
    return replace(result, rows=[row for row in result.rows if row[place] == run])


def place_in(values: dict[str, str]) -> int:
    """Return the index, from 0, of the first row or token to show: `from` in the address."""
    given = values.get("from", "")
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 12 else 0


def rows_as(result: TableRows, ending: str, name: str) -> Response:
    """Return rows as a download: `json`, one object for each row, or `csv`."""
    headers = {"Content-Disposition": f'attachment; filename="{name}.{ending}"'}
    if ending == "json":
        return Response(json.dumps(result.named()), media_type="application/json", headers=headers)
    text = io.StringIO()
    csv.writer(text).writerows([result.columns, *([drawn.cell_text(value) for value in row] for row in result.rows)])
    return Response(text.getvalue(), media_type="text/csv", headers=headers)


def unless_same(request: Request, answer: HTMLResponse) -> Response:
    """Return the response, or 304 if the browser has it already."""
    if request.headers.get("if-none-match") != answer.headers["ETag"]:
        return answer
    kept = {name: answer.headers[name] for name in ("ETag", "Age") if name in answer.headers}
    return Response(status_code=304, headers=kept)
