"""Users never notice an update: twenty versions are published and promoted while answers are streamed.

A stable replica and a router run as processes; clients stream one answer after the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.consumers import replica_driver as driver
from tests.consumers.replica_role import Acks, RoleProcess, Trainer
from tests.waiting import until_async, until_up
from tidemill.compose.stack.process import pick_ports
from tidemill.producers.product.settings import ProductSettings, key_hash
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import GateVerdict, Interaction

UPDATES = 20
CLIENTS = 4
KEY = "a-key-that-is-long-enough"
REPLICA = "replica-stable"
PRODUCT = ProductSettings.with_random_keys()
TOKENS = 48
"""Length of an answer."""
DEADLINE_S = 600.0


@contextmanager
def router(settings: KafkaSettings, root: Path, replica: str) -> Iterator[str]:
    """Run a process of `tidemill route` in front of one stable replica; yields its address."""
    (port,), log = pick_ports(1, base_port=0), root / "router.log"
    own = {
        **PRODUCT.environment(),
        "TIDEMILL_ROUTER__API_KEYS": json.dumps({"web": key_hash(KEY)}),
        "TIDEMILL_ROUTER__LOG_TIMEOUT_S": str(DEADLINE_S),
    }
    flags = ["--bootstrap", settings.bootstrap, "--topic-prefix", settings.topic_prefix, "--run-id",
             driver.RUN.run_id, "--port", str(port), "--stable", replica]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tidemill", "route", *flags], stderr=output, stdout=output, cwd=root,
            env={**os.environ, **own},
        )  # fmt: skip

    try:
        until_up(f"http://127.0.0.1:{port}/healthz", lambda: process.poll() is None, lambda: log.read_text()[-4000:])
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@dataclass
class Load:
    """Clients that stream one answer after the other, and their results."""

    failures: list[str] = field(default_factory=list)
    interactions: list[str] = field(default_factory=list)
    """Ids of the complete answers."""
    version: int = 0
    """The version that the replica serves."""
    answers: Counter[int] = field(default_factory=Counter)
    """Complete answers by the version that was served when they were requested."""
    ended: bool = False

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        """Send requests as one user until the load ends."""
        body = {"prompt": f"t{5 + number} t6 t7", "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
                "user": f"user-{number}"}  # fmt: skip
        while not self.ended:
            version = self.version
            try:
                await self._ask(session, body)
                self.answers[version] += 1
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {await response.text()}")
            token, ended = "", False
            async for line in response.content:
                if line.startswith(b"data: {"):
                    token = json.loads(line[6:]).get("tidemill", {}).get("interaction", token)
                ended = ended or line.startswith(b"data: [DONE]")
            if not (token and ended):
                raise ValueError("the answer broke off")
            self.interactions.append(token.partition(".")[0])

    async def answered(self, version: int) -> None:
        """Wait for an answer whose first token this version, which is served now, samples. Fails if one has failed."""
        self.version = version
        await until_async(lambda: self.failures or self.answers[version], "answers", DEADLINE_S)
        assert not self.failures


@pytest.mark.timeout(1500)
def test_twenty_updates_under_load_fail_no_request_and_every_answer_is_recorded(kafka, tmp_path):
    settings, load = kafka.fresh(), Load()
    with ExitStack() as stack:
        trainer, acks = Trainer(settings, tmp_path), Acks(settings)
        stack.callback(trainer.publisher.close)
        stack.enter_context(closing(acks))
        replica = RoleProcess(settings, tmp_path, REPLICA, pool="stable")
        stack.callback(replica.kill)
        acks.until_serving(0, REPLICA, deadline_s=DEADLINE_S)
        replica.status()
        address = stack.enter_context(router(settings, tmp_path, replica.address()))
        asyncio.run(update_under_load(address, trainer, acks, load))
    assert load.failures == []
    with LogReader(settings, [Topic.INTERACTIONS]) as reader:
        recorded = [located.record for located in reader.read_to_end() if isinstance(located.record, Interaction)]
    assert sorted({made.interaction_id for made in recorded}) == sorted(load.interactions)
    assert {(made.sampled_tokens, made.finish_reason, made.arm) for made in recorded} == {(TOKENS, "length", "stable")}
    assert all(made.segments[0].spans[-1].end - made.prompt_tokens == TOKENS for made in recorded)
    served = {span.version for made in recorded for span in made.segments[0].spans}
    assert served == set(range(UPDATES + 1))
    assert any(made.version_min < made.version_max for made in recorded), "no version changed within an answer"


async def update_under_load(address: str, trainer: Trainer, acks: Acks, load: Load) -> None:
    """Publish and promote versions one after the other while clients stream answers."""

    def update() -> None:
        trainer.step()
        trainer.decide(GateVerdict.PROMOTE, trainer.version)
        acks.until_serving(trainer.version, REPLICA, deadline_s=DEADLINE_S)

    headers, timeout = {"authorization": f"Bearer {KEY}"}, aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(address, headers=headers, timeout=timeout) as session:
        tasks = [asyncio.create_task(load.client(session, number)) for number in range(CLIENTS)]
        try:
            await load.answered(0)
            for _ in range(UPDATES):
                await asyncio.to_thread(update)
                await load.answered(trainer.version)
        finally:
            load.ended = True
            await asyncio.gather(*tasks)
