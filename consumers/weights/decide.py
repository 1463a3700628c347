"""An operator's decision about which version a branch serves: what may be decided, and who has followed it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tidemill.consumers.weights.chain import Chain
from tidemill.kernels.weights.graph import VersionError
from tidemill.schemas.gate_decisions import followed
from tidemill.schemas.records import GateDecision, GateVerdict, Manifest, WeightAck


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
            _require_servable(chain, version, anchor_exists)
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


def _require_servable(chain: Chain, version: int, anchor_exists: Callable[[Manifest], bool]) -> None:
    refusals = chain.refusals.get(version, {})
    if refusals and not chain.proofs.get(version):
        replica, reason = next(iter(refusals.items()))
        raise VersionError(
            f"version {version} was refused by {', '.join(refusals)} and proved by none; {replica} says: {reason}"
        )
    chain.require_path(version, anchor_exists)


@dataclass(slots=True)
class Following:
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
