"""The ranks that work together, one process or several: an error of one rank is raised on all; every wait has a limit.

Invariants: a call ends in the same way on every rank, with a value or with an error that names the failed rank; if a
rank died or hangs, the call ends on the others at the latest after the group's timeout. After `RanksLostError` the
group cannot be used again. One process needs no process group: `Ranks` itself only calls the function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from tidemill.kernels.compiled import Bits

T = TypeVar("T")


class RanksLostError(RuntimeError):
    """Error for a rank that died or did not answer in time; it is not known whether the common task was finished."""


class Ranks:
    """The processes that call the same methods in the same order. This class is one process.

    If a function given to `from_first`, `on_first` or `gather` raises an error on one rank, every rank raises an
    error of the same class that names the rank, or RuntimeError if the class cannot be made from a message
    alone; one process raises it unchanged. Such a function must not call these methods itself.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides and commits."""
        return self.rank == 0

    def from_first(self, make: Callable[[], T]) -> T:
        """Return the first rank's result of `make`, pickled, on every rank. Raises its errors, RanksLostError."""
        return make()

    def gather(self, make: Callable[[], T]) -> list[T]:
        """Run `make` on every rank; return its results in rank order on the first rank, nothing on the others.

        Raises an error of any rank's `make`, RanksLostError.
        """
        return [make()]

    def on_first(self, make: Callable[[], T]) -> T | None:
        """Run `make` on the first rank and return its result only there. Raises its errors, RanksLostError."""
        made: list[T] = []
        self.from_first(lambda: made.append(make()))
        return made[0] if made else None

    def sibling(self) -> Ranks:
        """Return the same ranks for the concurrent calls of another thread; every rank calls this."""
        return self

    def send(self, values: Bits, to: int) -> None:
        """Send uN[n], contiguous, n not 0, to another rank, which receives it. Raises RanksLostError."""
        raise RanksLostError(f"one process has no rank {to} to send to")

    def receive(self, into: Bits, source: int) -> None:
        """Receive uN[n], contiguous, from another rank. Raises RanksLostError."""
        raise RanksLostError(f"one process has no rank {source} to receive from")


def open_ranks(timeout_s: float) -> Ranks:
    """Return all ranks of the job, with their own group: no rank waits longer than `timeout_s` for another.

    Returns one process if torch.distributed is not initialised. Every rank calls it. The timeout must be longer than
    the slowest rank needs to encode and send its shards, and than the first needs to rebuild the newest version.
    """
    # A job of several ranks has imported it; one process need not load it, which takes three seconds.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    from tidemill.kernels.weights.process_group import gloo_ranks

    return gloo_ranks(None, timeout_s)
