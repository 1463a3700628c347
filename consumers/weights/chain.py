"""One branch as the log tells it: its versions, the decisions about them, and which replicas proved them; as rows.

`Chain` is pure; `read_chain` fills one from the log as it is now. `decision` says what an operator may decide about the
version that the branch serves, and `DecisionFollowers` who has followed it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tidemill.kernels.weights.graph import UnknownVersion, VersionError, VersionGraph
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.gate_decisions import BranchDecisions, followed
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import AckStatus, GateDecision, GateVerdict, Manifest, Record, WeightAck


class Chain(VersionGraph):
    """The versions of one branch of one run, with what was said of them. `observe` takes records in log order."""

    def __init__(self, run_id: str, branch: str, kept_from: Mapping[int, int] | None = None) -> None:
        super().__init__(run_id, branch, kept_from)
        self.gate = BranchDecisions()
        self.decisions: list[GateDecision] = []
        self.proofs: dict[int, set[str]] = {}
        """Replicas that proved a version from their live tensors."""
        self.refusals: dict[int, dict[str, str]] = {}
        """Reasons by replica, by version."""
        self.replicas: dict[str, WeightAck] = {}
        """The last acknowledgement of each replica."""

    def observe(self, record: Record | None) -> str:
        """Take a record in; records of other runs, branches and kinds are left alone.

        Returns why a manifest or a skip-delta is not taken; else an empty text.
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
        """The newest version. Raises UnknownVersion for a branch without one."""
        if self.newest is None:
            raise UnknownVersion(
                f"run {self.run_id} has no version on branch {self.branch}: name another with --run-id or --branch"
            )
        return self.newest

    @property
    def limit(self) -> GateDecision | None:
        """The decision that limits what is served now; None while the head may be."""
        return self.gate.limit


CLIENT_ID = "tidemill-weights"


def read_chain(kafka: KafkaSettings, run: RunSettings) -> Chain:
    """Everything that the log says of the run's branch.

    Raises LookupError when the topics do not exist, TimeoutError when the log does not answer.
    """
    chain = Chain(run.run_id, run.branch, kept_from(kafka))
    # One topic after the other: an acknowledgement or a decision means nothing before the manifests are known.
    for topic in (Topic.MANIFESTS, Topic.GATE, Topic.ACKS):
        with LogReader(kafka, [topic], client_id=CLIENT_ID) as reader:
            for located in reader.read_to_end():
                chain.observe(located.record)
    return chain


def kept_from(kafka: KafkaSettings) -> dict[int, int]:
    """First offset that the log keeps of the deltas, by partition."""
    with LogReader(kafka, [Topic.DELTAS], client_id=CLIENT_ID) as reader:
        return {partition: offset for (_, partition), offset in reader.next_offsets().items()}


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version of a chain."""

    version: int
    parent: int | None
    step: int
    learning_rate: float
    n_elements: int
    n_changed: int
    density: float
    """Changed elements of all elements."""
    delta_bytes: int
    bytes_per_changed: float | None
    """None where nothing changed."""
    shards: int
    anchor: str | None
    """Where the anchor lies."""
    skips: list[int]
    """Older versions from which a skip-delta leads here."""
    proved_by: list[str]
    """Replicas that proved the version from their live tensors."""
    refused_by: dict[str, str]
    """Replicas that refused it, with the reason."""
    decisions: list[str]
    """The gate's decisions on it, in order."""
    expired: bool
    """The log no longer keeps its delta."""
    fork: str
    """How it was published twice; empty when it was not."""
    fingerprint: str
    published_at: int
    serving_format: str
    """Format of few bits whose values the weights are; empty where they are of none."""


def describe(decision: GateDecision) -> str:
    version = "" if decision.version is None else f" {decision.version}"
    return f"{decision.verdict.value}{version} by {decision.decided_by}: {decision.reason}"


def rows(chain: Chain, newest: int | None = None) -> list[VersionRow]:
    """The versions in ascending order; the `newest` so many of them, or all."""
    return [
        VersionRow(
            version=version,
            parent=manifest.parent,
            step=manifest.step,
            learning_rate=manifest.learning_rate,
            n_elements=manifest.n_elements,
            n_changed=manifest.n_changed,
            density=manifest.n_changed / manifest.n_elements if manifest.n_elements else 0.0,
            delta_bytes=manifest.delta_bytes,
            bytes_per_changed=manifest.delta_bytes / manifest.n_changed if manifest.n_changed else None,
            shards=len(manifest.shards),
            anchor=manifest.anchor.uri if manifest.anchor else None,
            skips=[delta.base for delta in chain.skip_deltas() if delta.version == version],
            proved_by=sorted(chain.proofs.get(version, ())),
            refused_by=dict(chain.refusals.get(version, {})),
            decisions=[describe(made) for made in chain.decisions if made.version == version],
            expired=bool(chain.expired(manifest.shards)),
            fork=chain.forks.get(version, ""),
            fingerprint=manifest.fingerprint,
            published_at=manifest.published_at,
            serving_format=manifest.serving_format,
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
    """The record of an operator's decision that can be carried out.

    Args:
        version: None for a release.
        at: microseconds since the epoch.

    Raises UnknownVersion, VersionError when the version was rejected before; and of a version that is to be served,
    Unreachable when no anchor leads to it any more, VersionError when it was refused by every replica that met it.
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
    """Which replicas have followed a decision.

    Every replica whose last word is at most `recent_us` old when the decision is made is waited for, and every other
    one from its next word on.
    """

    decision: GateDecision
    head: int
    """The newest version when the decision was made."""
    recent_us: int
    serving: dict[str, int] = field(default_factory=dict)
    """The version that each replica serves that is waited for."""

    def observe(self, ack: WeightAck) -> None:
        """Take a replica's word in."""
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
        """Replicas that serve a newer version than the one they should hold, which a hold leaves where they are."""
        version = self.decision.version
        if self.decision.verdict is not GateVerdict.HOLD or version is None:
            return {}
        return {replica: serving for replica, serving in self.serving.items() if serving > version}
