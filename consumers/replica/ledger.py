"""The replica's records in `weights.acks` and `staleness`: its version, proved or refused, with timings and lag.

Its record of lag is a `Staleness`, like the trainer's, with stage "serve". Its one `LagCount` counts requests, not
tokens: `tokens` is the number of requests in flight when the version was served, 0 if there was none or the version
was refused. Records of other stages are the trainer's and count trained tokens: every reader selects its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tidemill.schemas.records import AckStatus, LagCount, Manifest, Staleness, WeightAck


class WriteRefusedError(ValueError):
    """Error for ranks of the engine that could not write a version; the message names them and the reasons."""


@dataclass(frozen=True, slots=True)
class Applied:
    """Timings of a version's update, in milliseconds; 0 for a phase that was not reached."""

    apply_ms: float = 0.0
    pause_ms: float = 0.0
    """How long the engine's loop was stopped, between two steps. For engines that compute together: from the request
    to pause until all had resumed."""
    decode_step_ms: float = 0.0
    """The engine's own median time between steps over the last seconds; 0 when idle."""
    requests_in_flight: int = 0
    stage_ms: float = 0.0
    """How long the slowest rank prepared its write before the engine was stopped, while it sampled."""
    fetch_ms: float = 0.0
    decode_ms: float = 0.0
    proof_ms: float = 0.0
    step_to_served_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Proof:
    """Fingerprints computed from the engine's live tensors."""

    total: str
    """Sum over the tensors, hexadecimal; empty if an element is not a value of any version."""
    tensors: Mapping[str, str]
    damage: str
    """Why there is no fingerprint; empty if there is one."""
    proof_ms: float

    def objection(self, expected: str, tensors: Mapping[str, str]) -> str:
        """Return why the live tensors are not the version with these fingerprints; empty if they are."""
        if self.damage:
            return self.damage
        wrong = sorted(name for name, value in tensors.items() if self.tensors.get(name) != value)
        if wrong:
            return f"{len(wrong)} live tensors are not the version's, the first is {wrong[0]}"
        return "" if self.total == expected else "the live tensors' fingerprints do not add up to the version's"


Write = Callable[[WeightAck | Staleness], None]


@dataclass(slots=True)
class ReplicaStatus:
    """Present status of one replica. Times in microseconds since the Unix epoch, durations in milliseconds."""

    replica_id: str
    region: str
    run_id: str
    branch: str
    incarnation: str
    pid: int
    pool: str = ""
    """The replica's pool; empty for none."""
    started_at: int = 0
    version: int = -1
    """The version served, proved from the live tensors."""
    fingerprint: str = ""
    serving_format: str = ""
    """Low-bit format to which its weights are rounded (dequantised values); empty without one."""
    serving_activations: str = ""
    """Format to which the inputs of its linear layers are rounded; empty without one."""
    applied: int = 0
    """Versions proved and served by this process, the first one included."""
    refused: int = 0
    """Versions refused by this process."""
    last_pause_ms: float = 0.0
    last_reason: str = ""
    """Why the last version was refused; empty if none was."""


class Ledger:
    """Writer of acknowledgements, each followed by the lag, and of the status.

    Args:
        now_us: returns the time, microseconds since the epoch.
        head: returns the newest version seen in the log.
    """

    def __init__(self, status: ReplicaStatus, write: Write, now_us: Callable[[], int], head: Callable[[], int]) -> None:
        self.status = status
        self._write, self._now_us, self._head = write, now_us, head

    def document(self) -> dict[str, Any]:
        """Return the status, and `head`: the newest version seen in the log."""
        return {**asdict(self.status), "head": self._head()}

    def since_us(self, moment_us: int) -> float:
        """Return the milliseconds from a recorded time to now."""
        return max(0, self._now_us() - moment_us) / 1e3

    def served(self, status: AckStatus, manifest: Manifest, cost: Applied, reason: str = "") -> None:
        """Record that `manifest`'s version was proved from the live tensors and is served."""
        now = self.status
        now.version, now.fingerprint = manifest.version, manifest.fingerprint
        now.serving_format, now.serving_activations = manifest.serving_format, manifest.serving_activations
        now.last_pause_ms = cost.pause_ms
        now.applied += 1
        self._say(status, manifest, cost, reason, manifest.fingerprint)

    def refuse(self, manifest: Manifest, reason: str, cost: Applied, fingerprint: str = "") -> None:
        """Record that `manifest`'s version is not served; `fingerprint` is the live tensors', if it was computed."""
        self.status.refused += 1
        self.status.last_reason = reason
        # A write that was undone is not an update: only its preparation and its proof are reported.
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
