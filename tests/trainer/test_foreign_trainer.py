"""A foreign trainer that uses only the publisher: replicas follow it and prove every version."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.consumers.replica_driver import make_checkpoint
from tests.consumers.replica_support import ArrayReplica
from tests.trainer import foreign_trainer
from tests.waiting import until
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import AckStatus, Manifest, WeightAck

RUN_ID = "foreign"
STEPS = 6
REPLICA = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)
from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.environment import prepare_environment
from tidemill.schemas.config import ChatSettings, KafkaSettings, RunSettings
kafka = json.loads(sys.argv[1])
settings = ReplicaSettings(replica_id="replica-f", port=0, kv_cache_mb=32)
prepare_environment(settings.threads)
from tidemill.consumers.replica.role import serve
serve(KafkaSettings(**kafka), RunSettings(run_id="foreign"), settings, ChatSettings())
"""


class Foreign:
    """The model and the text of a foreign trainer, and the log and store that it publishes to."""

    def __init__(self, kafka: KafkaSettings, root: Path) -> None:
        self.kafka, self.root = kafka, root
        self.model = make_checkpoint(root / "model")
        (root / "text").write_text(" ".join(f"t{(7 * i + i * i) % 190 + 5}" for i in range(4000)))

    def command(self, steps: int) -> list[str]:
        """Return the command that trains up to a step."""
        words = {
            "model": self.model, "text": self.root / "text", "bootstrap": self.kafka.bootstrap, "run-id": RUN_ID,
            "store": self.root / "store", "steps": steps, "topic-prefix": self.kafka.topic_prefix,
        }  # fmt: skip
        return [foreign_trainer.__file__, *(str(part) for k, v in words.items() for part in (f"--{k}", v))]

    def train(self, steps: int) -> None:
        """Run the trainer to its end, in this process."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "argv", self.command(steps))
            foreign_trainer.main()

    def manifests(self) -> list[Manifest]:
        """Read every manifest, in log order."""
        with LogReader(self.kafka, [Topic.MANIFESTS]) as reader:
            found = [located.record for located in reader.read_to_end()]
        return [record for record in found if isinstance(record, Manifest)]

    def acks(self, version: int, deadline_s: float = 240.0) -> list[WeightAck]:
        """Read the replica's acknowledgements up to its proof of a version."""
        found: list[WeightAck] = []
        with LogReader(self.kafka, [Topic.ACKS]) as reader:

            def proved() -> bool:
                found.extend(located.record for located in reader.poll(0.2, 1))
                return bool(found) and found[-1].serving_version == version

            until(proved, lambda: f"no acknowledgement of version {version}: {found[-3:]}", deadline_s)
        return found


@pytest.fixture(scope="module")
def foreign(kafka, tmp_path_factory) -> Foreign:
    return Foreign(kafka.fresh(), tmp_path_factory.mktemp("foreign"))


def test_the_foreign_trainer_is_small_and_imports_only_the_publisher():
    source = Path(foreign_trainer.__file__).read_text("utf-8")
    assert len(source.splitlines()) < 100
    modules = {n.module for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom) and n.module}
    ours = {module for module in modules if module.startswith("tidemill")}
    assert ours == {"tidemill.schemas.config", "tidemill.kernels.weights.publish"}


def test_a_follower_proves_every_version_and_a_restart_repeats_none(foreign, tmp_path):
    """The trainer is started twice, as after a kill. The second time, its first versions are already published."""
    done = subprocess.run([sys.executable, *foreign.command(1)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == len(foreign.manifests()) == 2
    foreign.train(STEPS)
    manifests = foreign.manifests()
    assert [manifest.version for manifest in manifests] == list(range(STEPS + 1))
    assert all(0 < manifest.n_changed < manifest.n_elements for manifest in manifests[1:])
    follow(foreign, manifests, tmp_path)


@pytest.mark.timeout(1200)
def test_a_vllm_replica_proves_the_versions_it_serves(foreign, tmp_path):
    """A real engine joins the run and follows it only through the log."""
    if not foreign.manifests():
        foreign.train(1)
    joined = foreign.manifests()[-1].version
    parts = json.dumps(foreign.kafka.model_dump())
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", REPLICA, parts]
        replica = subprocess.Popen(command, stderr=log, stdout=log, env=dict(os.environ))
    try:
        assert foreign.acks(joined)[0].status is AckStatus.ANCHORED
        foreign.train(joined + 4)
        acks = foreign.acks(joined + 4)
    finally:
        replica.terminate()
        replica.wait(60)
    fingerprints = {manifest.version: manifest.fingerprint for manifest in foreign.manifests()}
    assert all(ack.fingerprint == fingerprints[ack.serving_version] for ack in acks)
    assert {ack.status for ack in acks[1:]} == {AckStatus.PROVED}


def follow(foreign: Foreign, manifests: list[Manifest], directory: Path) -> None:
    """Apply every version in order with the replica's own classes, to an engine of plain arrays."""
    local = replace(manifests[0].anchor, uri=manifests[0].anchor.uri.removeprefix("file://"))
    with LogReader(foreign.kafka, [Topic.DELTAS], start="end") as chunks:
        replica = ArrayReplica(replace(manifests[0], anchor=local), chunks, directory, timeout_s=60.0)
        try:
            for manifest in manifests[1:]:
                said = replica.observe(manifest)
                assert said == [(AckStatus.PROVED, manifest.version, manifest.version)]
                assert replica.acks[-1].fingerprint == manifest.fingerprint
        finally:
            replica.close()
