"""uvicorn with limits, so that clients that send nothing, little or slowly do not affect other clients.

uvicorn waits without limit for a header, for a body, and for a client to read its answer, and counts silent connections
like active ones. Its `http` setting accepts a protocol class: the one below is uvicorn's own, with deadlines and an
entry in a `ConnectionTable`. All servers that Tidemill starts with uvicorn use this configuration.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Literal, Self

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from tidemill.schemas.config import HttpSettings
from tidemill.schemas.http_connections import ConnectionTable

_WATCH_S = 0.2


class BoundedConfig(uvicorn.Config):
    """uvicorn's configuration for one server.

    Args:
        app: the ASGI application.
        settings: limits on its clients' connections.
        lifespan: uvicorn's setting of this name: whether the application gets startup and shutdown events.
        grace_s: seconds that unfinished answers get to finish on shutdown.
    """

    def __init__(
        self, app: ASGIApp, settings: HttpSettings, *, lifespan: Literal["auto", "on", "off"], grace_s: float
    ) -> None:
        super().__init__(
            app,
            http=BoundedProtocol,
            # A WebSocket would leave the protocol class below, and with it all limits. No application here uses it.
            ws="none",
            lifespan=lifespan,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=settings.idle_timeout_s,
            timeout_graceful_shutdown=round(grace_s),
        )
        self.settings = settings
        self.room = ConnectionTable(settings)


class ThreadServer:
    """A context manager that runs a server in a separate thread. Its exit waits for unfinished answers.

    Args:
        name: name of the thread.
        listener: a bound socket, closed at the exit.
    """

    def __init__(self, name: str, listener: socket.socket, config: BoundedConfig) -> None:
        self._listener, self._server = listener, uvicorn.Server(config)
        served = {"sockets": [listener]}
        self._thread = threading.Thread(target=self._server.run, name=name, kwargs=served, daemon=True)

    @property
    def url(self) -> str:
        """The address at which it answers."""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def watch(self, stop: threading.Event) -> None:
        """Wait until `stop` is set. Raises RuntimeError if the server ends by itself."""
        while not stop.wait(_WATCH_S):
            if not self._thread.is_alive():
                raise RuntimeError(f"{self._thread.name}: the server ended by itself; its log says why")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


class _Phase(Enum):
    """The state of a connection."""

    HEADER = auto()
    """The header of a request has not arrived, or only a part of it."""
    BODY = auto()
    """The header has arrived, the body has not."""
    ANSWER = auto()
    """A whole request has arrived. The time of the answer is not limited here."""
    IDLE = auto()
    """The request is answered, and nothing has arrived since."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection, with a deadline for everything that its client must do."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, BoundedConfig)
        self._settings, self._room = config.settings, config.room
        self._phase = _Phase.HEADER
        self._beside_body = 0
        self._unsent = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._reading_deadline: asyncio.TimerHandle | None = None
        """Timer that ends when the client must have read a part of its answer."""

    @property
    def client_is_late(self) -> bool:
        """Whether a waiting connection waits only for data from its client."""
        return not self.flow.read_paused and not self.transport.get_write_buffer_size()

    def close_for_another(self) -> None:
        """Close the connection, to make room for another one."""
        self._end("the limit on connections was reached, and it had waited longest for its client")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Register a client that has connected."""
        super().connection_made(transport)
        self._room.enter(self, self.client[0] if self.client else "")
        self._enter(_Phase.HEADER)
        self._room.fits(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after the end of the connection, on either side."""
        for timer in (self._deadline, self._reading_deadline):
            if timer is not None:
                timer.cancel()
        self._room.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process a part of a request, or parts of several."""
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEADER)
        self._beside_body += len(data)
        super().data_received(data)
        if self._beside_body > self._settings.max_header_bytes and not self.transport.is_closing():
            too_long = f"the request has more than {self._settings.max_header_bytes} bytes outside its body"
            self._end(too_long, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        """Start to wait for the body: the parser has read a header."""
        behind_another = self.cycle is not None and not self.cycle.response_complete
        if not behind_another:
            self._enter(_Phase.BODY)
            if not self._room.fits(self):
                self.app = service_unavailable
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Process a part of a body that the parser has read."""
        # Each body byte is subtracted twice: for itself, and for one byte of chunk lengths.
        self._beside_body -= 2 * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Start to wait for the answer: the parser has read a whole request."""
        self._beside_body = 0
        super().on_message_complete()
        if self.cycle.response_complete:
            self._enter(_Phase.IDLE)
        else:
            self._enter(_Phase.ANSWER)

    def on_response_complete(self) -> None:
        """Start to wait for the next request: the application has returned the whole answer."""
        super().on_response_complete()
        if not self.cycle.response_complete:
            # The next request had arrived before this one was answered.
            self._enter(_Phase.BODY if self.cycle.more_body else _Phase.ANSWER)
        elif self._phase is _Phase.ANSWER:
            self._enter(_Phase.IDLE)

    def pause_writing(self) -> None:
        """Start the read deadline: the client reads more slowly than the application writes."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """Stop the read deadline: the client has read most of the data that was ready."""
        super().resume_writing()
        if self._reading_deadline is not None:
            self._reading_deadline.cancel()
            self._reading_deadline = None

    def _enter(self, phase: _Phase) -> None:
        settings, self._phase = self._settings, phase
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if phase is _Phase.ANSWER:
            self._room.answer(self)
            return
        self._room.wait(self)
        allowed_s = {
            _Phase.HEADER: settings.header_timeout_s,
            _Phase.BODY: settings.body_timeout_s,
            _Phase.IDLE: settings.idle_timeout_s,
        }
        self._deadline = self.loop.call_later(allowed_s[phase], self._expire)

    def _expire(self) -> None:
        settings = self._settings
        if self._phase is _Phase.IDLE:
            self.transport.close()
            self._expect_reading()
        elif self._phase is _Phase.HEADER:
            late = f"the header did not arrive within {settings.header_timeout_s:g} s"
            # A client that has sent nothing has requested nothing.
            self._end(late, HTTPStatus.REQUEST_TIMEOUT if self._beside_body else None)
        elif self.flow.read_paused:
            # The application does not read the data that has arrived: the client is not late.
            self._enter(_Phase.BODY)
        else:
            self._end(f"the body did not arrive within {settings.body_timeout_s:g} s", HTTPStatus.REQUEST_TIMEOUT)

    def _expect_reading(self) -> None:
        if self._reading_deadline is not None:
            self._reading_deadline.cancel()
        self._unsent = self.transport.get_write_buffer_size()
        if self._unsent:
            self._reading_deadline = self.loop.call_later(self._settings.unread_timeout_s, self._check_reading)

    def _check_reading(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent:
            self._expect_reading()
        else:
            self._end(f"the client read nothing of its answer for {self._settings.unread_timeout_s:g} s")

    def _end(self, why: str, status: HTTPStatus | None = None) -> None:
        """Close the connection. If its request has no answer yet, send the status with the reason first."""
        self._room.leave(self)
        self._room.log_closed(self.client, why)
        in_answer = self._phase is _Phase.ANSWER or (self._phase is _Phase.BODY and self.cycle.response_started)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()
            return
        if status is not None and not in_answer:
            problem = json.dumps({"title": status.phrase, "status": status, "detail": why}).encode()
            head = (
                f"HTTP/1.1 {status} {status.phrase}\r\ncontent-type: application/problem+json\r\n"
                f"content-length: {len(problem)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + problem)
        self.transport.close()
