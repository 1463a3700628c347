"""One branch as recorded in the log: its versions, the decisions on them, and the replicas that proved them; as rows.

`Chain` is pure; `read_chain` fills one from the present log. `decision` makes an operator's decision on the version
that the branch serves, if it is possible, and `DecisionFollowers` reports which replicas have followed it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.consumers.operate import picked
from tidemill.kernels.weights.graph import Unreachable, VersionError, VersionGraph
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.gate_decisions import BranchDecisions, followed
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import AckStatus, GateDecision, GateVerdict, Manifest, Record, WeightAck


class Chain(VersionGraph):
    """The versions of one branch of one run, with decisions and acknowledgements; `observe` takes them in log order."""

    def __init__(self, run_id: str, branch: str, kept_from: Mapping[int, int] | None = None) -> None:
        super().__init__(run_id, branch, kept_from)
        self.gate = BranchDecisions()
        self.decisions: list[GateDecision] = []
        self.proofs: dict[int, set[str]] = {}
        """Replicas that proved a version from their live tensors."""
        self.refusals: dict[int, dict[str, str]] = {}
        """For each version: reason by replica."""
        self.replicas: dict[str, WeightAck] = {}
        """The last acknowledgement of each replica."""

    def observe(self, record: Record | None) -> str:
        """Add a record; ignore records of other runs, branches and kinds.

        Returns why a manifest or a skip-delta is rejected, or an empty text.
        """
        objection = super().observe(record)
        if not isinstance(record, GateDecision | WeightAck):
            return objection
        if (record.run_id, record.branch) == (self.run_id, self.branch):
            if isinstance(record, GateDecision):
                self.gate.observe(record)
                self.decisions.append(record)
            else:
                self.replicas[record.replica_id] = record
                if record.status is AckStatus.REFUSED:
                    self.refusals.setdefault(record.version, {})[record.replica_id] = record.reason
                else:
                    self.proofs.setdefault(record.version, set()).add(record.replica_id)
        return objection

    @property
    def head(self) -> Manifest:
        """The newest version. Raises VersionError for a branch without one."""
        if self.newest is None:
            raise no_version(self.run_id, self.branch)
        return self.newest


def no_version(run_id: str, branch: str) -> VersionError:
    """Return the error of a command about a branch that has no version."""
    return VersionError(f"run {run_id} has no version on branch {branch}: name another with --run-id or --branch")


CLIENT_ID = "tidemill-weights"


def read_chain(kafka: KafkaSettings, run: RunSettings) -> Chain:
    """Read all records of the run's branch from the log.

    Raises LookupError if the topics do not exist, TimeoutError if the log does not answer.
    """
    chain = Chain(run.run_id, run.branch, kept_from(kafka))
    # One topic after the other: acknowledgements and decisions refer to manifests, which must be known first.
    for topic in (Topic.MANIFESTS, Topic.GATE, Topic.ACKS):
        with LogReader(kafka, [topic], client_id=CLIENT_ID) as reader:
            for located in reader.read_to_end():
                chain.observe(located.record)
    return chain


def kept_from(kafka: KafkaSettings) -> dict[int, int]:
    """Return the first offset of the deltas that the log still has, by partition."""
    with LogReader(kafka, [Topic.DELTAS], client_id=CLIENT_ID) as reader:
        return {partition: offset for (_, partition), offset in reader.next_offsets().items()}


def default_start(chain: Chain) -> int:
    """Return the oldest anchor after which the log has every delta; if there is none, the newest anchor.

    Raises Unreachable for a chain without an anchor.
    """
    anchors = [version for version, manifest in sorted(chain.manifests.items()) if manifest.anchor is not None]
    if not anchors:
        raise Unreachable(f"branch {chain.branch} of run {chain.run_id} has no anchor to verify from")
    last_expired = max((v for v, manifest in chain.manifests.items() if chain.expired(manifest.shards)), default=-1)
    return next((version for version in anchors if version >= last_expired), anchors[-1])


def describe(decision: GateDecision) -> str:
    version = "" if decision.version is None else f" {decision.version}"
    return f"{decision.verdict.value}{version} by {decision.decided_by}: {decision.reason}"


OF_MANIFEST = (
    "version parent step learning_rate n_elements n_changed delta_bytes fingerprint published_at serving_format "
    "serving_activations"
)


def rows(chain: Chain, newest: int | None = None) -> list[dict[str, Any]]:
    """Return the versions in ascending order; the last `newest` of them, or all.

    Returns:
        of each version the fields `OF_MANIFEST` of its manifest; the `density` of changed elements and the bytes of
        delta for each of them (None if nothing changed); the number of `shards`; the URI of its `anchor`; the older
        versions from which `skips` lead to it; the replicas that proved it from their live tensors (`proved_by`) or
        refused it, with the reason (`refused_by`); the gate's `decisions` on it, in order; whether the log has deleted
        its delta (`expired`); and a `fork`, a second publication with other contents, in words (empty for none).
    """
    return [
        picked(
            manifest,
            OF_MANIFEST,
            density=manifest.n_changed / manifest.n_elements if manifest.n_elements else 0.0,
            bytes_per_changed=manifest.delta_bytes / manifest.n_changed if manifest.n_changed else None,
            shards=len(manifest.shards),
            anchor=manifest.anchor.uri if manifest.anchor else None,
            skips=[delta.base for delta in chain.skip_deltas() if delta.version == version],
            proved_by=sorted(chain.proofs.get(version, ())),
            refused_by=dict(chain.refusals.get(version, {})),
            decisions=[describe(made) for made in chain.decisions if made.version == version],
            expired=bool(chain.expired(manifest.shards)),
            fork=chain.forks.get(version, ""),
        )
        for version, manifest in sorted(chain.manifests.items())[-newest if newest else 0 :]
    ]


def decision(
    chain: Chain,
    verdict: GateVerdict,
    version: int | None,
    reason: str,
    decided_by: str,
    at: int,
    anchor_exists: Callable[[Manifest], bool] = lambda _: True,
) -> GateDecision:
    """Return the record of an operator's decision, if the decision is possible.

    Args:
        version: None for a release.
        at: microseconds since the epoch.

    Raises VersionError if the version is unknown or was rejected before. For a version that is to be served, also
    Unreachable if no anchor leads to it, VersionError if replicas refused it and none proved it.
    """
    head = chain.head.version
    if version is not None:
        chain.manifest(version)
        if (rejected := chain.gate.rejected.get(version)) is not None:
            raise VersionError(f"version {version} was rejected by {rejected.decided_by}: {rejected.reason}")
        if verdict is not GateVerdict.REJECT:
            refusals = chain.refusals.get(version, {})
            if refusals and not chain.proofs.get(version):
                replica, why = next(iter(refusals.items()))
                raise VersionError(
                    f"version {version} was refused by {', '.join(refusals)} and proved by none; {replica} says: {why}"
                )
            chain.require_path(version, anchor_exists)
    return GateDecision(
        run_id=chain.run_id,
        branch=chain.branch,
        verdict=verdict,
        version=version,
        reason=reason,
        decided_by=decided_by,
        numbers={"head": float(head)},
        at=at,
    )


@dataclass(slots=True)
class DecisionFollowers:
    """The replicas that have, or have not, followed a decision.

    A replica counts if its last acknowledgement is at most `recent_us` older than the decision; any other replica
    counts from its next acknowledgement on.
    """

    decision: GateDecision
    head: int
    """The newest version when the decision was made."""
    recent_us: int
    serving: dict[str, int] = field(default_factory=dict)
    """The version that each of these replicas serves."""

    def observe(self, ack: WeightAck) -> None:
        if ack.at >= self.decision.at - self.recent_us:
            self.serving[ack.replica_id] = ack.serving_version

    @property
    def behind(self) -> dict[str, int]:
        """Replicas that have not followed yet, with the version that they serve."""
        return {
            replica: version
            for replica, version in self.serving.items()
            if not followed(self.decision, version, self.head)
        }

    @property
    def beyond(self) -> dict[str, int]:
        """Replicas that serve a newer version than the one held; a hold does not move them back."""
        version = self.decision.version
        if self.decision.verdict is not GateVerdict.HOLD or version is None:
            return {}
        return {replica: serving for replica, serving in self.serving.items() if serving > version}
