"""The role over a real Kafka: joins from an anchor and deltas, acknowledges every version, ends with its signal."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tidemill.schemas.admin import create_topics
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.producer import RecordProducer
from tidemill.schemas.reader import LogReader
from tidemill.schemas.records import AckStatus
from tidemill.trainer.publish import WeightPublisher

_PATH = Path(__file__).with_name("replica_driver.py")
_SPEC = importlib.util.spec_from_file_location("replica_driver", _PATH)
driver = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = driver
_SPEC.loader.exec_module(driver)

ROLE = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)
from tidemill.consumers.replica import ReplicaSettings, run
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
kafka, run_, store, replica = json.loads(sys.argv[1])
run(KafkaSettings(**kafka), RunSettings(**run_), StoreSettings(**store), ReplicaSettings(**replica))
"""


class Trainer:
    """Publishes versions of a tiny checkpoint as the trainer does."""

    def __init__(self, settings, root):
        base = driver.make_checkpoint(root / "base")
        self.view, self.version = driver.view_of(base), 0
        self.producer = RecordProducer(settings, "trainer")
        store = StoreSettings(root=str(root / "store"))
        self.publisher = WeightPublisher.open(settings, driver.RUN, store, base_model=base)
        self.publisher.publish(0, self.view)

    def step(self):
        self.view = driver.nudged(self.view, self.version + 1)
        self.version += 1
        return self.publisher.publish(self.version, self.view, learning_rate=1e-5)


def acks_until(settings, serving, deadline_s=120.0):
    """Every acknowledgement up to the one that serves a version."""
    found = []
    end = time.monotonic() + deadline_s
    with LogReader(settings, [Topic.ACKS]) as reader:
        while time.monotonic() < end:
            found += [located.record for located in reader.poll(0.2, 1)]
            if found and found[-1].serving_version == serving:
                return found
    raise TimeoutError(f"no acknowledgement of version {serving} in {deadline_s:g} s, only {found[-3:]}")


@pytest.mark.timeout(300)
def test_a_replica_joins_follows_answers_and_ends(kafka, topic_prefix, tmp_path):
    settings = KafkaSettings(bootstrap=kafka.bootstrap, topic_prefix=topic_prefix)
    create_topics(settings)
    trainer = Trainer(settings, tmp_path)
    trainer.step()
    replica = {"replica_id": "replica-k", "port": 0, "kv_cache_mb": 32}
    parts = [settings.model_dump(), driver.RUN.model_dump(), {"root": str(tmp_path / "store")}, replica]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", ROLE, json.dumps(parts)], stderr=log, stdout=log, env=dict(os.environ)
        )
    try:
        (joined,) = acks_until(settings, 1)
        assert (joined.status, joined.version) == (AckStatus.ANCHORED, 1)
        for _ in range(5):
            manifest = trainer.step()
        acks = acks_until(settings, 6)
        assert [(ack.version, ack.status) for ack in acks[1:]] == [(v, AckStatus.PROVED) for v in range(2, 7)]
        assert acks[-1].fingerprint == manifest.fingerprint and acks[-1].step_to_served_ms > 0
        assert _status(process, tmp_path)["version"] == 6
        _check_dead_letter(settings, trainer)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, (tmp_path / "log").read_text()[-4000:]
        assert not psutil.wait_procs(children, timeout=10)[1]
    finally:
        process.kill()
        process.wait()


def _status(process, root):
    (address,) = [line.split()[-1] for line in (root / "log").read_text().splitlines() if "serving version" in line]
    answer = httpx.get(f"{address}/tidemill/status", timeout=10)
    assert answer.json()["pid"] == process.pid
    return answer.json()


def _check_dead_letter(settings, trainer):
    """A record that cannot be read is put aside with its bytes, and the next version arrives."""
    names = Names(settings.topic_prefix)
    trainer.producer.send_bytes(names.of(Topic.MANIFESTS), b"no record", key=b"main")
    trainer.step()
    acks_until(settings, trainer.version)
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": settings.bootstrap, "group.id": "unused"})
    consumer.assign([TopicPartition(names.dead_letter(Topic.MANIFESTS), 0, 0)])
    message = consumer.poll(20)
    consumer.close()
    assert message is not None and message.value() == b"no record"
