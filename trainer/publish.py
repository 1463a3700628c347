"""Publishing weight versions: chunks of the delta, then an anchor where one is due, then the manifest that commits.

What this keeps true:

- a manifest is written only after the log has acknowledged every chunk it names and its anchor is whole, so a version
  that a reader sees can be read in full; consumers are never waited for;
- each version is published once: after a restart a version whose manifest is in the log is compared and left alone;
- a delta starts from the very weights that its parent's manifest stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tidemill.kernels.delta import TensorChange
from tidemill.kernels.fingerprint import Fingerprint
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.producer import RecordProducer
from tidemill.schemas.reader import LogReader
from tidemill.schemas.records import Anchor, Manifest, ShardPosition, TensorInfo
from tidemill.trainer.anchor import anchor_uri, write_anchor
from tidemill.trainer.delta_shard import DeltaShard
from tidemill.trainer.serving_view import SERVING_DTYPE, ServingView, tensor_infos, total_fingerprint


class ChainError(ValueError):
    """A version does not continue the chain of versions in the log."""


@dataclass(frozen=True, slots=True)
class VersionMark:
    """What the trainer says of a version beside its weights."""

    version: int
    parent: int | None
    """The version that the step started from; None begins a chain, as an anchor only."""
    step: int
    learning_rate: float
    trained_at: int
    """When the optimizer step ended, microseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class _Delta:
    """What the log holds of a version's delta."""

    shards: list[ShardPosition]
    n_bytes: int
    n_changed: int


NO_DELTA = _Delta([], 0, 0)


def read_manifests(kafka: KafkaSettings, run: RunSettings) -> dict[int, Manifest]:
    """Every version of the run's branch in the log, by number.

    Raises ChainError when a version was published twice with different weights.
    """
    published: dict[int, Manifest] = {}
    with LogReader(kafka, [Topic.MANIFESTS], client_id="tidemill-publisher") as reader:
        for located in reader.read_to_end():
            manifest = located.record
            if isinstance(manifest, Manifest) and (manifest.run_id, manifest.branch) == (run.run_id, run.branch):
                _require_same(published.setdefault(manifest.version, manifest), manifest.fingerprint)
    return published


class WeightPublisher:
    """Publishes the versions of one branch, in order.

    Args:
        base_model: directory whose configuration and tokenizer anchors take over.
        anchor_every: versions between anchors.
        published: the versions in the log, from `read_manifests`.
    """

    def __init__(
        self,
        producer: RecordProducer,
        run: RunSettings,
        store: StoreSettings,
        *,
        base_model: Path,
        anchor_every: int,
        published: Mapping[int, Manifest],
    ) -> None:
        self._producer = producer
        self._run = run
        self._store = store
        self._base_model = base_model
        self._anchor_every = anchor_every
        self._published = dict(published)

    @property
    def newest(self) -> Manifest | None:
        """The newest version in the log."""
        return self._published[max(self._published)] if self._published else None

    def publish(self, mark: VersionMark, old: ServingView | None, new: ServingView) -> Manifest:
        """Publish the weights `new` as version `mark.version`; returns when the log has acknowledged all of it.

        Args:
            old: the weights of version `mark.parent`; None exactly where that is None.

        Raises ChainError when the version does not continue the chain, DeliveryError when the log does not take it.
        """
        tensors = tensor_infos(new)
        total = total_fingerprint(tensors)
        done = self._published.get(mark.version)
        if done is not None:
            return _require_same(done, total.hex())
        delta = self._publish_delta(mark, old, new, total)
        anchor = self._publish_anchor(mark, new)
        manifest = self._manifest(mark, delta, tensors, total, anchor)
        self._producer.send_acked(Topic.MANIFESTS, [(self._run.branch, manifest)])
        self._published[mark.version] = manifest
        return manifest

    def _publish_delta(
        self, mark: VersionMark, old: ServingView | None, new: ServingView, total: Fingerprint
    ) -> _Delta:
        if mark.parent is None or old is None:
            if mark.parent is not None or old is not None:
                raise ChainError(f"version {mark.version}: give the parent's weights exactly where it has a parent")
            return NO_DELTA
        parent = self._parent(mark.version, mark.parent)
        with DeltaShard(mark.version, mark.parent, _changes(old, new)) as shard:
            made_from = (total - shard.change).hex()
            if made_from != parent.fingerprint:
                raise ChainError(
                    f"version {mark.version} was made from weights {made_from}, version {parent.version} in the log is "
                    f"{parent.fingerprint}: the trainer's weights are not the ones it published"
                )
            return _Delta([shard.send(self._producer, self._run)], shard.n_bytes, shard.n_changed)

    def _parent(self, version: int, parent: int) -> Manifest:
        if parent not in self._published or parent >= version:
            raise ChainError(f"version {version} names parent {parent}, which is not an earlier version in the log")
        return self._published[parent]

    def _publish_anchor(self, mark: VersionMark, new: ServingView) -> Anchor | None:
        if mark.parent is not None and mark.version % self._anchor_every:
            return None
        uri = anchor_uri(self._store.root, self._run.run_id, self._run.branch, mark.version)
        return write_anchor(uri, self._base_model, new)

    def _manifest(
        self, mark: VersionMark, delta: _Delta, tensors: list[TensorInfo], total: Fingerprint, anchor: Anchor | None
    ) -> Manifest:
        return Manifest(
            run_id=self._run.run_id,
            branch=self._run.branch,
            version=mark.version,
            parent=mark.parent,
            step=mark.step,
            learning_rate=mark.learning_rate,
            n_elements=sum(_elements(tensor) for tensor in tensors),
            n_changed=delta.n_changed,
            delta_bytes=delta.n_bytes,
            shards=delta.shards,
            tensors=tensors,
            fingerprint=total.hex(),
            anchor=anchor,
            trained_at=mark.trained_at,
            published_at=now_us(),
        )


def _changes(old: ServingView, new: ServingView) -> Iterator[TensorChange]:
    if old.keys() != new.keys():
        odd = sorted(old.keys() ^ new.keys())
        raise ChainError(f"a delta keeps the set of tensors; in one version only: {', '.join(odd[:5])}")
    for name, bits in new.items():
        yield TensorChange(name, SERVING_DTYPE, old[name], bits)


def _elements(tensor: TensorInfo) -> int:
    elements = 1
    for side in tensor.shape:
        elements *= side
    return elements


def _require_same(published: Manifest, fingerprint: str) -> Manifest:
    if published.fingerprint != fingerprint:
        raise ChainError(
            f"version {published.version} of run {published.run_id} is in the log with fingerprint "
            f"{published.fingerprint}, not {fingerprint}: two trainers on one run, or a step that was not repeatable"
        )
    return published
