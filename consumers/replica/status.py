"""What a replica says of itself at `GET /tidemill/status`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica now. Times in microseconds since the Unix epoch, durations in milliseconds."""

    replica_id: str
    region: str
    run_id: str
    branch: str
    pool: str
    """The pool that it serves in; empty for none."""
    pid: int
    incarnation: str
    started_at: int
    version: int
    """The version served, proved from the live tensors."""
    fingerprint: str
    serving_format: str
    """Format of few bits whose values its weights are, dequantised; empty where they are of none."""
    head: int
    """Newest version seen in the log."""
    applied: int
    """Versions applied in place by this process."""
    refused: int
    """Versions refused by this process."""
    last_pause_ms: float
    last_reason: str
    """Why the last version was refused; empty when none was."""
