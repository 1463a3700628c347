"""The address of a server, taken before anything that takes time or speaks to others."""

from __future__ import annotations

import socket


class PortTaken(OSError):
    """An address cannot be bound."""


def bind(host: str, port: int, setting: str, backlog: int | None = None) -> socket.socket:
    """A socket bound to an address; port 0 lets the system choose.

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
