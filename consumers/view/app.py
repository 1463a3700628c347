"""The page as an ASGI application behind its guard, and the process that serves it.

A browser gets a page with the panels whose results are known, and then requests the others one by one. The guard
decides which clients may see the page, and limits what a browser may do with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
from collections.abc import AsyncIterator
from urllib.parse import parse_qs, urlsplit

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.query import QueryFailed, answers, read_state
from tidemill.consumers.sink.service import open_tables as opened
from tidemill.consumers.view import ask, log, rollouts
from tidemill.consumers.view.config import ViewSettings, is_loopback
from tidemill.consumers.view.panels import PAGES, Page, panels
from tidemill.consumers.view.site import HERE, MOST_VALUE, STATIC, Site
from tidemill.consumers.view.tables import Tables
from tidemill.schemas.http_connections import bind
from tidemill.schemas.http_server import BoundedConfig, ThreadServer
from tidemill.schemas.shutdown import stop_on_signals

GRACE_S = 2
BACKLOG = 128
FIRST_S = 1.0
"""Maximum time in seconds that the server waits at its start for the results of its views."""
OF_STEP = ("step", "step_inputs", "step_exclusions", "step_metrics", "step_lag", "step_plans")
OF_VERSION = ("version", "version_deltas", "version_proofs", "version_decisions", "version_tensors")
OF_INTERACTION = ("interaction_path", "interaction")
COOKIE = "tidemill_view"
OPEN = ("/enter", "/static/")
"""Paths that are served without the token."""
STATIC_CACHE = "max-age=31536000, immutable"
"""For the addresses of scripts and styles that name their content."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


def guarded(app: ASGIApp, settings: ViewSettings) -> ASGIApp:
    """Wrap an ASGI application with a check of host name and token, and with security headers on each response."""
    token, names = settings.token.get_secret_value(), {settings.host, *settings.names}

    def refusal(request: Request) -> Response | None:
        host = request.headers.get("host", "")
        named = re.fullmatch(r"[\w.-]+(:\d+)?|\[[0-9a-fA-F:.]+\](:\d+)?", host, re.ASCII)
        name = (urlsplit(f"//{host}").hostname or "") if named else ""
        if not (settings.behind_proxy or is_loopback(name) or name in names):
            return PlainTextResponse(f"this page is not called {name!r}: add the name to view.names\n", 421)
        # The path used for routing: a URL would also contain the Host header.
        if not token or request.scope["path"].startswith(OPEN):
            return None
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        shown = bearer if kind.lower() == "bearer" else request.cookies.get(COOKIE, "")
        if hmac.compare_digest(shown.encode(), token.encode()):
            return None
        if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/enter", 303)
        return PlainTextResponse("give the token (view.token): Authorization: Bearer TOKEN\n", 401)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                address = f"{scope['path']}?{scope['query_string'].decode('latin-1')}"
                headers["Cache-Control"] = STATIC_CACHE if address in STATIC.values() else "no-store"
            await send(message)

        if scope["type"] != "http":
            await app(scope, receive, send)
        else:
            await (refusal(Request(scope)) or app)(scope, receive, send_guarded)

    return answer


def application(tables: Tables, settings: ViewSettings) -> ASGIApp:
    """Return the application with every address of the page, behind its guard."""
    site = Site(tables, settings)

    def shell(page: Page) -> Route:
        async def answer(request: Request) -> Response:
            return await site.page(page, dict(request.query_params))

        return Route(f"/{page.path}", answer)

    async def first(request: Request) -> Response:
        return RedirectResponse(f"/{PAGES[0].path}", 307)

    async def step_or_version(request: Request) -> Response:
        """Serve the page of a step or version; `?run=` selects the run if several have the same number."""
        ((name, number),) = request.path_params.items()
        area, shown = ("run", OF_STEP) if name == "step" else ("weights", OF_VERSION)
        page, values = Page(area, f"{name.title()} {number}", shown), {**request.query_params, name: str(number)}
        return await site.page(page, values, path=request.url.path)

    async def interaction(request: Request) -> Response:
        name = request.path_params["interaction_id"][:MOST_VALUE]
        values = {"interaction": name, "run": request.query_params.get("run", "")[:MOST_VALUE]}
        return await site.page(Page("users", f"Interaction {name}", OF_INTERACTION), values)

    async def enter(request: Request) -> Response:
        """Serve the form for the token, and process its submission."""
        if request.method == "GET":
            return site.html("enter.html", wrong=False)
        token, shown = settings.token.get_secret_value(), b""
        async for chunk in request.stream():
            shown = (shown + chunk)[:MOST_VALUE]
        given = parse_qs(shown.decode("utf-8", "replace")).get("token", [""])[0]
        if not hmac.compare_digest(given.encode(), token.encode()):
            return site.html("enter.html", 403, wrong=True)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=request.url.scheme == "https")
        return answer

    async def prepare_views() -> None:
        """Read the panels of each view, for its first reader: those of the first view together, then one by one."""
        first = (site.result(panels()[name], {}) for name in PAGES[0].panels)
        await asyncio.gather(tables.kept(panels()["runs"].sql), *first, return_exceptions=True)
        for name in (name for page in PAGES[1:] for name in page.panels):
            with contextlib.suppress(QueryFailed):  # The panel shows the reason.
                await site.result(panels()[name], {})
        with contextlib.suppress(QueryFailed):
            await rollouts.found_rows(site, {"tokens": "[]"})

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        preparing = asyncio.create_task(prepare_views())
        # A reader who comes before the end joins the query that they need.
        await asyncio.wait({preparing}, timeout=FIRST_S)
        yield
        preparing.cancel()
        await tables.close()

    routes: list[BaseRoute] = [
        Route("/", first),
        Route("/enter", enter, methods=["GET", "POST"]),
        Route("/runs", site.runs),
        Route("/panel/{name}", site.panel),
        Route("/rows/{name}", site.panel),
        *ask.routes(site),
        *log.routes(site),
        Route("/run/step/{step:int}", step_or_version),
        Route("/weights/{version:int}", step_or_version),
        Route("/users/{interaction_id:path}", interaction),
        *rollouts.routes(site),
        Mount("/static", StaticFiles(directory=HERE / "static")),
        *map(shell, PAGES),
    ]
    packed = Middleware(GZipMiddleware, compresslevel=4)
    return guarded(Starlette(routes=routes, lifespan=lifespan, middleware=[packed]), settings)


def run(sink: SinkSettings, view: ViewSettings, *, open_tables: bool) -> None:
    """Serve the page until SIGTERM or SIGINT.

    Args:
        open_tables: open the embedded engine's tables in this process if no running sink has them open, so that a
            finished run can be viewed. A sink cannot start at the same time.

    Raises:
        OSError: the address cannot be bound.
        QueryFailed: another process that is not a sink has the tables open.
        RuntimeError: the server stopped unexpectedly.
    """
    stop = stop_on_signals()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(view.host, view.port, "view.port", BACKLOG))
        state = read_state(sink.directory) if open_tables and sink.embedded else None
        if open_tables and sink.embedded and (state is None or not answers(state)):
            if not sink.has_tables:
                raise FileNotFoundError(
                    f"there are no tables in {sink.directory}: name the directory of a demonstration or of a sink's "
                    "tables"
                )
            stack.enter_context(opened(sink.model_copy(update={"http_port": 0})))
        config = BoundedConfig(application(Tables(sink, view), view), view.http, lifespan="on", grace_s=GRACE_S)
        server = stack.enter_context(ThreadServer("view-http", listener, config))
        logging.getLogger(__name__).info("the page is at %s", server.url)
        server.watch(stop)
