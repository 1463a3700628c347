"""What every view of the page is answered from: templates, panels, and how values and rows are shown."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from tidemill.consumers.sink.query import QueryFailed
from tidemill.consumers.view.config import ViewSettings
from tidemill.consumers.view.flow import flows
from tidemill.consumers.view.graph import MARKS, graphs
from tidemill.consumers.view.panels import PAGES, Page, Panel, panels
from tidemill.consumers.view.security import COOKIE, same
from tidemill.consumers.view.tables import TableRows, Tables
from tidemill.consumers.view.text import clipped, visible

HERE = Path(__file__).parent
LINKS: dict[str, str] = {
    "interaction_id": "/users/",
    "rollout_id": "/rollouts/",
    "group_id": "/groups/",
    "step": "/run/step/",
    **dict.fromkeys(("version", "parent", "parent_version", "base", "serving"), "/weights/"),
}
"""The beginning of the address of a value's own page, by column."""
PARAMETER = "param_"
"""What the name of a query's parameter begins with in the address of a question, as in ClickHouse's."""
POSITIONS = tuple((f"{of}topic", f"{of}partition", f"{of}offset") for of in ("_", "", "source_"))
"""Columns that together name a record."""
MOST_VALUE = 2000
"""Characters of a parameter's value."""


class Site:
    """What each address is answered from: the tables, the templates and the settings."""

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
        self._templates.globals |= {"link": link, "records": records, "asked_at": asked_at, "flows": flows}
        self._templates.globals |= {"graphs": graphs, "marks": MARKS}
        self._templates.filters |= {"cell": shown_text, "numeric": numeric, "clipped": clipped}

    def html(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:  # noqa: ANN401 - a template's values
        """A template as an answer; every value is escaped."""
        return HTMLResponse(self._templates.get_template(template).render(**values), status)

    async def page(self, page: Page, request: Request) -> Response:
        """The shell of a page: its panels are read by the browser."""
        shown = [panels()[name] for name in page.panels]
        return self.html("page.html", page=page, panels=shown, values=dict(request.query_params))

    async def runs(self, request: Request) -> Response:
        """The runs of the tables, to choose from."""
        values = request.query_params
        try:
            result = await self.tables.ask(panels()["runs"].sql)
        except QueryFailed:
            # Each panel says why by itself.
            return HTMLResponse("")
        path = urlsplit(values.get("path", "")).path
        return unless_same(request, self.html("runs.html", result=result, run=values.get("run", ""), path=path))

    async def panel(self, request: Request) -> Response:
        """One panel: HTML, or its rows as JSON or CSV by the ending of the address."""
        name, _, ending = request.path_params["name"].partition(".")
        panel = panels().get(name)
        if panel is None or ending not in ("", "json", "csv"):
            return PlainTextResponse(f"no panel {request.path_params['name']!r}\n", 404)
        values = dict(request.query_params)
        try:
            result = await self.tables.ask(panel.sql, arguments(panel, values))
        except QueryFailed as error:
            if ending:
                return PlainTextResponse(f"{error}\n", 502)
            return self.html("failed.html", 200, panel=panel, message=str(error))
        if "run" not in panel.parameters:  # A query that takes it has chosen, and some records name no run.
            result = chosen_run(result, values.get("run", ""))
        if ending:
            return rows_as(result, ending, name)
        answer = self.html("panel.html", panel=panel, result=result, values=values)
        return unless_same(request, answer)

    async def enter(self, request: Request) -> Response:
        """The form that asks for the token, and its answer."""
        token = self.settings.token.get_secret_value()
        if request.method == "GET":
            return self.html("enter.html", wrong=False)
        shown = b""
        async for chunk in request.stream():
            shown = (shown + chunk)[:MOST_VALUE]
        if not same(parse_qs(shown.decode("utf-8", "replace")).get("token", [""])[0], token):
            return self.html("enter.html", 403, wrong=True)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=request.url.scheme == "https")
        return answer


def arguments(panel: Panel, values: dict[str, str]) -> dict[str, str]:
    """The values that a panel's query takes, from an address; one that is not given is empty."""
    return {name: values.get(name, "")[:MOST_VALUE] for name in panel.parameters}


def chosen_run(result: TableRows, run: str) -> TableRows:
    """The rows of one run, where a run is chosen and the rows name theirs."""
    if not run or "run_id" not in result.columns:
        return result
    place = result.columns.index("run_id")
    rows = [row for row in result.rows if row[place] == run]
    return TableRows(result.columns, result.types, rows, result.cut, result.seconds)


def cell_text(value: object) -> str:
    """A value as `tidemill query` prints it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else str(value)


def shown_text(value: object) -> str:
    """A value as the page shows it: control, directional and invisible characters are seen."""
    return visible(cell_text(value))


def numeric(kind: str) -> bool:
    """Whether a ClickHouse type is a number's, to be aligned by its last digit."""
    return re.match(r"(Nullable\(|LowCardinality\()*(U?Int|Float|Decimal)", kind) is not None


def link(column: str, row: list[Any], columns: tuple[str, ...]) -> str:
    """The address of the page of a value in a table; empty without one. An offset leads to its record."""
    value = row[columns.index(column)]
    for topic, partition, offset in POSITIONS:
        if column == offset and topic in columns and partition in columns and value is not None:
            place = (row[columns.index(topic)], row[columns.index(partition)], value)
            return f"/log/record?{urlencode(dict(zip(('topic', 'partition', 'offset'), place, strict=True)))}"
    if value in (None, "") or column not in LINKS:
        return ""
    beside = {name: row[columns.index(of)] for name, of in (("run", "run_id"), ("branch", "branch")) if of in columns}
    beside = {name: each for name, each in beside.items() if each}
    return f"{LINKS[column]}{quote(str(value), safe='')}" + (f"?{urlencode(beside)}" if beside else "")


def rows_as(result: TableRows, ending: str, name: str) -> Response:
    """Rows to take away: `json`, one object a row, or `csv`."""
    headers = {"Content-Disposition": f'attachment; filename="{name}.{ending}"'}
    if ending == "json":
        objects = [dict(zip(result.columns, row, strict=True)) for row in result.rows]
        return Response(json.dumps(objects), media_type="application/json", headers=headers)
    text = io.StringIO()
    csv.writer(text).writerows([result.columns, *([cell_text(value) for value in row] for row in result.rows)])
    return Response(text.getvalue(), media_type="text/csv", headers=headers)


def records(panel: Panel, row: list[Any], columns: tuple[str, ...]) -> str:
    """The address of the records under a row; empty where its panel names no query for them."""
    name = panel.drawn.get("records", "")
    if not name:
        return ""
    values = {column: cell_text(value) for column, value in zip(columns, row, strict=True)}
    return asked_at(panels()[name], values)


def asked_at(panel: Panel, values: dict[str, str]) -> str:
    """The address at which a panel's query is asked with some values."""
    own = {f"{PARAMETER}{name}": values[name] for name in panel.parameters if values.get(name)}
    return f"/ask?{urlencode({'name': panel.name, **own})}"


def unless_same(request: Request, answer: Response) -> Response:
    """The answer, or 304 where the browser has it."""
    tag = f'"{hashlib.sha256(bytes(answer.body)).hexdigest()[:24]}"'
    answer.headers["ETag"] = tag
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return answer
