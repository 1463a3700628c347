"""Publishers on a real Kafka, tensors of every type to publish, and a follower that checks everything."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
import xxhash

from tests.records import tensor_infos
from tidemill.kernels.delta import apply_change, decode_delta, resolve_all
from tidemill.kernels.weights.anchor import anchor_weights
from tidemill.kernels.weights.bits import Weight, total_fingerprint
from tidemill.kernels.weights.publish import WeightPublisher
from tidemill.kernels.weights.ranks import Ranks, open_ranks
from tidemill.kernels.weights.tensor_table import with_tensors
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Claim, DeltaChunk, Manifest, ShardPosition, SkipDelta
from tidemill.schemas.stored_object import read_object

View = dict[str, Weight]

SHAPES = {
    "embed": ("bfloat16", (64, 16)),
    "experts": ("float8_e4m3fn", (32, 24)),
    "gate": ("float8_e5m2", (40,)),
    "packed": ("int4", (16, 8)),
    "quantised": ("int8", (16, 8)),
    "half": ("float16", (16, 4)),
    "norm": ("float32", (16,)),
}
WIDTHS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}


def read_anchor(uri: str) -> dict[str, np.ndarray]:
    """Return the weights of an anchor by name, as bit patterns in their shapes. Raises like `anchor_weights`."""
    return {name: weight.bits for name, weight in anchor_weights(uri)}


@dataclass(frozen=True)
class Publication:
    """The run, log, store and base model of one test."""

    kafka: KafkaSettings
    run: RunSettings
    store: StoreSettings
    base_model: Path

    def records(self) -> list[Manifest | SkipDelta]:
        """Return every manifest and skip-delta of the run, in log order."""
        with LogReader(self.kafka, [Topic.MANIFESTS]) as reader:
            found = [located.record for located in reader.read_to_end()]
        return [r for r in found if isinstance(r, Manifest | SkipDelta) and r.run_id == self.run.run_id]

    def manifests(self, branch: str = "main") -> list[Manifest]:
        """Return every manifest of a branch, in log order."""
        return [r for r in self.records() if isinstance(r, Manifest) and r.branch == branch]

    def skips(self) -> list[SkipDelta]:
        """Return every skip-delta of the run, in log order."""
        return [record for record in self.records() if isinstance(record, SkipDelta)]

    def chunks(self) -> dict[tuple[int, int], DeltaChunk]:
        """Return every chunk of the run, by partition and offset."""
        with LogReader(self.kafka, [Topic.DELTAS]) as reader:
            found = {(at.partition, at.offset): at.record for at in reader.read_to_end()}
        return {place: chunk for place, chunk in found.items() if chunk.run_id == self.run.run_id}

    def payloads(self, shard: ShardPosition, version: int) -> list[bytes]:
        """Return the bytes of a shard, after a check of its position and of the chunks' fields."""
        if shard.uri is not None:
            assert shard.offsets == []
            return [read_object(Claim(shard.uri, shard.n_bytes, shard.digest))]
        chunks = self.chunks()
        named = [chunks[shard.partition, offset] for offset in shard.offsets]
        assert [(c.version, c.sequence, c.total) for c in named] == [
            (version, i, len(named)) for i in range(len(named))
        ]
        assert all(chunk.digest == xxhash.xxh3_128_hexdigest(chunk.payload) for chunk in named)
        stream = b"".join(chunk.payload for chunk in named)
        assert (len(stream), xxhash.xxh3_128_hexdigest(stream)) == (shard.n_bytes, shard.digest)
        return [chunk.payload for chunk in named]

    def apply(self, shards: list[ShardPosition], version: int, base: int, held: Mapping[str, np.ndarray]) -> None:
        """Update weights from `base` to `version` with a delta of the log."""
        for shard in shards:
            for block in decode_delta(self.payloads(shard, version), version, base):
                changes = resolve_all(block, held)
                assert changes
                for change in changes:
                    apply_change(change, held[change.name])

    def follow(self, branch: str = "main") -> Iterator[tuple[Manifest, dict[str, np.ndarray]]]:
        """Build every version like a follower that starts at the first anchor; yield (manifest, weights)."""
        held: dict[str, np.ndarray] = {}
        for manifest in map(with_tensors, self.manifests(branch)):
            if manifest.parent is None:
                held = {name: bits.copy() for name, bits in read_anchor(manifest.anchor.uri).items()}
            else:
                self.apply(manifest.shards, manifest.version, manifest.parent, held)
            typed = {tensor.name: Weight(tensor.dtype, held[tensor.name]) for tensor in manifest.tensors}
            assert tensor_infos(typed) == manifest.tensors
            assert total_fingerprint(manifest.tensors).hex() == manifest.fingerprint
            yield manifest, held


@pytest.fixture(scope="module")
def log(kafka) -> KafkaSettings:
    """Topics that the tests of a module share; each test has its own run in them."""
    return kafka.fresh(2, [Topic.MANIFESTS, Topic.DELTAS])


@pytest.fixture
def publication(log: KafkaSettings, tmp_path: Path) -> Publication:
    """A run without published versions."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return Publication(log, RunSettings(run_id=uuid.uuid4().hex), StoreSettings(root=str(tmp_path / "store")), base)


@pytest.fixture
def open_publisher(publication: Publication) -> Iterator[Callable[..., WeightPublisher]]:
    """A function that opens a publisher on the present log, like a trainer that starts or restarts."""
    with ExitStack() as stack:

        def start(settings=None, branch="main", **options) -> WeightPublisher:
            run = publication.run.model_copy(update={"branch": branch})
            made = WeightPublisher.open(
                publication.kafka, run, publication.store, settings, base_model=publication.base_model, **options
            )
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """A process group that contains only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield open_ranks(timeout_s=120)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def first_view() -> Callable[..., View]:
    """A function that makes random tensors of every type."""

    def make(seed: int = 0) -> View:
        random = np.random.default_rng(seed)
        view = {}
        for name, (dtype, shape) in SHAPES.items():
            width = WIDTHS.get(dtype, np.uint8)
            view[name] = Weight(dtype, random.integers(0, np.iinfo(width).max, shape, dtype=width, endpoint=True))
        return view

    return make


@pytest.fixture(scope="session")
def next_view() -> Callable[..., View]:
    """A function that changes the lowest bit of some elements of a view."""

    def make(view: View, seed: int, density: float = 0.05) -> View:
        random = np.random.default_rng(seed)
        return {
            name: Weight(dtype, np.where(random.random(bits.shape) < density, bits ^ bits.dtype.type(1), bits))
            for name, (dtype, bits) in view.items()
        }

    return make


@pytest.fixture(scope="session")
def views(first_view, next_view) -> list[View]:
    """Ten versions, each made from the one before."""
    made = [first_view()]
    for version in range(1, 10):
        made.append(next_view(made[-1], seed=version))
    return made
