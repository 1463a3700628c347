"""The HTTP endpoint's thread: bound before it is announced, stopped before the engine closes."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import uvicorn

from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import Reader
from tidemill.consumers.sink.http_api import application

LOOPBACK = "127.0.0.1"
GRACE_S = 5


class PortTaken(OSError):
    """The HTTP port cannot be bound."""


def bind(port: int) -> socket.socket:
    """A listening loopback socket; port 0 lets the system choose. Raises PortTaken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise PortTaken(
            f"port {port} of {LOOPBACK} is not to be had ({error.strerror}): stop who holds it, or set sink.http_port "
            "to another one (0 takes a free one)"
        ) from error
    return listener


class QueryServer:
    """Serves queries from a thread while it is entered as a context."""

    def __init__(self, settings: SinkSettings) -> None:
        self._listener = bind(settings.http_port)
        self._executor = ThreadPoolExecutor(settings.query_threads, thread_name_prefix="sink-query")
        config = uvicorn.Config(
            application(Reader(settings), self._executor),
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="sink-http", daemon=True)

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{LOOPBACK}:{self._listener.getsockname()[1]}"

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
        # The engine must outlive the queries that run in it; their time is bounded by `query_seconds`.
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._listener.close()
