"""The effect of a link on packets, as pure logic: rate, queue, loss and delay of one direction.

Invariants: packets leave in the order of their arrival, none before its time; the same seed drops the same packets; a
packet waits in the queue no longer than `queue_ms`.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LinkShape:
    """How a link treats the packets of each of its two directions."""

    delay_ms: float = 0.0
    """Delay in one direction."""
    loss: float = 0.0
    """Share of packets that are dropped at random, 0 to 1."""
    bits_per_second: float = 0.0
    """Rate; 0 for no limit."""
    queue_ms: float = 250.0
    """The delay that a full queue adds; further packets are dropped, as by a router."""
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The fields, for a command line."""
        return asdict(self)


@dataclass(slots=True)
class Counts:
    """Packet counts of one direction."""

    packets: int = 0
    n_bytes: int = 0
    lost: int = 0
    overflowed: int = 0


class Direction:
    """One direction of a link. Times are in seconds of any one clock."""

    def __init__(self, shape: LinkShape, seed: int) -> None:
        self._shape = shape
        self._random = random.Random(seed)
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._sent_at = 0.0
        self.counts = Counts()

    def offer(self, packet: bytes, now: float) -> None:
        """Put a packet into the link, or drop it."""
        if self._random.random() < self._shape.loss:
            self.counts.lost += 1
            return
        start = max(now, self._sent_at)
        if start - now > self._shape.queue_ms / 1e3:
            self.counts.overflowed += 1
            return
        rate = self._shape.bits_per_second
        self._sent_at = start + (8 * len(packet) / rate if rate else 0.0)
        self._waiting.append((self._sent_at + self._shape.delay_ms / 1e3, packet))

    def due(self, now: float) -> list[bytes]:
        """Remove and return the packets that leave the link by `now`, in order."""
        ready = []
        while self._waiting and self._waiting[0][0] <= now:
            packet = self._waiting.popleft()[1]
            self.counts.packets += 1
            self.counts.n_bytes += len(packet)
            ready.append(packet)
        return ready

    def next_at(self) -> float | None:
        """Return when the next packet leaves; None while none waits."""
        return self._waiting[0][0] if self._waiting else None
