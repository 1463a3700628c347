"""The address of a server: what is bound, and how connections to it behave."""

import asyncio
import socket
from contextlib import closing

import pytest

from tidemill.schemas.http_connections import bind


def test_connections_send_small_parts_at_once():
    async def scenario():
        found = asyncio.get_running_loop().create_future()

        async def accept(_reader, writer):
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with closing(bind("127.0.0.1", 0, "router.port")) as listener:
            async with await asyncio.start_server(accept, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                assert await asyncio.wait_for(found, 20)
                writer.close()

    asyncio.run(scenario())


def test_an_address_that_cannot_be_bound_is_named_with_its_setting():
    with (
        closing(bind("127.0.0.1", 0, "router.port", backlog=1)) as taken,
        pytest.raises(OSError, match=r"set router\.port"),
    ):
        bind("127.0.0.1", taken.getsockname()[1], "router.port")
    with pytest.raises(OSError, match=r"router\.host"):
        bind("no such host", 1, "router.port")
