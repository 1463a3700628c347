"""A weight chain on a real Kafka, written record by record, so that tests can write wrong ones.

Small tensors, an anchor as a Hugging Face directory, deltas in one or more shards, skip-deltas and acknowledgements;
deltas and manifests can be damaged before they are written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import xxhash

from tests.kernels.encoding import encode_delta
from tests.records import build, tensor_infos
from tidemill.kernels.elements import TensorChange
from tidemill.kernels.weights.anchor import finish_anchor
from tidemill.kernels.weights.bits import Weight, total_fingerprint
from tidemill.kernels.weights.checkpoint import save_checkpoint
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import (
    AckStatus,
    Anchor,
    DeltaChunk,
    Manifest,
    ShardPosition,
    SkipDelta,
    WeightAck,
)
from tidemill.schemas.stored_object import put_object

SHAPES = {
    "model.embed_tokens.weight": (64, 16),
    "model.layers.0.mlp.up_proj.weight": (48, 16),
    "model.norm.weight": (16,),
}
CHUNK_BYTES = 1000
TOPICS = (Topic.MANIFESTS, Topic.DELTAS, Topic.ACKS, Topic.GATE)
"""The topics of a chain and of the decisions about it."""
View = Mapping[str, np.ndarray]
Damage = Callable[[bytes], bytes]


def first_view(seed: int = 0) -> View:
    """Return bf16 patterns of finite values."""
    random = np.random.default_rng(seed)
    return {name: random.integers(0, 1 << 14, shape, dtype=np.uint16) for name, shape in SHAPES.items()}


def nudged(view: View, seed: int, density: float = 0.05) -> View:
    """Return the view with some elements changed in their lowest bit."""
    random = np.random.default_rng(seed)
    return {n: np.where(random.random(b.shape) < density, b ^ np.uint16(1), b) for n, b in view.items()}


def write_checkpoint(directory: Path, view: View) -> Path:
    """Write a view as an anchor: a checkpoint directory with a configuration, a tokenizer file and the marker."""
    directory.mkdir(parents=True)
    save_checkpoint(directory, {name: Weight("bfloat16", bits) for name, bits in view.items()})
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (directory / "tokenizer.json").write_text("{}")
    finish_anchor(
        str(directory), {file.name: put_object(str(file), [file.read_bytes()]) for file in directory.iterdir()}
    )
    return directory


class WeightLog:
    """Publishes versions of one run's branch. `views` holds the weights of every version."""

    def __init__(self, kafka: KafkaSettings, run: RunSettings, root: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.kafka, self.run, self.root, self.chunk_bytes = kafka, run, root, chunk_bytes
        self.views: dict[int, View] = {}
        self.manifests: dict[int, Manifest] = {}
        self._producer = RecordProducer(kafka, "test-weight-log")

    def grow(self, count: int, anchors: tuple[int, ...] = (0,), shards: int = 1) -> None:
        """Publish versions until there are `count`, each a small change of the previous one."""
        for version in range(len(self.views), count):
            view = nudged(self.views[version - 1], version) if version else first_view()
            self.publish(version, view, version - 1 if version else None, anchor=version in anchors, shards=shards)

    def publish(
        self, version: int, view: View, parent: int | None, *, anchor: bool = False, shards: int = 1,
        damage: Damage = bytes, lies: Mapping[str, object] | None = None,
    ) -> Manifest:  # fmt: skip
        """Publish one version; `lies` contains wrong values for fields of its manifest."""
        positions = [] if parent is None else self.send_shards(version, parent, view, shards, damage)
        old = self.views[parent] if parent is not None else view
        where, tensors = self.root / self.run.branch / f"v{version}", tensor_infos(view)
        fields = dict(
            run_id=self.run.run_id, branch=self.run.branch, version=version, parent=parent, step=version,
            learning_rate=1e-5, n_elements=sum(b.size for b in view.values()),
            n_changed=sum(int((old[n] != view[n]).sum()) for n in view), delta_bytes=sum(p.n_bytes for p in positions),
            shards=positions, tensors=tensors, fingerprint=total_fingerprint(tensors).hex(),
            anchor=Anchor(str(write_checkpoint(where, view)), 1) if anchor else None,
            trained_at=version, published_at=version,
        )  # fmt: skip
        manifest = Manifest(**{**fields, **(lies or {})})
        self._producer.send_acked(Topic.MANIFESTS, [(self.run.branch, manifest)])
        self.views.setdefault(version, view)
        return self.manifests.setdefault(version, manifest)

    def skip(self, base: int, version: int, damage: Damage = bytes) -> SkipDelta:
        """Publish a skip-delta."""
        old, new = self.views[base], self.views[version]
        positions = self.send_shards(version, base, new, 1, damage)
        changed = sum(int((old[n] != new[n]).sum()) for n in new)
        run = self.run
        made = SkipDelta(run.run_id, run.branch, version, base, changed, positions[0].n_bytes, positions, version)
        self._producer.send_acked(Topic.MANIFESTS, [(run.branch, made)])
        return made

    def send_shards(self, version: int, base: int, view: View, shards: int, damage: Damage) -> list[ShardPosition]:
        """Write the chunks of a delta, with its tensors distributed over the shards."""
        old, positions = self.views[base], []
        for shard in range(shards):
            names = list(view)[shard::shards]
            changes = [TensorChange(name, "bfloat16", old[name], view[name]) for name in names]
            stream = damage(b"".join(encode_delta(version, base, changes)))
            size = self.chunk_bytes
            pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
            chunks = [
                DeltaChunk(
                    self.run.run_id, self.run.branch, version, shard, sequence, len(pieces),
                    xxhash.xxh3_128_hexdigest(piece), piece,
                )
                for sequence, piece in enumerate(pieces)
            ]  # fmt: skip
            sent = self._producer.send_acked(Topic.DELTAS, [(str(shard), chunk) for chunk in chunks])
            positions.append(
                ShardPosition(
                    shard, Topic.DELTAS.value, sent[0].partition, [place.offset for place in sent], len(stream),
                    xxhash.xxh3_128_hexdigest(stream),
                )
            )  # fmt: skip
        return positions

    def acknowledge(self, replica: str, version: int, at: int, status: AckStatus = AckStatus.PROVED) -> None:
        """Write a replica's acknowledgement of a version."""
        ack = acknowledgement(self.run, replica, version, at, status)
        self._producer.send_acked(Topic.ACKS, [(replica, ack)])


def acknowledgement(
    run: RunSettings,
    replica: str,
    version: int,
    at: int,
    status: AckStatus = AckStatus.PROVED,
    serving: int | None = None,
) -> WeightAck:
    """Return an acknowledgement."""
    return build(WeightAck, replica_id=replica, run_id=run.run_id, branch=run.branch, incarnation="i", version=version,
                 serving_version=version if serving is None else serving, status=status,
                 reason="because" if status is AckStatus.REFUSED else "", at=at)  # fmt: skip
