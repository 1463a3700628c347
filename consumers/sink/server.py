"""The HTTP endpoint's thread: bound before it is announced, stopped before the engine closes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import uvicorn

from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import Reader
from tidemill.consumers.sink.http_api import application
from tidemill.schemas.http_room import bind
from tidemill.schemas.http_server import BoundedConfig

LOOPBACK = "127.0.0.1"
GRACE_S = 5
BACKLOG = 128


class QueryServer:
    """Serves queries from a thread while it is entered as a context."""

    def __init__(self, settings: SinkSettings) -> None:
        self._listener = bind(LOOPBACK, settings.http_port, "sink.http_port", BACKLOG)
        self._executor = ThreadPoolExecutor(settings.query_threads, thread_name_prefix="sink-query")
        app = application(Reader(settings), self._executor)
        config = BoundedConfig(app, settings.http, lifespan="off", grace_s=GRACE_S)
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
