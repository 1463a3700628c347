"""The address of a server, who is connected to it over HTTP, and who gives way to whom.

Clients that send nothing cost places, and places are few. A connection that waits for its client gives way to a
newcomer, the longest wait first; a request that has arrived keeps its place until it is answered.
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


class PortTaken(OSError):
    """An address cannot be bound."""


def bind(host: str, port: int, setting: str, backlog: int | None = None) -> socket.socket:
    """A socket bound to an address, before anything that takes time or speaks to others; port 0 lets the system choose.

    With a `backlog` it listens, and so many clients may wait until they are served; without, they are refused until
    a server listens. `setting` is the name of the setting of the port, beside which its section has a `host`.

    Raises PortTaken, naming the address and the setting to change.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sends small parts at once only where the protocol is named: else a second one waits 40 ms for an
        # acknowledgement of the first.
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        section = setting.partition(".")[0]
        raise PortTaken(f"{section}.host {host!r} is no address of this machine ({error.strerror})") from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        if backlog is not None:
            bound.listen(backlog)
    except OSError as error:
        bound.close()
        raise PortTaken(
            f"{host}:{port} cannot be used ({error.strerror}): stop the process that holds it, or set {setting} "
            "to another port (0 takes a free one)"
        ) from error
    return bound


LOG = logging.getLogger(__name__)
OTHER_FILES = 128
"""Files that a process opens beside its clients' connections."""
TELL_EVERY_S = 60.0
_NETWORK_BYTES = 8
"""An owner of one IPv6 address has its /64 network."""


class Connection(Protocol):
    """A client's connection, as the room sees it."""

    @property
    def client_is_late(self) -> bool:
        """Whether a connection that waits does so for nothing but what its client sends."""

    def close_for_another(self) -> None:
        """Close, for another one's sake."""


def client_of(address: str) -> str:
    """Whose connections are counted together: an IPv4 address, an IPv6 network, or what is no address."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or found.packed[:_NETWORK_BYTES].hex())
    return address


class ConnectionTable:
    """The connections of one server, from one thread."""

    def __init__(self, settings: HttpSettings) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limited = files != resource.RLIM_INFINITY
        self._most = min(settings.max_connections, max(1, files - OTHER_FILES)) if limited else settings.max_connections
        self._most_of_client = settings.max_client_connections
        self._clients: dict[Connection, str] = {}
        self._counts: Counter[str] = Counter()
        self._waiting: dict[Connection, None] = {}
        """In the order in which they began to wait."""
        self._closed = 0
        self._told_at = float("-inf")

    def enter(self, connection: Connection, address: str) -> None:
        """A client has connected."""
        client = self._clients[connection] = client_of(address)
        self._counts[client] += 1

    def leave(self, connection: Connection) -> None:
        """A connection has ended; said twice, it counts once."""
        self._waiting.pop(connection, None)
        client = self._clients.pop(connection, None)
        if client is not None:
            self._counts[client] -= 1
            if not self._counts[client]:
                del self._counts[client]

    def wait(self, connection: Connection) -> None:
        """A connection waits from now on for what its client sends."""
        self._waiting.pop(connection, None)
        if connection in self._clients:
            self._waiting[connection] = None

    def answer(self, connection: Connection) -> None:
        """A connection has a whole request."""
        self._waiting.pop(connection, None)

    def fits(self, connection: Connection) -> bool:
        """Whether there is a place for a connection, one that waits having given way where there was none."""
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

    def tell(self, client: object, why: str) -> None:
        """Say that a client's connection was closed: at once, but not for each one of many."""
        self._closed += 1
        now = time.monotonic()
        if now - self._told_at >= TELL_EVERY_S:
            LOG.warning("connections closed since this was last said: %d; now one of %s: %s", self._closed, client, why)
            self._closed, self._told_at = 0, now
