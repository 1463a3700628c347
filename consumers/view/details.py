"""The pages of one optimizer step, of one weight version and of one interaction: all from named queries."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tidemill.consumers.view.panels import Page, panels
from tidemill.consumers.view.site import MOST_VALUE, Site

OF_STEP = ("step", "step_inputs", "step_exclusions", "step_metrics", "step_lag", "step_plans")
OF_VERSION = ("version", "version_deltas", "version_proofs", "version_decisions", "version_tensors")
OF_INTERACTION = ("interaction_path", "interaction")


def routes(site: Site) -> list[BaseRoute]:
    """The addresses of a step, of a version, and of an interaction, of the run `?run=` where several have the same."""

    async def step(request: Request) -> Response:
        return _page(site, request, Page("run", f"Step {request.path_params['step']}", OF_STEP))

    async def version(request: Request) -> Response:
        return _page(site, request, Page("weights", f"Version {request.path_params['version']}", OF_VERSION))

    async def interaction(request: Request) -> Response:
        name = request.path_params["interaction_id"][:MOST_VALUE]
        values = {"interaction": name, "run": request.query_params.get("run", "")[:MOST_VALUE]}
        page = Page("users", f"Interaction {name}", OF_INTERACTION)
        shown = [panels()[panel] for panel in OF_INTERACTION]
        return site.html("page.html", page=page, panels=shown, values=values)

    return [
        Route("/run/step/{step:int}", step),
        Route("/weights/{version:int}", version),
        Route("/users/{interaction_id:path}", interaction),
    ]


def _page(site: Site, request: Request, page: Page) -> Response:
    values = {**request.query_params, **{name: str(value) for name, value in request.path_params.items()}}
    shown = [panels()[name] for name in page.panels]
    return site.html("page.html", page=page, panels=shown, values=values, path=request.url.path)
