"""The page as an ASGI application: shells that come at once, and panels that a browser reads one by one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from tidemill.consumers.view import ask, details, log, rollouts
from tidemill.consumers.view.config import ViewSettings
from tidemill.consumers.view.panels import PAGES, Page
from tidemill.consumers.view.security import Guarded
from tidemill.consumers.view.site import HERE, Site
from tidemill.consumers.view.tables import Tables


def application(tables: Tables, settings: ViewSettings) -> ASGIApp:
    """Every address of the page, behind its guard."""
    site = Site(tables, settings)

    def shell(page: Page) -> Route:
        async def answer(request: Request) -> Response:
            return await site.page(page, request)

        return Route(f"/{page.path}", answer)

    async def first(request: Request) -> Response:
        return RedirectResponse(f"/{PAGES[0].path}", 307)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await tables.close()

    routes: list[BaseRoute] = [
        Route("/", first),
        Route("/enter", site.enter, methods=["GET", "POST"]),
        Route("/runs", site.runs),
        Route("/panel/{name}", site.panel),
        Route("/rows/{name}", site.panel),
        *ask.routes(site),
        *log.routes(site),
        *details.routes(site),
        *rollouts.routes(site),
        Mount("/static", StaticFiles(directory=HERE / "static")),
        *map(shell, PAGES),
    ]
    packed = Middleware(GZipMiddleware, compresslevel=4)
    return Guarded(Starlette(routes=routes, lifespan=lifespan, middleware=[packed]), settings)
