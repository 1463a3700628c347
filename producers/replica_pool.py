"""Which replica an episode talks to: the least loaded one that is not being left alone after a failure.

Pure: the caller gives the time. What holds: an episode keeps its replica, and so its prefix cache, until it fails; a
failing replica is left alone for twice as long after each failure, up to a limit, and is trusted again on success.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Replica:
    episodes: int = 0
    failures: int = 0
    rests_until: float = 0.0


class ReplicaPool:
    """Load and health of a fixed list of replicas. Times are seconds of one monotonic clock."""

    def __init__(self, addresses: Sequence[str], backoff_s: float, backoff_limit_s: float) -> None:
        self._replicas = {address.rstrip("/"): _Replica() for address in addresses}
        self._backoff_s = backoff_s
        self._backoff_limit_s = backoff_limit_s

    @property
    def is_empty(self) -> bool:
        """Whether there is no replica at all."""
        return not self._replicas

    def pick(self, now: float) -> str | None:
        """Take a place on the least loaded replica that is not resting; None when all rest."""
        awake = [address for address, replica in self._replicas.items() if replica.rests_until <= now]
        if not awake:
            return None
        address = min(awake, key=lambda candidate: self._replicas[candidate].episodes)
        self._replicas[address].episodes += 1
        return address

    def release(self, address: str) -> None:
        """Give the place back."""
        self._replicas[address].episodes -= 1

    def failed(self, address: str, now: float) -> None:
        """A request failed. Requests that were in flight together count as one failure."""
        replica = self._replicas[address]
        if replica.rests_until > now:
            return
        rest = min(self._backoff_s * 2 ** min(replica.failures, 32), self._backoff_limit_s)
        replica.failures += 1
        replica.rests_until = now + rest

    def succeeded(self, address: str) -> None:
        """A request was answered."""
        replica = self._replicas[address]
        replica.failures = 0
        replica.rests_until = 0.0

    def next_wake(self) -> float:
        """When the first replica may be tried again."""
        return min(replica.rests_until for replica in self._replicas.values())
