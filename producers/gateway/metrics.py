"""The counts of the gateway, in Prometheus' text format. Labels come from fixed sets and from configured names, so that
no client can make series."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
OTHER_ROUTE = "other"


class GatewayMetrics:
    """The gateway's metrics, in a registry of their own.

    Args:
        pending: events that wait for the log's acknowledgement now.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, pending: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "tidemill_gateway_requests", "Requests by route and status.", ["route", "status"], registry=self._registry
        )
        self.events = Counter(
            "tidemill_gateway_events", "Events by API key and status.", ["key", "status"], registry=self._registry
        )
        self.acknowledged = Histogram(
            "tidemill_gateway_acknowledge_seconds",
            "From an event's or a batch's check to the log's acknowledgement.",
            buckets=SECONDS,
            registry=self._registry,
        )
        waiting = Gauge("tidemill_gateway_pending", "Events that wait for the log.", registry=self._registry)
        waiting.set_function(pending)

    def text(self) -> bytes:
        """All of them, for a scrape."""
        return generate_latest(self._registry)


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
