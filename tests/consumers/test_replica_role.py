"""The role on a real Kafka: replicas of two compute types join, follow, roll back, resume, and end on a signal."""

import threading

import httpx
import pytest

from tests.consumers.replica_role import Acks, RoleProcess, Trainer
from tests.waiting import until
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import AckStatus, GateVerdict

FLOAT32, BFLOAT16 = REPLICAS = ("replica-float32", "replica-bfloat16")


@pytest.mark.timeout(1200)
def test_replicas_of_both_compute_types_prove_the_same_chain(kafka, topic_prefix, tmp_path):
    settings = KafkaSettings(bootstrap=kafka.bootstrap, topic_prefix=topic_prefix)
    trainer, running = Trainer(settings, tmp_path), []
    acks = Acks(settings)
    trainer.step()
    try:
        for name in REPLICAS:
            dtype = name.removeprefix("replica-")
            running.append(RoleProcess(settings, tmp_path, name, dtype=dtype, region=dtype))
        acks.until_serving(1, *REPLICAS, deadline_s=600)
        _check_joined(acks)
        _follow(trainer, acks)
        _roll_back(trainer, acks)
        _check_dead_letter(settings, trainer, acks)
        assert {replica.status()["version"] for replica in running} == {trainer.version}
        _check_lags(settings, trainer)
        for replica in running:
            _end_under_load(replica)
    finally:
        for replica in running:
            replica.kill()
        acks.close()


def _end_under_load(replica):
    """A replica that is stopped with requests in flight ends them and exits without a traceback."""
    address, answered = replica.address(), []

    def ask(stream):
        body = {"prompt": [5, 6, 7], "max_tokens": 1, "fill_context": True, "ignore_eos": True,
                "stream": stream}  # fmt: skip
        try:
            while True:
                with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
                    answered.append(response.status_code)
                    response.read()
        except httpx.TransportError:
            return

    clients = [threading.Thread(target=ask, args=(n % 2 == 0,)) for n in range(12)]
    for client in clients:
        client.start()
    until(lambda: len(answered) >= 24, "answers under load")
    assert set(answered) == {200}
    replica.end()
    for client in clients:
        client.join(60)
        assert not client.is_alive()
    assert "Traceback" not in replica.text(), replica.text()


def _check_joined(acks):
    for name in REPLICAS:
        (joined,) = acks.by_replica[name]
        assert (joined.status, joined.version) == (AckStatus.ANCHORED, 1)
        assert joined.reason.startswith("started from the anchor of version 0 and 1 delta, ")


def _follow(trainer, acks):
    for _ in range(5):
        manifest = trainer.step()
        acks.until_serving(manifest.version, *REPLICAS)
    for name in REPLICAS:
        said = acks.by_replica[name][1:]
        assert [(ack.version, ack.status) for ack in said] == [(v, AckStatus.PROVED) for v in range(2, 7)]
        assert [ack.fingerprint for ack in said] == [one.fingerprint for one in trainer.manifests[2:]]
        assert all(ack.step_to_served_ms > 0 for ack in said)


def _roll_back(trainer, acks):
    """Roll back to version 3 without a restart; version 7 is not served until the branch is released."""
    trainer.decide(GateVerdict.ROLL_BACK, 3)
    acks.until_serving(3, *REPLICAS)
    trainer.step()
    acks.until(lambda said: all(said[name][-1].version == 7 for name in REPLICAS))
    trainer.decide(GateVerdict.RELEASE)
    acks.until_serving(7, *REPLICAS)
    for name in REPLICAS:
        back, refused, forth = acks.by_replica[name][-3:]
        assert (back.status, back.reason) == (AckStatus.ANCHORED, "rolled back to version 3 by ada: reward fell")
        assert back.fingerprint == trainer.manifests[3].fingerprint and back.pid == forth.pid
        assert refused.status is AckStatus.REFUSED and refused.reason == back.reason
        assert forth.fingerprint == trainer.manifests[7].fingerprint


def _check_dead_letter(settings, trainer, acks):
    """An unreadable record becomes a dead letter with its bytes, and the next version arrives."""
    names = Names(settings.topic_prefix)
    trainer.producer.send_bytes(names.of(Topic.MANIFESTS), b"no record", key=b"main")
    trainer.step()
    acks.until_serving(trainer.version, *REPLICAS)
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": settings.bootstrap, "group.id": "unused"})
    consumer.assign([TopicPartition(names.dead_letter(Topic.MANIFESTS), 0, 0)])
    message = consumer.poll(60)
    consumer.close()
    assert message is not None and message.value() == b"no record"


def _check_lags(settings, trainer):
    """Each region's lag is in the log: 0 while it follows, 4 for version 7 after the roll-back to version 3."""
    with LogReader(settings, [Topic.STALENESS]) as reader:
        lags = [located.record for located in reader.read_to_end()]
    assert {(lag.stage, lag.replica_id, lag.region) for lag in lags} == {
        ("serve", FLOAT32, "float32"),
        ("serve", BFLOAT16, "bfloat16"),
    }
    for name in REPLICAS:
        said = [(lag.version, lag.lag[0].lag) for lag in lags if lag.replica_id == name]
        assert said[0] == (1, 0) and said[-1] == (trainer.version, 0) and (3, 4) in said
