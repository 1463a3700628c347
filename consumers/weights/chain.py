"""The chain of one branch as the log tells it: versions, ways between them, decisions, and who proved what.

Pure: `observe` takes the records in log order, everything else answers from them. What a version is and which ways
lead to it is the replica's own `Lineage`, so that this agrees with what a replica does; what is added is what the log
no longer keeps, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tidemill.consumers.replica.gate import Gate
from tidemill.kernels.weights.graph import Delta, Lineage, Way
from tidemill.schemas.records import (
    AckStatus,
    GateDecision,
    Manifest,
    Record,
    ShardPosition,
    SkipDelta,
    WeightAck,
)


class ChainError(ValueError):
    """The chain does not have what was asked for; the message says what it has."""


class UnknownVersion(ChainError):
    """No manifest of the branch has this version."""


class Unreachable(ChainError):
    """No anchor leads to a version over deltas that are still kept."""


@dataclass(frozen=True, slots=True)
class Expired:
    """A chunk that the log's retention has removed."""

    partition: int
    offset: int
    kept_from: int

    def __str__(self) -> str:
        return (
            f"expired: its chunk at {self.partition}:{self.offset} is past the log's retention, partition "
            f"{self.partition} begins at {self.kept_from}"
        )


@dataclass(slots=True)
class Chain:
    """One branch of one run."""

    run_id: str
    branch: str
    kept_from: Mapping[int, int] = field(default_factory=dict)
    """First offset that the log still keeps, by partition of the deltas; partitions not named keep everything."""
    lineage: Lineage = field(default_factory=Lineage)
    skips: dict[int, dict[int, Delta]] = field(default_factory=dict)
    """Skip-deltas by the version that they start from, then by the version that they make."""
    forks: dict[int, str] = field(default_factory=dict)
    """Versions that were published twice with different contents, and how they differ."""
    gate: Gate = field(default_factory=Gate)
    decisions: list[GateDecision] = field(default_factory=list)
    proofs: dict[int, set[str]] = field(default_factory=dict)
    """Replicas that proved a version from their live tensors."""
    refusals: dict[int, dict[str, str]] = field(default_factory=dict)
    """Reasons by replica, by version."""
    replicas: dict[str, WeightAck] = field(default_factory=dict)
    """The last word of each replica."""

    def observe(self, record: Record | None) -> None:
        """Take a record in; records of other runs, branches and kinds are left alone."""
        if not isinstance(record, Manifest | SkipDelta | GateDecision | WeightAck):
            return
        if (record.run_id, record.branch) != (self.run_id, self.branch):
            return
        match record:
            case Manifest():
                self._take_manifest(record)
            case SkipDelta():
                self._take_skip(record)
            case GateDecision():
                self.gate.observe(record)
                self.decisions.append(record)
            case WeightAck():
                self._take_ack(record)

    @property
    def manifests(self) -> Mapping[int, Manifest]:
        """The versions; of one that was published twice, the first contents."""
        return self.lineage.manifests

    @property
    def head(self) -> Manifest:
        """The newest version. Raises UnknownVersion for an empty chain."""
        if not self.manifests:
            raise UnknownVersion(
                f"run {self.run_id} has no version on branch {self.branch}: name another with --run-id or --branch"
            )
        return self.manifests[self.lineage.head]

    @property
    def limit(self) -> GateDecision | None:
        """The decision that limits what is served now; None while the head may be."""
        return self.gate.limit

    def manifest(self, version: int) -> Manifest:
        """A version's manifest. Raises UnknownVersion."""
        if version not in self.manifests:
            raise UnknownVersion(
                f"version {version} is not on branch {self.branch} of run {self.run_id}: {self._known(version)}"
            )
        return self.manifests[version]

    def delta(self, version: int) -> Delta | None:
        """The delta from a version's parent; None for a version that exists only as an anchor."""
        manifest = self.manifest(version)
        if manifest.parent is None:
            return None
        return Delta(manifest, manifest.parent, tuple(manifest.shards), manifest.delta_bytes)

    def expired(self, shards: Iterable[ShardPosition]) -> Expired | None:
        """The first chunk that the log no longer keeps; None when it keeps all of them."""
        for shard in shards:
            kept_from = self.kept_from.get(shard.partition, 0)
            if shard.uri is None and shard.offsets and min(shard.offsets) < kept_from:
                return Expired(shard.partition, min(shard.offsets), kept_from)
        return None

    def way(self, version: int, anchor_stands: Callable[[Manifest], bool] = lambda _: True) -> Way:
        """The way with the fewest bytes from an anchor to a version, over deltas that the log keeps.

        Args:
            anchor_stands: whether a manifest's anchor can be used.

        Raises UnknownVersion, or Unreachable with what stands in every way.
        """
        self.manifest(version)
        self._refuse_expired()
        while (way := self.lineage.way(version, None)) is not None:
            if way.anchor is None or anchor_stands(way.anchor):
                return way
            self.lineage.refuse_anchor(way.anchor.version)
        raise Unreachable(f"version {version} cannot be built: {self._obstacle(version)}")

    def _refuse_expired(self) -> None:
        for version in self.manifests:
            own = [delta] if (delta := self.delta(version)) is not None else []
            for delta in [*own, *self.skips.get(version, {}).values()]:
                if self.expired(delta.shards):
                    self.lineage.refuse_delta(delta.base, delta.version)

    def _obstacle(self, version: int) -> str:
        """The first thing that stands in the way over parents."""
        at = version
        while (delta := self.delta(at)) is not None:
            expired = self.expired(delta.shards)
            if expired:
                return f"the delta of version {at} is {expired}; no usable anchor lies after it"
            if delta.base not in self.manifests:
                return f"its ancestor {delta.base} is not in the log, and no usable anchor lies after it"
            if delta.base >= at:
                return f"version {at} names the later version {delta.base} as its parent"
            at = delta.base
        return f"the anchor of version {at}, on which it rests, is missing or damaged"

    def _known(self, version: int) -> str:
        if not self.manifests:
            return "it has none"
        nearest = sorted(self.manifests, key=lambda known: (abs(known - version), known))[:3]
        return f"it has {min(self.manifests)} to {max(self.manifests)}, the nearest {', '.join(map(str, nearest))}"

    def _take_manifest(self, manifest: Manifest) -> None:
        objection = self.lineage.add(manifest)
        if objection:
            self.forks.setdefault(manifest.version, objection)

    def _take_skip(self, skip: SkipDelta) -> None:
        # A skip-delta comes after the manifest of its version; one without is of no use to anybody.
        if skip.version in self.manifests and not self.lineage.add_skip(skip):
            made = Delta(self.manifests[skip.version], skip.base, tuple(skip.shards), skip.n_bytes)
            self.skips.setdefault(skip.base, {}).setdefault(skip.version, made)

    def _take_ack(self, ack: WeightAck) -> None:
        self.replicas[ack.replica_id] = ack
        if ack.status is AckStatus.REFUSED:
            self.refusals.setdefault(ack.version, {})[ack.replica_id] = ack.reason
        else:
            self.proofs.setdefault(ack.version, set()).add(ack.replica_id)
