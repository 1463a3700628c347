"""The address of an HTTP server, and the limit on its open connections.

Clients that send nothing use connections, whose number is limited. For a new connection beyond the limit, the one that
has waited longest for its client is closed. A request that has arrived keeps its connection until it is answered.
"""

from __future__ import annotations

import logging
import resource
import socket
import time
from collections import Counter
from ipaddress import IPv6Address, ip_address
from typing import Protocol

from tidemill.schemas.config import HttpSettings


def bind(host: str, port: int, setting: str, backlog: int | None = None) -> socket.socket:
    """Return a socket bound to an address; with port 0 the system chooses. Call it before slow or external work.

    With a `backlog` it listens, and up to so many clients wait until they are served; without, clients are refused
    until a server listens. `setting` is the name of the port's setting, whose section also has a `host`.

    Raises OSError, which names the address and the setting to change.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sends small parts without delay only if the protocol is given: otherwise a second part waits 40 ms
        # for the acknowledgement of the first.
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        section = setting.partition(".")[0]
        raise OSError(f"{section}.host {host!r} is not an address of this machine ({error.strerror})") from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        if backlog is not None:
            bound.listen(backlog)
    except OSError as error:
        bound.close()
        raise OSError(
            f"{host}:{port} cannot be used ({error.strerror}): stop the process that holds it, or set {setting} "
            "to another port (0 takes a free one)"
        ) from error
    return bound


LOG = logging.getLogger(__name__)
OTHER_FILES = 128
"""Number of files that a process opens in addition to its clients' connections."""
WARN_EVERY_S = 60.0
_NETWORK_BYTES = 8
"""Length of the address of a /64 network: the owner of one IPv6 address has the whole network."""


class Connection(Protocol):
    """A client's connection, as the connection table uses it."""

    @property
    def client_is_late(self) -> bool:
        """Whether a waiting connection waits only for data from its client."""

    def close_for_another(self) -> None:
        """Close the connection, to make room for another one."""


def client_of(address: str) -> str:
    """Return the key by which connections are counted: an IPv4 address, an IPv6 network, or the text if neither."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or found.packed[:_NETWORK_BYTES].hex())
    return address


class ConnectionTable:
    """The connections of one server, used by one thread."""

    def __init__(self, settings: HttpSettings) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limited = files != resource.RLIM_INFINITY
        self._most = min(settings.max_connections, max(1, files - OTHER_FILES)) if limited else settings.max_connections
        self._most_of_client = settings.max_client_connections
        self._clients: dict[Connection, str] = {}
        self._counts: Counter[str] = Counter()
        self._waiting: dict[Connection, None] = {}
        """Ordered by the start of the wait."""
        self._closed = 0
        self._warned_at = float("-inf")

    def enter(self, connection: Connection, address: str) -> None:
        """Add the connection of a client that has connected."""
        client = self._clients[connection] = client_of(address)
        self._counts[client] += 1

    def leave(self, connection: Connection) -> None:
        """Remove a connection that has ended. A second call has no effect."""
        self._waiting.pop(connection, None)
        client = self._clients.pop(connection, None)
        if client is not None:
            self._counts[client] -= 1
            if not self._counts[client]:
                del self._counts[client]

    def wait(self, connection: Connection) -> None:
        """Record that a connection now waits for data from its client."""
        self._waiting.pop(connection, None)
        if connection in self._clients:
            self._waiting[connection] = None

    def answer(self, connection: Connection) -> None:
        """Record that a connection has received a whole request."""
        self._waiting.pop(connection, None)

    def fits(self, connection: Connection) -> bool:
        """Return whether a connection is within the limits, after closing a waiting connection if it was not."""
        client = self._clients.get(connection)
        if client is None:
            return False
        if self._counts[client] > self._most_of_client:
            self._make_way(connection, client)
        if len(self._clients) > self._most:
            self._make_way(connection, None)
        return self._counts[client] <= self._most_of_client and len(self._clients) <= self._most

    def _make_way(self, newcomer: Connection, client: str | None) -> None:
        for waiting in self._waiting:
            if waiting is not newcomer and client in (None, self._clients[waiting]) and waiting.client_is_late:
                self.leave(waiting)
                waiting.close_for_another()
                return

    def log_closed(self, client: object, why: str) -> None:
        """Log that a client's connection was closed, at most once in `WARN_EVERY_S`."""
        self._closed += 1
        now = time.monotonic()
        if now - self._warned_at >= WARN_EVERY_S:
            LOG.warning("%d connections closed since the last warning; the last, of %s: %s", self._closed, client, why)
            self._closed, self._warned_at = 0, now
