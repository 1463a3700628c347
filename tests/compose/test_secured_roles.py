"""Every role as a process with a Kafka that uses TLS and SASL: a record in, a record out. Only vLLM is simulated.

The settings come as an operator would give them: the password in the environment, all others in a file.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import tomli_w
from aiohttp import web
from tokenizers import Tokenizer
from typer.testing import CliRunner

from tests.producers.conftest import FakeReplica
from tests.producers.feedback_support import PRODUCT
from tests.producers.router_support import FakeReplica as ProductReplica
from tests.producers.router_support import served
from tests.secured_log import PASSWORD, SecuredLog
from tests.streams.gate.gate_support import ack
from tests.waiting import until
from tidemill.compose.cli import app
from tidemill.compose.processes import TIDEMILL
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.query import read_state
from tidemill.producers.product.settings import key_hash
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.http_connections import bind
from tidemill.schemas.log.admin import create_topics
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Record, Tick

DEADLINE_S = 180.0
GRACE_S = 30.0
KEY = "a-key-that-is-long-enough"
RUN = RunSettings(run_id="secured")
KEYS = {
    **PRODUCT.environment(),
    "TIDEMILL_ROUTER__API_KEYS": json.dumps({"web": key_hash(KEY)}),
    "TIDEMILL_GATEWAY__API_KEYS": json.dumps({"shop": hashlib.sha256(KEY.encode()).hexdigest()}),
}
TINY: dict[str, Any] = {
    "run": {"run_id": RUN.run_id, "groups_per_step": 1, "max_steps": 2, "skip_no_signal": False},
    "corpus": {"documents": 40},
    "midtrain": {
        "steps": 1,
        "model": {"hidden_size": 32, "intermediate_size": 32, "layers": 1, "heads": 1, "kv_heads": 1},
        "tokenizer": {"vocab_size": 320},
    },
    "feed": {"group_size": 2, "eval_before": False, "eval_after": False},
    "stream": {"tick_interval_s": 0.2},
    "join": {
        "map": {"rules": {"thumb": {"horizon_s": DEADLINE_S, "weight": 1.0}}},
        "grace_s": 0.2,
        "settle_s": 0.1,
    },
    "batches": {"min_members": 1, "max_wait_s": 1.0},
    "sink": {"http_port": 0, "flush_seconds": 0.2},
}
"""The smallest run in which every role does one unit of work."""


LEARNER = """
import sys
from tidemill.compose.cli import app
for command in (["documents"], ["train", "--phase", "midtrain"], ["train"]):
    app([*command, *sys.argv[1:]], standalone_mode=False)
"""
"""The commands that make the model and train it, in a process that loads the libraries once."""


def password_variable(password: str) -> dict[str, str]:
    """Return the environment variable with the password of the log."""
    return {"TIDEMILL_KAFKA__CLIENT_OPTIONS": json.dumps({"sasl.password": password})}


@dataclass(frozen=True, slots=True)
class Role:
    """A process of `tidemill`, its output in a file."""

    process: subprocess.Popen[bytes]
    log: Path


@dataclass(frozen=True, slots=True)
class Site:
    """A run on the secured log: its settings file, and the processes that use it."""

    directory: Path
    kafka: KafkaSettings
    roles: dict[tuple[str, ...], Role] = field(default_factory=dict)

    def configure(self, **sections: dict[str, Any]) -> None:
        """Write the configuration file; `sections` are added to the smallest run's."""
        options = {name: value for name, value in self.kafka.client_options.items() if name != "sasl.password"}
        address = self.kafka.model_dump(include={"bootstrap", "topic_prefix", "partitions"})
        tree: dict[str, Any] = {
            **TINY,
            "kafka": {**address, "client_options": options},
            "store": {"root": str(self.directory / "store")},
            "trainer": {"model": str(self.directory / "model")},
        }
        places = {
            "midtrain": {"output": str(self.directory / "model")},
            "stream": {"data_dir": str(self.directory / "faust")},
            "sink": {"path": str(self.directory / "engine")},
        }
        for name, values in {**places, **sections}.items():
            tree[name] = {**tree.get(name, {}), **values}
        (self.directory / "tidemill.toml").write_text(tomli_w.dumps(tree))

    def start(self, *command: str, password: str = PASSWORD, program: Sequence[str] = TIDEMILL) -> None:
        """Start `tidemill COMMAND`, or another Python program with the same settings."""
        log = self.directory / f"{'-'.join(command) or 'learner'}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *program, *command, "--config", str(self.directory / "tidemill.toml")],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **KEYS, **password_variable(password), "OMP_NUM_THREADS": "1"},
            )
        self.roles[command] = Role(process, log)

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition; fail if a role fails."""

        def checked() -> Any:
            failed = [role.log.read_text() for role in self.roles.values() if role.process.poll()]
            assert not failed, failed[0]
            return condition()

        until(checked, what, DEADLINE_S)

    def first(self, topic: Topic) -> Any:
        """Wait for the first record of a topic that is not a tick; return it."""
        found: list[Record] = []
        with LogReader(self.kafka, [topic]) as reader:

            def there() -> list[Record]:
                records = [located.record for located in reader.poll(0.1)]
                found.extend(record for record in records if record is not None and not isinstance(record, Tick))
                return found

            self.until(there, f"a record in {topic}")
        return found[0]

    def stop(self) -> None:
        """End all running processes, and check that none printed the password."""
        for role in self.roles.values():
            role.process.terminate()
        for role in self.roles.values():
            try:
                role.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                role.process.kill()
                role.process.wait()
        assert not [role.log for role in self.roles.values() if PASSWORD in role.log.read_text()]


@pytest.fixture
def site(secured: SecuredLog, topic_prefix: str, tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, secured.settings(topic_prefix))
    made.configure()
    try:
        yield made
    finally:
        made.stop()


class OneVersion(ProductReplica):
    """A replica with one version, so that its answers can be trained on."""

    def whole(self, body: dict) -> web.Response:
        made = json.loads(super().whole(body).text or "")
        made["choices"][0]["weight_versions"] = [[4, 0, 3]]
        return self.json(made)


@contextmanager
def product_replica() -> Iterator[OneVersion]:
    """A replica for the product, in a thread of its own."""
    replica, ready, loop, ended = OneVersion("s0"), threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with served(replica):
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(DEADLINE_S)
        yield replica
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(DEADLINE_S)
        loop.close()


def test_the_loop_of_simulated_work(site: Site):
    command = ["topics", "--create", "--config", str(site.directory / "tidemill.toml")]
    created = CliRunner().invoke(app, command, env=password_variable(PASSWORD))
    assert created.exit_code == 0 and PASSWORD not in created.output, created.output
    for command in (["stream"], ["sink"], ["gate", "run"], ["feed"]):
        site.start(*command)
    site.start(program=["-c", LEARNER])
    site.first(Topic.MANIFESTS)
    replica = FakeReplica(Tokenizer.from_file(str(site.directory / "model" / "tokenizer.json")), "r1")
    replica.start()
    try:
        site.configure(rollout={"replicas": [replica.address]})
        site.start("rollout")
        with RecordProducer(site.kafka, "test") as writer:
            writer.send_acked(Topic.ACKS, [("r1", ack("r1", 0, now_us(), RUN))])
        for topic in (Topic.TASKS, Topic.ROLLOUTS, Topic.GROUPS, Topic.STEPS, Topic.GATE):
            site.first(topic)
        sink = SinkSettings(path=str(site.directory / "engine"))

        def rows() -> int:
            state = read_state(sink.directory)
            if state is None:
                return 0
            return int(httpx.post(state.url, content="SELECT count() FROM rollouts", timeout=DEADLINE_S).text)

        site.until(rows, "rows of rollouts in the sink")
    finally:
        replica.stop()


def test_an_answer_and_its_vote_become_an_online_batch(site: Site):
    create_topics(site.kafka)
    with ExitStack() as stack:
        replica = stack.enter_context(product_replica())
        with closing(bind("127.0.0.1", 0, "test")) as one, closing(bind("127.0.0.1", 0, "test")) as two:
            route, gateway = one.getsockname()[1], two.getsockname()[1]
        site.configure(router={"port": route, "pools": {"stable": [replica.address]}}, gateway={"port": gateway})
        for command in (("route",), ("gateway",), ("stream", "join"), ("stream", "batches")):
            site.start(*command)
        headers = {"Authorization": f"Bearer {KEY}", "x-tidemill-consent": "yes"}
        http = stack.enter_context(httpx.Client(headers=headers, timeout=DEADLINE_S))

        def post(port: int, path: str, body: dict) -> httpx.Response | None:
            try:
                answer = http.post(f"http://127.0.0.1:{port}{path}", json=body)
            except httpx.TransportError:
                return None
            return answer if answer.is_success else None

        answers: list[httpx.Response | None] = []

        def ask() -> httpx.Response | None:
            answers.append(post(route, "/v1/completions", {"prompt": "hello", "user": "ann"}))
            return answers[-1]

        site.until(ask, "an answer of the router")
        assert answers[-1] is not None
        vote = {"interaction": answers[-1].json()["tidemill"]["interaction"], "kind": "thumb", "value": 1}
        site.until(
            lambda: post(gateway, "/v1/feedback", {**vote, "user": "ann", "event_id": "e"}), "an answer of the gateway"
        )
        interaction = site.first(Topic.INTERACTIONS).interaction_id
        assert site.first(Topic.FEEDBACK).interaction_id == interaction
        assert site.first(Topic.OUTCOMES).interaction_id == interaction
        members = site.first(Topic.ONLINE_BATCHES).members
    assert [member.interaction_id for member in members] == [interaction]


def test_a_wrong_password_ends_a_role_in_one_line(site: Site):
    """A command and two roles; all others look for their log by the same code."""
    for command in ("topics", "stream", "feed"):
        site.start(command, password="wrong")
    for role in site.roles.values():
        assert role.process.wait(DEADLINE_S) == 1, role.log
        said = role.log.read_text()
        assert "Traceback" not in said and "invalid credentials" in said.splitlines()[-1], said
