"""The router's figures, in Prometheus' format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class RouterMetrics:
    """Counters of one router, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        self.responses = Counter("tidemill_router_responses", "Responses begun, by status.", ["status"], registry=own)
        self.interactions = Counter(
            "tidemill_router_interactions",
            "Interactions that the log acknowledged.",
            ["arm", "finish_reason"],
            registry=own,
        )
        self.unrecorded = Counter(
            "tidemill_router_unrecorded", "Answers that the log did not acknowledge, by what became of them.", ["end"],
            registry=own,
        )  # fmt: skip
        self.retries = Counter("tidemill_router_retries", "Requests that another replica was asked for.", registry=own)
        self.fallbacks = Counter(
            "tidemill_router_fallbacks", "Requests of the canary arm that the stable pool answered.", registry=own
        )
        self.in_flight = Gauge("tidemill_router_in_flight", "Requests in hand.", registry=own)
        self.share = Gauge("tidemill_router_canary_share", "Share of the users in the canary arm.", registry=own)
        self.first_token = Histogram(
            "tidemill_router_first_token_seconds", "From the request to its first token.", ["arm"], buckets=_SECONDS,
            registry=own,
        )  # fmt: skip
        self.acknowledgement = Histogram(
            "tidemill_router_acknowledgement_seconds", "Wait for the log at the end of an answer.", buckets=_SECONDS,
            registry=own,
        )  # fmt: skip

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)
