"""The network between one role and the brokers, which can be cut.

Each role reaches the brokers at its own loopback address, where a link listens on the brokers' ports. A broker answers
metadata requests with its own address; in every answer, the link replaces this address by its own, which has the same
length, so that a client never learns the broker's address. While a link is cut, no data passes in either direction and
the connections stay open, as when packets are lost; afterwards the delayed data is sent, as with TCP.

Only Linux assigns the whole of 127.0.0.0/8 to the loopback interface by default.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from tidemill.compose.stack.config import HOST

LENGTH = struct.Struct(">I")
PORT = struct.Struct(">I")
CHUNK = 1 << 16
MOST_LINKS = 98
"""Addresses from 127.0.0.2 to 127.0.9.9 with one digit in each place are as long as the brokers' address, so that an
answer keeps its length."""


def own_address(number: int) -> str:
    """Return the loopback address of link `number`. Raises ValueError beyond the last."""
    if not 0 <= number < MOST_LINKS:
        raise ValueError(f"link {number}: there are addresses for {MOST_LINKS} links")
    third, fourth = divmod(number + 2, 10)
    return f"127.0.{third}.{fourth}"


def readdressed(answer: bytes, ports: Sequence[int], address: str) -> bytes:
    """Return a broker's answer with `address` instead of the brokers' address, before each of their ports."""
    for port in ports:
        tail = PORT.pack(port)
        answer = answer.replace(HOST.encode() + tail, address.encode() + tail)
    return answer


class Link:
    """The connection of one role to the brokers. Its methods run on the loop of `Links`."""

    def __init__(self, address: str, ports: Sequence[int]) -> None:
        self.address = address
        self._ports = tuple(ports)
        self._open = asyncio.Event()
        self._open.set()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Accept connections. Raises OSError if the address cannot be bound."""
        for port in self._ports:
            self._servers.append(await asyncio.start_server(self._accept(port), self.address, port))

    def cut(self) -> None:
        """Stop all data in both directions."""
        self._open.clear()

    def heal(self) -> None:
        """Let data pass again, delayed data first."""
        self._open.set()

    async def close(self) -> None:
        """Release the addresses."""
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            # A killed role or broker resets its connections; these tests do that on purpose.
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._connect(port, reader, writer)
            self._tasks.discard(task)
            writer.close()

        return serve

    async def _connect(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        broker_reader, broker_writer = await asyncio.open_connection(HOST, port)
        pumps = {
            asyncio.create_task(self._requests(reader, broker_writer)),
            asyncio.create_task(self._answers(broker_reader, writer)),
        }
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in done:
                pump.result()
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            broker_writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            await self._open.wait()
            writer.write(data)
            await writer.drain()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readexactly(LENGTH.size)
            answer = await reader.readexactly(LENGTH.unpack(head)[0])
            await self._open.wait()
            writer.write(head + readdressed(answer, self._ports, self.address))
            await writer.drain()


class Links:
    """The links of all roles, on one separate thread.

    Args:
        ports: of the brokers.
        roles: names, at most `MOST_LINKS`.
    """

    def __init__(self, ports: Sequence[int], roles: Sequence[str]) -> None:
        self._ports, self._roles = tuple(ports), tuple(roles)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos-links", daemon=True)
        self._links: dict[str, Link] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        self._await(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._await(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def bootstrap(self, role: str) -> str:
        """Return the addresses at which a role reaches the brokers."""
        return ",".join(f"{self._links[role].address}:{port}" for port in self._ports)

    def cut(self, role: str) -> None:
        """Cut a role off from every broker."""
        self._loop.call_soon_threadsafe(self._links[role].cut)

    def heal(self, role: str) -> None:
        """Undo `cut`."""
        self._loop.call_soon_threadsafe(self._links[role].heal)

    async def _listen(self) -> None:
        for number, role in enumerate(self._roles):
            self._links[role] = Link(own_address(number), self._ports)
            await self._links[role].listen()

    async def _close(self) -> None:
        for link in self._links.values():
            await link.close()

    def _await(self, coroutine: Coroutine[Any, Any, None]) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        future.result(60)
