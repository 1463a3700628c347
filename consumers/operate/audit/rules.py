"""What an audit holds a log to."""

from __future__ import annotations

from dataclasses import dataclass

MINUTE_US = 60_000_000


@dataclass(frozen=True, slots=True)
class AuditRules:
    """The settings that decide what is a fault and what is merely under way."""

    run_id: str
    ended: bool = False
    """Nobody plays rollouts any more: what has no result by now is lost, whatever its deadline."""
    complete: bool = False
    """The run is over: whatever is still open is a fault, what waits for the trainer included."""
    last_step: int | None = None
    """The step with which the run was to end, where that is known: what is left over after it is no fault."""
    allow_truncated: bool = False
    """Records that are past a topic's retention are no fault; what they would prove is not checked."""
    grace_us: int = 10 * MINUTE_US
    """How long after its deadline, in event time, something may still be on its way."""
    horizon_us: int = 48 * 60 * MINUTE_US
    """How long after it was served an interaction may wait for its end."""
