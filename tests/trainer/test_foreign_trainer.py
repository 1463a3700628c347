"""A foreign trainer that uses only the publisher: replicas follow it and prove every version."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.consumers.replica_driver import make_checkpoint
from tests.consumers.replica_support import ArrayReplica
from tests.trainer import foreign_trainer
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import AckStatus, Manifest

RUN_ID = "foreign"
STEPS = 6


class Foreign:
    """The model and the text of a foreign trainer, and the log and store that it publishes to."""

    def __init__(self, kafka: KafkaSettings, root: Path) -> None:
        self.kafka, self.root = kafka, root
        self.model = make_checkpoint(root / "model")
        (root / "text").write_text(" ".join(f"t{(7 * i + i * i) % 190 + 5}" for i in range(4000)))

    def train(self, steps: int) -> None:
        """Run the trainer up to a step, in this process."""
        words = {
            "model": self.model, "text": self.root / "text", "bootstrap": self.kafka.bootstrap, "run-id": RUN_ID,
            "store": self.root / "store", "steps": steps, "topic-prefix": self.kafka.topic_prefix,
        }  # fmt: skip
        with pytest.MonkeyPatch.context() as patched:
            arguments = [str(part) for key, value in words.items() for part in (f"--{key}", value)]
            patched.setattr(sys, "argv", [foreign_trainer.__file__, *arguments])
            foreign_trainer.main()

    def manifests(self) -> list[Manifest]:
        """Read every manifest, in log order."""
        with LogReader(self.kafka, [Topic.MANIFESTS]) as reader:
            found = [located.record for located in reader.read_to_end()]
        return [record for record in found if isinstance(record, Manifest)]


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
    foreign.train(1)
    assert len(foreign.manifests()) == 2
    foreign.train(STEPS)
    manifests = foreign.manifests()
    assert [manifest.version for manifest in manifests] == list(range(STEPS + 1))
    assert all(0 < manifest.n_changed < manifest.n_elements for manifest in manifests[1:])
    follow(foreign, manifests, tmp_path)


def follow(foreign: Foreign, manifests: list[Manifest], directory: Path) -> None:
    """Apply every version in order with the replica's own classes, to an engine of plain arrays."""
    local = replace(manifests[0].anchor, uri=manifests[0].anchor.uri.removeprefix("file://"))
    with LogReader(foreign.kafka, [Topic.DELTAS], start="end") as chunks:
        replica = ArrayReplica(replace(manifests[0], anchor=local), chunks, directory)
        try:
            for manifest in manifests[1:]:
                said = replica.observe(manifest)
                assert said == [(AckStatus.PROVED, manifest.version, manifest.version)]
                assert replica.acks[-1].fingerprint == manifest.fingerprint
        finally:
            replica.close()
