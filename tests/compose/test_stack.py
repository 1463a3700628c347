"""The local stack on real brokers: restarts, kills, conflicts, and cleanup."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from typer.testing import CliRunner

from tidemill.compose.cli.stack_commands import stack_app
from tidemill.compose.stack.config import HOST, StackError, StackSettings
from tidemill.compose.stack.kafka import LocalStack, NodeState, StackStatus, local_bootstrap

TOPIC = "kept"
DEADLINE_S = 180.0


def settings(data_dir: Path, brokers: int = 1) -> StackSettings:
    """Return the settings of a small cluster."""
    return StackSettings(data_dir=data_dir, brokers=brokers, heap_mb=256, start_timeout_s=600)


@contextmanager
def stopped_afterwards(stack: LocalStack) -> Iterator[LocalStack]:
    """Stop the stack in every case, so that no JVM remains."""
    try:
        yield stack
    finally:
        stack.down()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, broker: None) -> Iterator[Path]:
    """The directory of a one-broker cluster that the tests start and stop."""
    data_dir = tmp_path_factory.mktemp("one")
    with stopped_afterwards(LocalStack(settings(data_dir))):
        yield data_dir


def brokers_of(data_dir: Path) -> list[int]:
    """Return the pids of all processes whose command line names the directory."""
    named = f"-Dtidemill.node={data_dir}"
    found = psutil.process_iter(["pid", "cmdline"])
    return [p.info["pid"] for p in found if any(part.startswith(named) for part in p.info["cmdline"] or [])]


def create(bootstrap: str, topic: str, replicas: int) -> None:
    """Create a topic of one partition."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    # A request on the client's first connection is lost when the client closes it after it has found the brokers.
    admin.list_topics(timeout=DEADLINE_S)
    for future in admin.create_topics([NewTopic(topic, 1, replicas)]).values():
        future.result(DEADLINE_S)


def produce(bootstrap: str, topic: str, value: bytes) -> None:
    """Write one record and wait until all in-sync replicas have acknowledged it."""
    failures: list[object] = []
    options = {"bootstrap.servers": bootstrap, "enable.idempotence": True, "delivery.timeout.ms": DEADLINE_S * 1000}
    producer = Producer(options)
    producer.produce(topic, value, on_delivery=lambda error, _: failures.append(error) if error else None)
    assert producer.flush(DEADLINE_S) == 0
    assert not failures


def consume(bootstrap: str, topic: str, count: int) -> list[bytes]:
    """Return the first `count` values of a topic."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "reader", "enable.auto.commit": False})
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        return [message.value() for message in consumer.consume(count, DEADLINE_S)]
    finally:
        consumer.close()


def kill(status: StackStatus, node_id: int) -> None:
    """Kill a broker with SIGKILL and wait until it has ended."""
    pid = next(node.pid for node in status.nodes if node.node_id == node_id)
    assert pid is not None
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    process.wait(DEADLINE_S)


def test_two_starts_at_once_make_one_cluster(one: Path) -> None:
    program = "from tidemill.compose.cli.stack_commands import stack_app; stack_app()"
    command = [sys.executable, "-c", program, "up", "--json", "--heap-mb", "256", "--data-dir", str(one)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=400)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    first, second = (json.loads(output) for output in outputs)
    assert first["ready"]
    assert first["nodes"] == second["nodes"]
    assert brokers_of(one) == [first["nodes"][0]["pid"]]
    assert local_bootstrap(settings(one)) == first["bootstrap"]


def test_a_restart_keeps_address_and_data_and_down_leaves_no_process(one: Path) -> None:
    stack = LocalStack(settings(one))
    before = stack.up()
    create(before.bootstrap, TOPIC, 1)
    produce(before.bootstrap, TOPIC, b"first")
    stack.down()
    assert brokers_of(one) == []
    assert [node.state for node in stack.status().nodes] == [NodeState.STOPPED]
    after = stack.up()
    assert after.bootstrap == before.bootstrap
    assert after.nodes[0].pid != before.nodes[0].pid
    assert consume(after.bootstrap, TOPIC, 1) == [b"first"]


def test_a_taken_port_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(StackError, match=rf"port {port} .* in use .*--port"):
            LocalStack(settings(tmp_path).model_copy(update={"base_port": port})).up()
    assert brokers_of(tmp_path) == []


def test_a_broker_that_cannot_start_shows_its_log_and_is_not_left_behind(one: Path) -> None:
    stack = LocalStack(settings(one))
    stack.up()
    stack.down()
    identity = one / "node-1" / "data" / "meta.properties"
    original = identity.read_text()
    identity.write_text(original.replace("node.id=1", "node.id=7"))
    with pytest.raises(StackError, match=r"ended while starting[\s\S]*node id 7"):
        stack.up()
    identity.write_text(original)
    assert brokers_of(one) == []


@pytest.mark.usefixtures("broker")
def test_three_brokers_outlive_the_loss_of_one_which_is_reported_and_started_again(tmp_path: Path) -> None:
    three = settings(tmp_path, brokers=3)
    with stopped_afterwards(LocalStack(three)) as stack:
        running = stack.up()
        assert [node.state for node in running.nodes] == [NodeState.READY] * 3
        create(running.bootstrap, TOPIC, 3)
        produce(running.bootstrap, TOPIC, b"all")
        kill(running, 1)
        produce(running.bootstrap, TOPIC, b"two of three")
        shown = CliRunner().invoke(stack_app, ["status", "--json", "--data-dir", str(tmp_path)])
        assert shown.exit_code == 1
        assert [node["state"] for node in json.loads(shown.stdout)["nodes"]] == ["dead", "ready", "ready"]
        assert local_bootstrap(three) is None
        assert stack.up().ready
        assert consume(running.bootstrap, TOPIC, 2) == [b"all", b"two of three"]
    assert brokers_of(tmp_path) == []
