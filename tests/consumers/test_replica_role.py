"""The role on a real Kafka: a replica joins, follows, rolls back, resumes, and ends on a signal."""

import signal
import threading
from contextlib import suppress

import httpx
import psutil
import pytest

from tests.consumers.replica_role import Acks, RoleProcess, Trainer
from tests.waiting import until
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import AckStatus, GateVerdict

REPLICA, REGION = "replica-test", "east"
DEADLINE_S = 600.0


@pytest.mark.timeout(2400)
def test_a_replica_proves_the_chain_and_follows_the_gate(kafka, tmp_path):
    """It computes in bf16; the replica of tests/system/test_serving_updates.py computes in fp32."""
    settings = kafka.fresh()
    trainer, acks = Trainer(settings, tmp_path), Acks(settings)
    trainer.step()
    replica = RoleProcess(settings, tmp_path, REPLICA, dtype="bfloat16", region=REGION)
    try:
        acks.until_serving(1, REPLICA, deadline_s=DEADLINE_S)
        _check_joined(acks)
        _follow(trainer, acks)
        _roll_back(trainer, acks)
        _check_dead_letter(settings, trainer, acks)
        assert replica.status()["version"] == trainer.version
        _check_lags(settings, trainer)
        _end_under_load(replica)
    finally:
        replica.kill()
        acks.close()


def test_an_engine_that_cannot_start_gives_its_reason_and_no_traceback_of_its_own(kafka, tmp_path):
    settings = kafka.fresh()
    Trainer(settings, tmp_path)
    # One block of its KV cache is larger than the cache.
    replica = RoleProcess(settings, tmp_path, REPLICA, kv_cache_mb=4, block_size=1 << 15)
    try:
        assert replica.process.wait(DEADLINE_S) == 1
    finally:
        replica.kill()
    assert "RuntimeError: vLLM's engine cannot start: No available memory for the cache blocks" in replica.text()
    assert "EngineCore failed to start" not in replica.text()


def engine_cores(server: psutil.Process) -> list[psutil.Process]:
    """Return the engine cores of a server. It has other children while it imports vLLM, which runs `lscpu`."""
    found = []
    for child in server.children():
        with suppress(psutil.NoSuchProcess):
            if child.cmdline()[:1] == ["VLLM::EngineCore"]:
                found.append(child)
    return found


def test_an_interrupt_while_the_engine_starts_ends_the_replica_at_once(kafka, tmp_path):
    settings = kafka.fresh()
    Trainer(settings, tmp_path)
    replica = RoleProcess(settings, tmp_path, REPLICA)
    try:
        server = psutil.Process(replica.process.pid)
        cores = until(lambda: engine_cores(server), "an engine core", DEADLINE_S)
        for process in (server, *cores):  # as a terminal does
            process.send_signal(signal.SIGINT)
        assert replica.process.wait(DEADLINE_S) == 0
        assert not psutil.wait_procs(cores, timeout=60)[1]
    finally:
        replica.kill()
    assert "Traceback" not in replica.text() and "serving version" not in replica.text()


def _end_under_load(replica):
    """A replica that is stopped with requests in flight ends them and exits without a traceback."""
    address, answered = replica.address(), []

    def ask(stream):
        body = {"prompt": [5, 6, 7], "max_tokens": 1, "fill_context": True, "ignore_eos": True,
                "stream": stream}  # fmt: skip
        try:
            while True:
                with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=DEADLINE_S) as response:
                    answered.append(response.status_code)
                    response.read()
        except httpx.TransportError:
            return

    clients = [threading.Thread(target=ask, args=(n % 2 == 0,)) for n in range(12)]
    for client in clients:
        client.start()
    until(lambda: len(answered) >= len(clients), "answers under load", DEADLINE_S)
    assert set(answered) == {200}
    replica.end()
    for client in clients:
        client.join(DEADLINE_S)
        assert not client.is_alive()
    assert "Traceback" not in replica.text(), replica.text()


def _check_joined(acks):
    (joined,) = acks.by_replica[REPLICA]
    assert (joined.status, joined.version) == (AckStatus.ANCHORED, 1)
    assert joined.reason.startswith("started from the anchor of version 0 and 1 delta, ")


def _follow(trainer, acks):
    for _ in range(5):
        manifest = trainer.step()
        acks.until_serving(manifest.version, REPLICA)
    said = acks.by_replica[REPLICA][1:]
    assert [(ack.version, ack.status) for ack in said] == [(v, AckStatus.PROVED) for v in range(2, 7)]
    assert [ack.fingerprint for ack in said] == [one.fingerprint for one in trainer.manifests[2:]]
    assert all(ack.step_to_served_ms > 0 for ack in said)


def _roll_back(trainer, acks):
    """Roll back to version 3 without a restart; version 7 is not served until the branch is released."""
    trainer.decide(GateVerdict.ROLL_BACK, 3)
    acks.until_serving(3, REPLICA)
    trainer.step()
    acks.until(lambda said: said[REPLICA][-1].version == 7)
    trainer.decide(GateVerdict.RELEASE)
    acks.until_serving(7, REPLICA)
    back, refused, forth = acks.by_replica[REPLICA][-3:]
    assert (back.status, back.reason) == (AckStatus.ANCHORED, "rolled back to version 3 by ada: reward fell")
    assert back.fingerprint == trainer.manifests[3].fingerprint and back.pid == forth.pid
    assert refused.status is AckStatus.REFUSED and refused.reason == back.reason
    assert forth.fingerprint == trainer.manifests[7].fingerprint


def _check_dead_letter(settings, trainer, acks):
    """An unreadable record becomes a dead letter with its bytes, and the next version arrives."""
    names = Names(settings.topic_prefix)
    trainer.producer.send_bytes(names.of(Topic.MANIFESTS), b"no record", key=b"main")
    trainer.step()
    acks.until_serving(trainer.version, REPLICA)
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": settings.bootstrap, "group.id": "unused"})
    consumer.assign([TopicPartition(names.dead_letter(Topic.MANIFESTS), 0, 0)])
    message = consumer.poll(60)
    consumer.close()
    assert message is not None and message.value() == b"no record"


def _check_lags(settings, trainer):
    """The region's lag is in the log: 0 while it follows, 4 for version 7 after the roll-back to version 3."""
    lags = []

    def read_to_the_last():
        lags.extend(located.record for located in reader.poll(0.2))
        return lags and lags[-1].version == trainer.version

    with LogReader(settings, [Topic.STALENESS]) as reader:
        until(read_to_the_last, "the lag, which is written after its acknowledgement")
    assert {(lag.stage, lag.replica_id, lag.region) for lag in lags} == {("serve", REPLICA, REGION)}
    said = [(lag.version, lag.lag[0].lag) for lag in lags]
    assert said[0] == (1, 0) and said[-1] == (trainer.version, 0) and (3, 4) in said
