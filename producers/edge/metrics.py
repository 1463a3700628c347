"""The counts of the router and of the gateway, in Prometheus' text format.

Labels come from fixed sets and from configured names, so that no client can make series.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class EdgeMetrics:
    """Metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

    def text(self) -> bytes:
        """All of them, for a scrape."""
        return generate_latest(self._registry)

    def _counter(self, name: str, says: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, says, labels, registry=self._registry)

    def _gauge(self, name: str, says: str) -> Gauge:
        return Gauge(name, says, registry=self._registry)

    def _seconds(self, name: str, says: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        return Histogram(name, says, labels, buckets=buckets, registry=self._registry)


class RouterMetrics(EdgeMetrics):
    """The router's."""

    def __init__(self) -> None:
        super().__init__()
        wide = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
        self.responses = self._counter("tidemill_router_responses", "Responses begun, by status.", ["status"])
        self.interactions = self._counter(
            "tidemill_router_interactions", "Interactions that the log acknowledged.", ["arm", "finish_reason"]
        )
        self.unrecorded = self._counter(
            "tidemill_router_unrecorded", "Answers that the log did not acknowledge, by what became of them.", ["end"]
        )
        self.retries = self._counter("tidemill_router_retries", "Requests that another replica was asked for.")
        self.fallbacks = self._counter(
            "tidemill_router_fallbacks", "Requests of the canary arm that the stable pool answered."
        )
        self.in_flight = self._gauge("tidemill_router_in_flight", "Requests in hand.")
        self.share = self._gauge("tidemill_router_canary_share", "Share of the users in the canary arm.")
        self.first_token = self._seconds(
            "tidemill_router_first_token_seconds", "From the request to its first token.", wide, ["arm"]
        )
        self.acknowledgement = self._seconds(
            "tidemill_router_acknowledgement_seconds", "Wait for the log at the end of an answer.", wide
        )


class GatewayMetrics(EdgeMetrics):
    """The gateway's.

    Args:
        pending: events that wait for the log's acknowledgement now.
    """

    def __init__(self, pending: Callable[[], float]) -> None:
        super().__init__()
        wide = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
        self.requests = self._counter("tidemill_gateway_requests", "Requests by route and status.", ["route", "status"])
        self.events = self._counter("tidemill_gateway_events", "Events by API key and status.", ["key", "status"])
        self.acknowledged = self._seconds(
            "tidemill_gateway_acknowledge_seconds",
            "From an event's or a batch's check to the log's acknowledgement.",
            wide,
        )
        self._gauge("tidemill_gateway_pending", "Events that wait for the log.").set_function(pending)
