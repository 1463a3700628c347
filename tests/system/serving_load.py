"""A served model under product traffic: a stable replica and a router as processes, and clients that stream answers.

Used by the system test and by the benchmark of serving during updates.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.consumers import replica_driver as driver
from tests.consumers.replica_role import Acks, RoleProcess, Trainer
from tidemill.producers.product.settings import ProductSettings, key_hash
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import GateVerdict, Interaction

KEY = "a-key-that-is-long-enough"
REPLICA = "replica-stable"
PRODUCT = ProductSettings.with_random_keys()
TOKENS = 48
"""Length of an answer."""


class RouterProcess:
    """A process of `tidemill route` in front of one stable replica."""

    def __init__(self, settings: KafkaSettings, root: Path, replica: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.address, self._log = f"http://127.0.0.1:{port}", root / "router.log"
        secrets = {
            "TIDEMILL_PRODUCT__SIGNING_KEYS": json.dumps([key.get_secret_value() for key in PRODUCT.signing_keys]),
            "TIDEMILL_PRODUCT__PSEUDONYM_KEY": PRODUCT.pseudonym_key.get_secret_value(),
            "TIDEMILL_ROUTER__API_KEYS": json.dumps({"web": key_hash(KEY)}),
        }
        flags = ["--bootstrap", settings.bootstrap, "--topic-prefix", settings.topic_prefix, "--run-id",
                 driver.RUN.run_id, "--port", str(port), "--stable", replica]  # fmt: skip
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tidemill.compose.cli", "route", *flags], stderr=log, stdout=log, cwd=root,
                env={**os.environ, **secrets},
            )  # fmt: skip

    async def until_up(self, deadline_s: float = 400.0) -> None:
        """Wait until it answers. Raises TimeoutError with the end of its log."""
        end = time.monotonic() + deadline_s
        async with aiohttp.ClientSession(self.address) as session:
            while time.monotonic() < end and self.process.poll() is None:
                try:
                    async with session.get("/healthz") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)
        raise TimeoutError(self._log.read_text()[-4000:])

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.process.kill()
        self.process.wait()


@dataclass
class Load:
    """Clients that stream one answer after the other, and their measurements."""

    session: aiohttp.ClientSession
    phase: str = "quiet"
    """The phase under which gaps are counted now."""
    gaps_ms: dict[str, list[float]] = field(default_factory=dict)
    """Times between two tokens of an answer, by the phase in which they ended."""
    failures: list[str] = field(default_factory=list)
    interactions: list[str] = field(default_factory=list)
    """Ids of the complete answers."""
    ended: bool = False

    async def client(self, number: int) -> None:
        """Send requests as one user until the load ends."""
        while not self.ended:
            body = {"prompt": f"t{5 + number} t6 t7", "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
                    "user": f"user-{number}"}  # fmt: skip
            try:
                await self._ask(body)
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    async def _ask(self, body: dict[str, Any]) -> None:
        async with self.session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {await response.text()}")
            token, last, ended = "", 0.0, False
            async for line in response.content:
                if line.startswith(b"data: {"):
                    last = self._gap(last)
                    token = json.loads(line[6:]).get("tidemill", {}).get("interaction", token)
                ended = ended or line.startswith(b"data: [DONE]")
            if not (token and ended):
                raise ValueError("the answer broke off")
            self.interactions.append(token.partition(".")[0])

    def _gap(self, last: float) -> float:
        now = time.perf_counter()
        if last:
            self.gaps_ms.setdefault(self.phase, []).append(1e3 * (now - last))
        return now

    async def until(self, answers: int) -> None:
        """Wait until this many more answers are complete, or one has failed."""
        wanted = len(self.interactions) + answers
        while len(self.interactions) < wanted and not self.failures:
            await asyncio.sleep(0.01)


@dataclass
class Served:
    """The running parts: trainer, acknowledgements and load."""

    settings: KafkaSettings
    trainer: Trainer
    acks: Acks
    load: Load

    async def update(self) -> None:
        """Publish the next version, promote it, and wait until it is served."""

        def step() -> None:
            self.trainer.step()
            self.trainer.decide(GateVerdict.PROMOTE, self.trainer.version)
            self.acks.until_serving(self.trainer.version, REPLICA, deadline_s=240)

        await asyncio.to_thread(step)

    def recorded(self) -> list[Interaction]:
        """Return every interaction in the log."""
        with LogReader(self.settings, [Topic.INTERACTIONS]) as reader:
            return [located.record for located in reader.read_to_end() if isinstance(located.record, Interaction)]


@asynccontextmanager
async def serving(settings: KafkaSettings, root: Path, clients: int) -> AsyncIterator[Served]:
    """Run a trainer, a stable replica, a router and `clients` clients, which have received their first answers."""
    trainer = await asyncio.to_thread(Trainer, settings, root)
    acks, replica, router = Acks(settings), RoleProcess(settings, root, REPLICA, pool="stable"), None
    try:
        await asyncio.to_thread(acks.until_serving, 0, REPLICA, deadline_s=600)
        await asyncio.to_thread(replica.status)
        router = RouterProcess(settings, root, replica.address())
        await router.until_up()
        headers, timeout = {"authorization": f"Bearer {KEY}"}, aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(router.address, headers=headers, timeout=timeout) as session:
            load = Load(session, "before")
            tasks = [asyncio.create_task(load.client(number)) for number in range(clients)]
            await load.until(2 * clients)
            try:
                yield Served(settings, trainer, acks, load)
            finally:
                load.ended = True
                await asyncio.gather(*tasks)
    finally:
        if router is not None:
            router.kill()
        replica.kill()
        acks.close()
        trainer.publisher.close()
