"""The counts of the router and of the gateway, in Prometheus' text format.

Labels come from fixed sets and from configured names, so that clients cannot create series.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class RouterMetrics(CollectorRegistry):
    """The metrics of the router."""

    def __init__(self) -> None:
        super().__init__()
        wide = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
        self.responses = Counter("tidemill_router_responses", "Responses begun, by status.", ["status"], registry=self)
        self.interactions = Counter(
            "tidemill_router_interactions", "Interactions that the log acknowledged.", ["arm", "finish_reason"],
            registry=self,
        )  # fmt: skip
        self.unrecorded = Counter(
            "tidemill_router_unrecorded", "Answers that the log did not acknowledge, by result.", ["end"],
            registry=self,
        )  # fmt: skip
        self.retries = Counter("tidemill_router_retries", "Requests that were sent to another replica.", registry=self)
        self.fallbacks = Counter(
            "tidemill_router_fallbacks", "Requests of the canary arm that the stable pool answered.", registry=self
        )
        self.in_flight = Gauge("tidemill_router_in_flight", "Unfinished requests.", registry=self)
        self.share = Gauge("tidemill_router_canary_share", "Share of the users in the canary arm.", registry=self)
        self.first_token = Histogram(
            "tidemill_router_first_token_seconds", "From the request to its first token.", ["arm"],
            buckets=wide, registry=self,
        )  # fmt: skip
        self.acknowledgement = Histogram(
            "tidemill_router_acknowledgement_seconds", "Wait for the log at the end of an answer.",
            buckets=wide, registry=self,
        )  # fmt: skip


class GatewayMetrics(CollectorRegistry):
    """The metrics of the gateway."""

    def __init__(self, pending: Callable[[], float]) -> None:
        """`pending`: the number of events that wait for the log's acknowledgement."""
        super().__init__()
        wide = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
        self.requests = Counter(
            "tidemill_gateway_requests", "Requests by route and status.", ["route", "status"], registry=self
        )
        self.events = Counter(
            "tidemill_gateway_events", "Events by API key and status.", ["key", "status"], registry=self
        )
        self.acknowledged = Histogram(
            "tidemill_gateway_acknowledge_seconds", "From an event's or a batch's check to the log's acknowledgement.",
            buckets=wide, registry=self,
        )  # fmt: skip
        waiting = Gauge("tidemill_gateway_pending", "Events that wait for the log.", registry=self)
        waiting.set_function(pending)
