"""Effect on good clients of the feedback gateway of many clients that send nothing or slowly, one JSON line per figure.

    python tests/bench/bench_idle_sockets.py [--sockets 2000] [--seconds 10] [--bootstrap HOST:PORT]

The gateway's application runs on uvicorn's own protocol with a limit of 512 connections (`plain`, the baseline) and on
Tidemill's with its default settings (`bounded`), each without other sockets and with `--sockets` of them from the same
address: a third sends nothing, a third a header and a third a body, one byte a second. A closed client reconnects after
5 s. Half of the good clients keep their connection, half open one for each request; each sends an event and then waits
50 ms. `answered` and `failed` count their requests, `p50_ms` and `p99_ms` are of those answered with 202.

Gateway, sockets and good clients are one process each and share the machine's processors.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event

import aiohttp
import uvicorn
from measuring import scratch_log
from pydantic import SecretStr

from tests.waiting import until_up
from tidemill.compose.stack.process import pick_ports
from tidemill.producers.config import GatewaySettings
from tidemill.producers.edge.gateway import application
from tidemill.producers.product.settings import ProductSettings
from tidemill.producers.product.signing import Pseudonyms, Signer
from tidemill.schemas.config import HttpSettings, KafkaSettings
from tidemill.schemas.http_connections import bind
from tidemill.schemas.http_server import BoundedConfig
from tidemill.schemas.log.admin import create_topics

SPAWN = multiprocessing.get_context("spawn")
KEY = "k" * 64
PRODUCT = ProductSettings(signing_keys=(SecretStr("s" * 32),), pseudonym_key=SecretStr("p" * 32))
USER = "ann@example.com"
PLAIN_CONNECTIONS = 512
CLIENTS = 8
REST_S = 0.05
BYTE_EVERY_S = 1.0
AGAIN_S = 5.0
START_S = 60.0
GRACE_S = 5
HEAD = (
    f"POST /v1/feedback HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    "content-type: application/json\r\ncontent-length: 1000\r\n"
).encode()
BEGINNINGS = (b"", HEAD + b"x: ", HEAD + b"\r\n")
"""First bytes of each third of the sockets; the last two continue byte by byte."""


def serve(kafka: KafkaSettings, kind: str, port: int) -> None:
    """Run the gateway until a signal."""
    settings = GatewaySettings(
        port=port, api_keys={"bench": hashlib.sha256(KEY.encode()).hexdigest()}, user_rate=1e9, user_burst=10**9,
        key_rate=1e9, key_burst=10**9, acknowledge_timeout_s=START_S,
    )  # fmt: skip
    app = application(kafka, PRODUCT, settings)
    config: uvicorn.Config = BoundedConfig(app, HttpSettings(), lifespan="on", grace_s=GRACE_S)
    if kind == "plain":
        config = uvicorn.Config(
            app, log_level="error", access_log=False, limit_concurrency=PLAIN_CONNECTIONS,
            timeout_graceful_shutdown=GRACE_S,
        )  # fmt: skip
    with bind("127.0.0.1", port, "gateway.port", 512) as listener:
        uvicorn.Server(config).run(sockets=[listener])


async def hold(port: int, sockets: int, held: Event) -> None:
    """Run the clients that send nothing or slowly; set `held` when each has connected once."""
    begun, all_begun = 0, asyncio.Event()

    async def one(number: int) -> None:
        nonlocal begun
        sent = BEGINNINGS[number % len(BEGINNINGS)]
        first = True
        while True:
            writer = None
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                if first:
                    first, begun = False, begun + 1
                    if begun == sockets:
                        all_begun.set()
                while True:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(1 << 16), BYTE_EVERY_S)
                        break
                    writer.write(b"y" if sent else b"")
            if writer is not None:
                writer.close()
            await asyncio.sleep(AGAIN_S)

    tasks = [asyncio.create_task(one(number)) for number in range(sockets)]
    await asyncio.wait_for(all_begun.wait(), START_S)
    held.set()
    await asyncio.gather(*tasks)


def hold_sockets(port: int, sockets: int, held: Event) -> None:
    """Run `hold` in a process."""
    asyncio.run(hold(port, sockets, held))


async def ask(url: str, seconds: float) -> tuple[list[float], int]:
    """Run the good clients; return the seconds of each answer with 202, and the number of other requests."""
    token = Signer(PRODUCT).sign("i-1", Pseudonyms(PRODUCT).of(USER))
    took: list[float] = []
    failed = 0
    end = time.monotonic() + seconds

    async def client(number: int) -> None:
        nonlocal failed
        kept = aiohttp.TCPConnector(force_close=number % 2 == 1)
        headers = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(connector=kept, headers=headers) as session:
            count = 0
            while time.monotonic() < end:
                count += 1
                body = {
                    "interaction": token,
                    "kind": "thumb",
                    "value": 1,
                    "user": USER,
                    "event_id": f"{number}-{count}",
                }
                began = time.monotonic()
                try:
                    async with session.post(f"{url}/v1/feedback", json=body) as answer:
                        await answer.read()
                        status = answer.status
                except aiohttp.ClientError:
                    status = 0
                if status == 202:
                    took.append(time.monotonic() - began)
                else:
                    failed += 1
                await asyncio.sleep(REST_S)

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return took, failed


@contextmanager
def child(work: Callable[..., None], *arguments: object) -> Iterator[SpawnProcess]:
    """Call a function in its own process within the context."""
    process = SPAWN.Process(target=work, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def measure(kafka: KafkaSettings, kind: str, sockets: int, seconds: float) -> dict[str, object]:
    (port,) = pick_ports(1, base_port=0)
    url = f"http://127.0.0.1:{port}"
    with child(serve, kafka, kind, port) as gateway:
        until_up(f"{url}/healthz", gateway.is_alive)
        asyncio.run(ask(url, 1.0))
        if sockets:
            held = SPAWN.Event()
            with child(hold_sockets, port, sockets, held):
                assert held.wait(2 * START_S), "not every socket was opened"
                took, failed = asyncio.run(ask(url, seconds))
        else:
            took, failed = asyncio.run(ask(url, seconds))
    took.sort()
    line: dict[str, object] = {"figure": kind, "sockets": sockets, "answered": len(took), "failed": failed}
    if took:
        line["p50_ms"] = round(1000 * took[len(took) // 2], 1)
        line["p99_ms"] = round(1000 * took[len(took) * 99 // 100], 1)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", default="", help="Kafka's address; default: a broker of its own")
    parser.add_argument("--sockets", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each figure")
    arguments = parser.parse_args()
    with scratch_log(arguments.bootstrap) as (bootstrap, _):
        kafka = KafkaSettings(bootstrap=bootstrap, topic_prefix=f"bench{os.getpid()}.")
        create_topics(kafka)
        for kind in ("plain", "bounded"):
            for sockets in (0, arguments.sockets):
                print(json.dumps(measure(kafka, kind, sockets, arguments.seconds)), flush=True)


if __name__ == "__main__":
    main()
