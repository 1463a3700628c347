"""Whether brokers are ready, asked of the brokers themselves through the admin API."""

from __future__ import annotations

import time
from collections.abc import Callable

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tidemill.compose.stack.errors import BrokerFailed

REQUEST_TIMEOUT_S = 1.0


def brokers_online(bootstrap: str, timeout_s: float = REQUEST_TIMEOUT_S) -> frozenset[int]:
    """Node ids of the brokers that the cluster counts as alive; empty when nobody answers within `timeout_s`."""
    return _ask(_admin(bootstrap), timeout_s)


def wait_online(bootstrap: str, nodes: frozenset[int], timeout_s: float, check: Callable[[], None]) -> None:
    """Return when all of `nodes` are alive; `check` raises when waiting has become pointless.

    BrokerFailed after `timeout_s` seconds.
    """
    admin = _admin(bootstrap)
    deadline = time.monotonic() + timeout_s
    while not nodes <= (online := _ask(admin, REQUEST_TIMEOUT_S)):
        check()
        if time.monotonic() >= deadline:
            raise BrokerFailed(f"brokers {sorted(nodes - online)} are not ready after {timeout_s:.0f} s")


def _admin(bootstrap: str) -> AdminClient:
    # Refused connections are expected while a broker starts: no log lines, and quick new tries.
    options: dict[str, str | int | float] = {
        "bootstrap.servers": bootstrap,
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 200,
        "log_level": 0,
    }
    return AdminClient(options)


def _ask(admin: AdminClient, timeout_s: float) -> frozenset[int]:
    try:
        described = admin.describe_cluster(request_timeout=timeout_s).result(timeout_s + 1)
    except (KafkaException, TimeoutError):
        return frozenset()
    return frozenset(node.id for node in described.nodes)
