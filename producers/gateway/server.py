"""The gateway's process: a server in a thread that is stopped by closing its door, finishing what is inside, and
flushing what the log has not acknowledged."""

from __future__ import annotations

import logging
import threading

from tidemill.producers.gateway.app import application
from tidemill.producers.gateway.config import GatewaySettings
from tidemill.producers.product.settings import ProductSettings
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.http_room import bind
from tidemill.schemas.http_server import BoundedConfig, ThreadServer
from tidemill.schemas.shutdown import stop_on_signals

log = logging.getLogger(__name__)

GRACE_S = 5
BACKLOG = 512


def gateway_server(kafka: KafkaSettings, product: ProductSettings, settings: GatewaySettings) -> ThreadServer:
    """The gateway, to be entered.

    Raises:
        KeysMissing, ValueError: as `application`.
        PortTaken: the address cannot be bound.
    """
    app = application(kafka, product, settings)
    listener = bind(settings.host, settings.port, "gateway.port", BACKLOG)
    grace_s = settings.acknowledge_timeout_s + GRACE_S
    return ThreadServer("gateway-http", listener, BoundedConfig(app, settings.http, lifespan="on", grace_s=grace_s))


def run(
    kafka: KafkaSettings, product: ProductSettings, settings: GatewaySettings, stop: threading.Event | None = None
) -> None:
    """Take feedback until `stop` is set (without one: SIGTERM or SIGINT comes); then finish the answers, and flush.

    Raises:
        KeysMissing, ValueError, PortTaken: as `gateway_server`.
        RuntimeError: the server ended by itself; its log says why.
    """
    stop = stop or stop_on_signals()
    with gateway_server(kafka, product, settings) as server:
        log.info("gateway at %s (API page /docs), for %s", server.url, ", ".join(sorted(settings.api_keys)))
        server.watch(stop)
