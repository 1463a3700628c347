"""Ports of the local stack, loopback only."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterable, Iterator

from tidemill.compose.stack.config import HOST
from tidemill.compose.stack.errors import BrokerPortTaken, StackError

# Below the range that Linux and macOS hand to outgoing connections, so that no client of anything sits on a broker's
# port when the broker comes back.
CHOICE = range(20_000, 32_000)
TRIES = 1000


def pick_ports(count: int, base_port: int) -> list[int]:
    """`count` ports: consecutive from `base_port`, or free ones when it is 0."""
    return list(range(base_port, base_port + count)) if base_port else _free_ports(count)


def check_free(ports: Iterable[int]) -> None:
    """PortTaken when something listens on one of the ports."""
    for port in ports:
        with _bind(port) as bound:
            if bound is None:
                raise BrokerPortTaken(
                    f"port {port} on {HOST} is in use by another program; stop that program, or choose other ports "
                    "with --port (0 picks free ones for a new --data-dir)"
                )


def _free_ports(count: int) -> list[int]:
    chosen: list[int] = []
    with contextlib.ExitStack() as held:
        for _ in range(TRIES):
            port = random.SystemRandom().choice(CHOICE)
            if port not in chosen and held.enter_context(_bind(port)) is not None:
                chosen.append(port)
            if len(chosen) == count:
                return chosen
    raise StackError(f"no {count} free ports on {HOST} between {CHOICE.start} and {CHOICE.stop}; give --port")


@contextlib.contextmanager
def _bind(port: int) -> Iterator[socket.socket | None]:
    """A socket bound to the port, or None when it is taken."""
    with socket.socket() as candidate:
        # Connections of an earlier broker in TIME_WAIT do not count; a listener does.
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((HOST, port))
        except OSError:
            yield None
        else:
            yield candidate
