"""Counts requests by route and status."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.producers.gateway.metrics import OTHER_ROUTE, GatewayMetrics


class CountedRequests:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and count its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The route's own path, not the request's: clients choose that one.
                route = getattr(scope.get("route"), "path", OTHER_ROUTE)
                metrics: GatewayMetrics = scope["app"].state.metrics
                metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)
