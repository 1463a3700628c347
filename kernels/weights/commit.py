"""The commit of a version: its manifest, written after everything that it names is acknowledged or stored.

Invariants: if a reader sees a manifest, everything that it names can be read; a version is committed once, and only
as the next one of its branch. The first rank writes the manifest; afterwards every rank has it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod

from tidemill.kernels.weights.bits import total_fingerprint
from tidemill.kernels.weights.config import PublishSettings
from tidemill.kernels.weights.graph import VersionError, VersionGraph, require_same
from tidemill.kernels.weights.tensor_parts import ShardReport
from tidemill.kernels.weights.tensor_table import fit_record
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import CLAIM_CHECK_BYTES, KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.producer import AckedWriter
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Anchor, Manifest, TensorInfo


@dataclass(frozen=True, slots=True)
class VersionMark:
    """Metadata of a version that the trainer passes with its weights: fields of its manifest."""

    version: int
    parent: int | None
    """The version that the step started from; None begins a chain, which has an anchor only."""
    step: int
    learning_rate: float
    trained_at: int
    """Time at which the optimizer step ended, microseconds since the epoch."""
    serving_format: str = ""
    serving_activations: str = ""


def read_versions(kafka: KafkaSettings, run: RunSettings) -> VersionGraph:
    """Read every version of the run's branch from the log.

    Raises VersionError if a version was published twice with different weights.
    """
    graph = VersionGraph(run.run_id, run.branch, keep_tensors=False)
    with LogReader(kafka, [Topic.MANIFESTS], client_id="tidemill-publisher") as reader:
        for located in reader.read_to_end():
            if isinstance(located.record, Manifest):
                observe_published(graph, located.record)
    return graph


def observe_published(graph: VersionGraph, manifest: Manifest) -> None:
    """Add a manifest to the graph. Raises VersionError if the graph has its version with other weights."""
    if graph.observe(manifest):
        require_same(graph.manifests[manifest.version], manifest.fingerprint)


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """A published version that a new branch begins with."""

    branch: str
    version: int


def fork_source(kafka: KafkaSettings, run: RunSettings, graph: VersionGraph, point: ForkPoint) -> VersionGraph | None:
    """Return the source branch of a fork; None if the run's branch, whose versions are `graph`, has begun.

    Raises VersionError if `point` names an unknown version, or the run's branch began with another one.
    """
    if point.branch == run.branch:
        raise VersionError(
            f"branch {point.branch} cannot begin with one of its own versions: give the run another branch"
        )
    found = read_versions(kafka, run.model_copy(update={"branch": point.branch}))
    manifest = found.manifests.get(point.version)
    if manifest is None:
        raise VersionError(f"branch {point.branch} of run {run.run_id} has no version {point.version}")
    oldest = min(graph.manifests.values(), key=lambda manifest: manifest.version, default=None)
    if oldest is None:
        return found
    if (oldest.version, oldest.fingerprint) != (manifest.version, manifest.fingerprint):
        raise VersionError(
            f"branch {run.branch} begins with version {oldest.version}, not with version "
            f"{point.version} of branch {point.branch}"
        )
    return None


def weights_folder(store: StoreSettings, run: RunSettings) -> str:
    """Return the folder for those objects of a branch's versions that are too large for the log."""
    return f"{store.root.rstrip('/')}/{run.run_id}/weights/{run.branch}"


class VersionLog:
    """Committed versions of one branch. The next one continues the newest, or the one that `go_back` chose.

    Args:
        producer: writes the manifests.
        graph: the versions in the log.
        incarnation: for a branch that begins here; empty for a new one.
    """

    def __init__(
        self,
        producer: AckedWriter,
        run: RunSettings,
        store: StoreSettings,
        graph: VersionGraph,
        incarnation: str = "",
    ) -> None:
        self._producer, self._run, self._store = producer, run, store
        self.graph = graph
        self._back: int | None = None
        self._incarnation = incarnation

    @property
    def head(self) -> int | None:
        """The version that the next one continues; None before the first."""
        return self.graph.newest_version if self._back is None else self._back

    def go_back(self, version: int) -> None:
        """Let the next version continue `version`. Raises VersionError if the log does not have it."""
        if version not in self.graph.manifests:
            raise VersionError(
                f"run {self.graph.run_id}, branch {self.graph.branch}, has no version {version} to go back to"
            )
        self._back = None if version == self.graph.newest_version else version

    def read_again(self, graph: VersionGraph) -> None:
        """Continue with the log's present versions; the head is kept, unless there is a newer version."""
        if graph.newest_version != self.graph.newest_version:
            self._back = None
        self.graph = graph

    def require_next(self, version: int, parent: int | None) -> None:
        """Raise VersionError unless `version` may be the next one and `parent` is the head."""
        newest = self.graph.newest_version
        if parent != self.head:
            head = "newest version" if self._back is None else "version gone back to"
            raise VersionError(
                f"version {version} names parent {parent}, the {head} of run {self.graph.run_id}, branch "
                f"{self.graph.branch}, in the log is {self.head}"
            )
        if newest is not None and version <= newest:
            raise VersionError(f"version {version} is not in the log and would come after {newest}: numbers only rise")

    def write(
        self,
        mark: VersionMark,
        shards: Sequence[ShardReport],
        tensors: Sequence[TensorInfo],
        anchor: Anchor | None,
    ) -> Manifest:
        """Write the manifest of a version, wait for its acknowledgement, and return the manifest as written.

        Args:
            mark: the trainer's metadata of the version.
            shards: every shard of the delta from `mark.parent`, acknowledged; empty if that is None.
            tensors: every tensor of the version.
            anchor: the version's anchor, whole.

        Raises VersionError if the version is not the next one, DeliveryError if the log does not acknowledge it (the
        log may contain it nevertheless), StoreUnavailableError if the store fails.
        """
        self.require_next(mark.version, mark.parent)
        ordered = sorted(shards, key=lambda shard: shard.position.shard)
        fingerprint, published_at, incarnation = total_fingerprint(tensors).hex(), now_us(), self.graph.incarnation
        if self.graph.newest is None:
            identity = f"{self._run.run_id}/{self._run.branch}/{fingerprint}/{published_at}"
            incarnation = self._incarnation or hashlib.sha256(identity.encode()).hexdigest()[:16]
        made = Manifest(
            run_id=self._run.run_id,
            branch=self._run.branch,
            **asdict(mark),
            n_elements=sum(prod(tensor.shape) for tensor in tensors),
            n_changed=sum(shard.n_changed for shard in ordered),
            delta_bytes=sum(shard.position.n_bytes for shard in ordered),
            shards=[shard.position for shard in ordered],
            tensors=list(tensors),
            fingerprint=fingerprint,
            anchor=anchor,
            published_at=published_at,
            incarnation=incarnation,
        )
        manifest = fit_record(made, Codec(), weights_folder(self._store, self._run), CLAIM_CHECK_BYTES)
        self._producer.send_acked(Topic.MANIFESTS, [(self._run.branch, manifest)])
        return manifest

    def wrote(self, manifest: Manifest) -> None:
        """Record a manifest that `write` wrote, here or on another rank: the next version continues it."""
        observe_published(self.graph, manifest)
        self._back = None


def anchor_due(since: tuple[int, int, int], delta_bytes: int, settings: PublishSettings) -> bool:
    """Return whether the next version, with a delta of `delta_bytes`, gets an anchor: by count or by bytes.

    The bytes are those of the deltas that a reader needs to reach the next version from the last anchor.

    Args:
        since: `VersionGraph.since_anchor` of the version that the next one continues.
    """
    versions, bytes_since, anchor_bytes = since
    if versions + 1 >= settings.anchor_every:
        return True
    return bytes_since + delta_bytes > settings.anchor_bytes_ratio * anchor_bytes
