"""The gateway's process: a server in a thread that is stopped by closing its door, finishing what is inside, and
flushing what the log has not acknowledged."""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Self

import uvicorn

from tidemill.producers.gateway.app import application
from tidemill.producers.gateway.config import GatewaySettings
from tidemill.producers.product.settings import ProductSettings
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.http_room import bind
from tidemill.schemas.http_server import BoundedConfig
from tidemill.schemas.shutdown import stop_on_signals

log = logging.getLogger(__name__)

WATCH_S = 0.5
GRACE_S = 5
BACKLOG = 512


class GatewayServer:
    """Serves from a thread while it is entered as a context.

    Raises:
        KeysMissing, ValueError: as `application`.
        PortTaken: the address cannot be bound.
    """

    def __init__(self, kafka: KafkaSettings, product: ProductSettings, settings: GatewaySettings) -> None:
        app = application(kafka, product, settings)
        self._listener = bind(settings.host, settings.port, "gateway.port", BACKLOG)
        grace_s = settings.acknowledge_timeout_s + GRACE_S
        config = BoundedConfig(app, settings.http, lifespan="on", grace_s=grace_s)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="gateway-http", daemon=True)

    @property
    def url(self) -> str:
        """Where it answers."""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def alive(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive()

    def _serve(self) -> None:
        self._server.run(sockets=[self._listener])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


def run(
    kafka: KafkaSettings, product: ProductSettings, settings: GatewaySettings, stop: threading.Event | None = None
) -> None:
    """Take feedback until `stop` is set (without one: SIGTERM or SIGINT comes); then finish the answers, and flush.

    Raises:
        KeysMissing, ValueError, PortTaken: as `GatewayServer`.
        RuntimeError: the server ended by itself; its log says why.
    """
    stop = stop or stop_on_signals()
    with GatewayServer(kafka, product, settings) as server:
        log.info("gateway at %s (API page /docs), for %s", server.url, ", ".join(sorted(settings.api_keys)))
        while not stop.wait(WATCH_S):
            if not server.alive:
                raise RuntimeError("the gateway's server ended by itself")
