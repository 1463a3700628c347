"""The replica's side of `weights.acks` and `staleness`: what it holds, proved or not, at what cost and lag.

Its record of lag is the trainer's `Staleness` with stage "serve". Its one `LagCount` counts requests, not tokens:
`tokens` is the number of requests that were in flight when the version was served, 0 where none was or the version was
refused. Records of another stage are the trainer's and count trained tokens: every reader picks its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tidemill.schemas.records import AckStatus, LagCount, Manifest, Staleness, WeightAck


class WriteRefusedError(ValueError):
    """Ranks of the engine could not write a version; the message names them and the reasons."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What a version's way into the engine cost; milliseconds, 0 for what was not reached."""

    apply_ms: float = 0.0
    pause_ms: float = 0.0
    """How long the engine's loop was held, between two steps. Of engines that compute together: from asking them to
    pause until all had resumed."""
    decode_step_ms: float = 0.0
    """The engine's own median time between steps over the last seconds; 0 when idle."""
    requests_in_flight: int = 0
    stage_ms: float = 0.0
    """How long the slowest rank prepared its write before the engine was held, while tokens flowed."""
    fetch_ms: float = 0.0
    decode_ms: float = 0.0
    proof_ms: float = 0.0
    step_to_served_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Proof:
    """Fingerprints computed from the engine's live tensors."""

    total: str
    """Sum over the tensors, hexadecimal; empty when an element is no version's value."""
    tensors: Mapping[str, str]
    damage: str
    """Why there is no fingerprint; empty when there is one."""
    proof_ms: float

    def objection(self, expected: str, tensors: Mapping[str, str]) -> str:
        """Why the live tensors are not the version with these fingerprints; empty when they are."""
        if self.damage:
            return self.damage
        wrong = sorted(name for name, value in tensors.items() if self.tensors.get(name) != value)
        if wrong:
            return f"{len(wrong)} live tensors are not the version's, the first is {wrong[0]}"
        return "" if self.total == expected else "the live tensors' fingerprints do not add up to the version's"


Write = Callable[[WeightAck | Staleness], None]


@dataclass(slots=True)
class ReplicaStatus:
    """One replica now. Times in microseconds since the Unix epoch, durations in milliseconds."""

    replica_id: str
    region: str
    run_id: str
    branch: str
    incarnation: str
    pid: int
    pool: str = ""
    """The pool that it serves in; empty for none."""
    started_at: int = 0
    version: int = -1
    """The version served, proved from the live tensors."""
    fingerprint: str = ""
    serving_format: str = ""
    """Format of few bits whose values its weights are, dequantised; empty where they are of none."""
    applied: int = 0
    """Versions applied in place by this process."""
    refused: int = 0
    """Versions refused by this process."""
    last_pause_ms: float = 0.0
    last_reason: str = ""
    """Why the last version was refused; empty when none was."""


class Ledger:
    """Writes acknowledgements, each followed by the lag, and keeps the status.

    Args:
        status: the replica as it starts.
        write: takes the records, in order.
        now_us: the time, microseconds since the epoch.
        head: the newest version seen in the log.
    """

    def __init__(self, status: ReplicaStatus, write: Write, now_us: Callable[[], int], head: Callable[[], int]) -> None:
        self.status = status
        self._write, self._now_us, self._head = write, now_us, head

    def document(self) -> dict[str, Any]:
        """The status, and `head`: the newest version seen in the log."""
        return {**asdict(self.status), "head": self._head()}

    def since_us(self, moment_us: int) -> float:
        """Milliseconds from a recorded time to now."""
        return max(0, self._now_us() - moment_us) / 1e3

    def served(self, status: AckStatus, manifest: Manifest, cost: Applied, reason: str = "") -> None:
        """`manifest`'s version was proved from the live tensors and is served."""
        now = self.status
        now.version, now.fingerprint = manifest.version, manifest.fingerprint
        now.serving_format, now.last_pause_ms = manifest.serving_format, cost.pause_ms
        now.applied += 1
        self._say(status, manifest, cost, reason, manifest.fingerprint)

    def refuse(self, manifest: Manifest, reason: str, cost: Applied, fingerprint: str = "") -> None:
        """`manifest`'s version is not served; `fingerprint` is what the live tensors had, when it came that far."""
        self.status.refused += 1
        self.status.last_reason = reason
        # A write that was taken back is no update: only its preparation and its proof are told.
        cost = replace(cost, apply_ms=0.0, pause_ms=0.0, decode_step_ms=0.0, requests_in_flight=0)
        self._say(AckStatus.REFUSED, manifest, cost, reason, fingerprint)

    def _say(self, status: AckStatus, manifest: Manifest, cost: Applied, reason: str, fingerprint: str) -> None:
        now, at, costs = self.status, self._now_us(), asdict(cost)
        del costs["stage_ms"]
        who: dict[str, Any] = {"run_id": now.run_id, "replica_id": now.replica_id, "region": now.region}
        self._write(
            WeightAck(
                **who,
                branch=now.branch,
                incarnation=now.incarnation,
                pid=now.pid,
                version=manifest.version,
                serving_version=now.version,
                status=status,
                reason=reason,
                fingerprint=fingerprint,
                expected_fingerprint=manifest.fingerprint,
                **costs,
                at=at,
            )
        )
        lag = LagCount(lag=max(0, self._head() - now.version), tokens=cost.requests_in_flight)
        self._write(Staleness(**who, stage="serve", step=manifest.step, version=now.version, lag=[lag], at=at))
