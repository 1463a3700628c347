"""The replica's side of `weights.acks` and `staleness`: what it holds, proved or not, at what cost and lag.

Its record of lag is the trainer's `Staleness` with stage "serve". Its one `LagCount` counts requests, not tokens:
`tokens` is the number of requests that were in flight when the version was served, 0 where none was or the version was
refused. Records of another stage are the trainer's and count trained tokens: every reader picks its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tidemill.schemas.records import AckStatus, LagCount, Manifest, Staleness, WeightAck


class WriteRefusedError(ValueError):
    """Ranks of the engine could not write a version; the message names them and the reasons."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What one in-place update cost the engine; milliseconds."""

    apply_ms: float
    pause_ms: float
    """How long the engine's loop was held, between two steps. Of engines that compute together: from asking them to
    pause until all had resumed."""
    decode_step_ms: float
    """The engine's own median time between steps over the last seconds; 0 when idle."""
    requests_in_flight: int
    stage_ms: float = 0.0
    """How long the slowest rank prepared its write before the engine was held, while tokens flowed."""


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


@dataclass(frozen=True, slots=True)
class Identity:
    """Who acknowledges."""

    replica_id: str
    region: str
    run_id: str
    branch: str
    incarnation: str
    pid: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds that a version's way to the engine took; 0 for what was not reached."""

    fetch_ms: float = 0.0
    decode_ms: float = 0.0
    proof_ms: float = 0.0
    step_to_served_ms: float = 0.0


_NOT_APPLIED = Applied(0.0, 0.0, 0.0, 0)


class Ledger:
    """Writes acknowledgements, each followed by the lag, and keeps the counts that the status shows.

    Args:
        identity: who acknowledges.
        write: takes the records, in order.
        now_us: the time, microseconds since the epoch.
        head: the newest version seen in the log.
    """

    def __init__(self, identity: Identity, write: Write, now_us: Callable[[], int], head: Callable[[], int]) -> None:
        self.identity = identity
        self._write, self._now_us, self._head = write, now_us, head
        self.applied = 0
        self.refused = 0
        self.last_pause_ms = 0.0
        self.last_reason = ""
        self.version = -1
        self.fingerprint = ""
        self.serving_format = ""

    def since_us(self, moment_us: int) -> float:
        """Milliseconds from a recorded time to now."""
        return max(0, self._now_us() - moment_us) / 1e3

    def served(self, status: AckStatus, manifest: Manifest, applied: Applied, times: Timings, reason: str = "") -> None:
        """`manifest`'s version was proved from the live tensors and is served."""
        self.version, self.fingerprint = manifest.version, manifest.fingerprint
        self.serving_format = manifest.serving_format
        self.applied += 1
        self.last_pause_ms = applied.pause_ms
        self._say(manifest, self._ack(status, manifest, applied, times, reason, manifest.fingerprint))

    def refuse(self, manifest: Manifest, reason: str, times: Timings, fingerprint: str = "") -> None:
        """`manifest`'s version is not served; `fingerprint` is what the live tensors had, when it came that far."""
        self.refused += 1
        self.last_reason = reason
        self._say(manifest, self._ack(AckStatus.REFUSED, manifest, _NOT_APPLIED, times, reason, fingerprint))

    def _say(self, manifest: Manifest, ack: WeightAck) -> None:
        self._write(ack)
        self._write(serving_lag(ack, manifest.step, self._head()))

    def _ack(
        self, status: AckStatus, manifest: Manifest, applied: Applied, times: Timings, reason: str, fingerprint: str
    ) -> WeightAck:
        who = self.identity
        return WeightAck(
            replica_id=who.replica_id,
            region=who.region,
            run_id=who.run_id,
            branch=who.branch,
            incarnation=who.incarnation,
            pid=who.pid,
            version=manifest.version,
            serving_version=self.version,
            status=status,
            reason=reason,
            fingerprint=fingerprint,
            expected_fingerprint=manifest.fingerprint,
            fetch_ms=times.fetch_ms,
            decode_ms=times.decode_ms,
            pause_ms=applied.pause_ms,
            apply_ms=applied.apply_ms,
            proof_ms=times.proof_ms,
            step_to_served_ms=times.step_to_served_ms,
            decode_step_ms=applied.decode_step_ms,
            requests_in_flight=applied.requests_in_flight,
            at=self._now_us(),
        )


STAGE = "serve"


def serving_lag(ack: WeightAck, step: int, head: int) -> Staleness:
    """The lag that goes with an acknowledgement.

    Args:
        ack: what the replica just said.
        step: the optimizer step of the version that it speaks of.
        head: the newest version that the replica has seen in the log.
    """
    return Staleness(
        run_id=ack.run_id,
        replica_id=ack.replica_id,
        region=ack.region,
        stage=STAGE,
        step=step,
        version=ack.serving_version,
        lag=[LagCount(lag=max(0, head - ack.serving_version), tokens=ack.requests_in_flight)],
        at=ack.at,
    )
