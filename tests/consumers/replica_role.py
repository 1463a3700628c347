"""Helpers of the role's tests and the soak: replicas as processes on a real Kafka, and a trainer of a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.consumers import replica_driver as driver
from tests.waiting import until
from tidemill.kernels.weights.config import PublishSettings
from tidemill.kernels.weights.publish import WeightPublisher
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.log.admin import create_topics
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import GateDecision, GateVerdict, Manifest, WeightAck

ROLE = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)
from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.environment import prepare_environment, quick_imports
from tidemill.schemas.config import ChatSettings, KafkaSettings, RunSettings
kafka, run_, replica = json.loads(sys.argv[1])
settings = ReplicaSettings(**replica)
prepare_environment(settings.threads, settings.batch_invariant)
with quick_imports():
    from tidemill.consumers.replica.role import serve
serve(KafkaSettings(**kafka), RunSettings(**run_), settings, ChatSettings())
"""


END_S = 180.0


class Trainer:
    """Publishes versions of a tiny checkpoint as the trainer does; the constructor publishes version 0."""

    def __init__(self, settings: KafkaSettings, root: Path, publish: PublishSettings | None = None) -> None:
        create_topics(settings)
        base = driver.make_checkpoint(root / "base")
        self.view, self.version = driver.view_of(base), 0
        self.producer = RecordProducer(settings, "trainer")
        store = StoreSettings(root=str(root / "store"))
        self.publisher = WeightPublisher.open(settings, driver.RUN, store, publish, base_model=base)
        self.manifests = [self.publisher.publish(0, self.view)]

    def step(self, fraction: float = 0.01) -> Manifest:
        """Publish the next version."""
        self.version += 1
        self.view = driver.nudged(self.view, self.version, fraction)
        self.manifests.append(self.publisher.publish(self.version, self.view, learning_rate=1e-5))
        return self.manifests[-1]

    def decide(self, verdict: GateVerdict, version: int | None = None) -> None:
        """Write a gate decision."""
        run, at = driver.RUN, int(time.time() * 1e6)
        decision = GateDecision(run.run_id, run.branch, verdict, version, "reward fell", "ada", {}, at)
        self.producer.send_acked(Topic.GATE, [(run.branch, decision)])


class Acks:
    """The acknowledgements in the log, by replica, read as they arrive."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._reader = LogReader(settings, [Topic.ACKS])
        self.by_replica: dict[str, list[WeightAck]] = {}

    def until(self, happened: Callable[[dict[str, list[WeightAck]]], bool], deadline_s: float = 240.0) -> None:
        """Read until `happened` returns true. Raises TimeoutError."""
        end = time.monotonic() + deadline_s
        while not happened(self.by_replica):
            if time.monotonic() > end:
                last = {name: acks[-3:] for name, acks in self.by_replica.items()}
                raise TimeoutError(f"it did not happen in {deadline_s:g} s; the last acknowledgements are {last}")
            for located in self._reader.poll(0.2):
                if isinstance(located.record, WeightAck):
                    self.by_replica.setdefault(located.record.replica_id, []).append(located.record)

    def until_serving(self, version: int, *replicas: str, deadline_s: float = 240.0) -> None:
        """Read until the last acknowledgement of each replica reports that it serves `version`."""
        self.until(
            lambda acks: all(name in acks and acks[name][-1].serving_version == version for name in replicas),
            deadline_s,
        )

    def close(self) -> None:
        """Close the connections."""
        self._reader.close()


class RoleProcess:
    """One replica's process. The constructor starts it; its log file is in `root`, named by its id."""

    def __init__(self, settings: KafkaSettings, root: Path, replica_id: str, **replica: Any) -> None:
        chosen = {"replica_id": replica_id, "port": 0, "kv_cache_mb": 16, "max_num_seqs": 16, **replica}
        parts = [settings.model_dump(mode="json"), driver.RUN.model_dump(mode="json"), chosen]
        self.replica_id, self._log = replica_id, root / f"{replica_id}.log"
        self._begins_at = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", ROLE, json.dumps(parts)], stderr=log, stdout=log, env=dict(os.environ)
            )

    def text(self) -> str:
        """Return the end of its log."""
        return self._log.read_text()[-4000:] if self._log.exists() else ""

    def address(self) -> str:
        """Return the address where it serves; empty before its log contains it."""
        own = self._log.read_bytes()[self._begins_at :].decode(errors="replace").splitlines()
        addresses = [line.split()[-1] for line in own if "serving version" in line]
        return addresses[-1] if addresses else ""

    def status(self, deadline_s: float = 180.0) -> dict[str, Any]:
        """Return its status over HTTP; the port opens after its first acknowledgement."""

        def answer() -> dict[str, Any]:
            with suppress(httpx.TransportError):
                if address := self.address():
                    return dict(httpx.get(f"{address}/tidemill/status", timeout=10).json())
            return {}

        return until(answer, lambda: f"{self.replica_id} did not answer: {self.text()}", deadline_s, pause_s=0.1)

    def end(self) -> None:
        """Send SIGTERM: all its child processes end too. Raises AssertionError if they do not."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(END_S) == 0, self.text()
        assert not psutil.wait_procs(children, timeout=END_S)[1]

    def kill(self) -> None:
        """Send SIGKILL and wait until its engine core has ended too."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        self.process.kill()
        self.process.wait()
        for child in psutil.wait_procs(children, timeout=END_S)[1]:
            child.kill()
