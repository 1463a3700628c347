"""The page of one interaction: from the answer and the user's signals to the versions that learnt from them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tidemill.consumers.view.panels import Page, panels
from tidemill.consumers.view.site import MOST_VALUE, Site

PANELS = ("interaction_path", "interaction")


def routes(site: Site) -> list[BaseRoute]:
    """`/users/{interaction_id}`, of the run `?run=` where several have the same id."""

    async def page(request: Request) -> Response:
        interaction = request.path_params["interaction_id"][:MOST_VALUE]
        values = {"interaction": interaction, "run": request.query_params.get("run", "")[:MOST_VALUE]}
        shown = [panels()[name] for name in PANELS]
        return site.html(
            "page.html", page=Page("users", f"Interaction {interaction}", PANELS), panels=shown, values=values
        )

    return [Route("/users/{interaction_id:path}", page)]
