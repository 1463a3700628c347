"""The ranks that publish together: what one of them meets, all of them know, and nobody waits for ever.

Keeps true: a call ends the same way on every rank, with a value or with an error that names the rank that failed; a
rank that died or hangs ends it on the others too, at the latest after the group's timeout. After `RanksLostError` the
group cannot be used any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from tidemill.kernels.fingerprint import Bits

T = TypeVar("T")


class RankFailedError(RuntimeError):
    """A rank failed at its part of a common task; every rank raises it."""


class RanksLostError(RuntimeError):
    """A rank is gone or did not answer in time: whether the common task was finished is not known here."""


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    """What a rank's part of a task came to."""

    value: T | None
    failure: str | None


class Ranks:
    """The ranks of a process group on CPU memory (gloo), whose timeout bounds every wait; None: the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides and commits."""
        return self.rank == 0

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first rank, on every rank. Raises RankFailedError, RanksLostError."""
        outcome, cause = self._attempt(make) if self.is_first else (None, None)
        shared = [outcome]
        with _answering():
            dist.broadcast_object_list(shared, group_src=0, group=self._group)
        return _value(shared[0], cause)

    def gather(self, make: Callable[[], T]) -> list[T]:
        """Run `make` on every rank: its results in rank order on the first rank, nothing on the others.

        Raises RankFailedError on every rank when one fails, RanksLostError.
        """
        outcome, cause = self._attempt(make)
        found: list[_Outcome[T] | None] | None = [None] * self.size if self.is_first else None
        with _answering():
            dist.gather_object(outcome, found, group_dst=0, group=self._group)
        outcomes = [outcome for outcome in found or [] if outcome is not None]
        failures = self.from_first(lambda: [outcome.failure for outcome in outcomes if outcome.failure is not None])
        if failures:
            raise RankFailedError("; ".join(failures)) from cause
        return [_value(outcome, None) for outcome in outcomes]

    def send(self, values: Bits, to: int) -> None:
        """Send uN[n], contiguous, n not 0, to a rank that waits for it. Raises RanksLostError."""
        with _answering():
            dist.send(_as_bytes(values), group_dst=to, group=self._group)

    def receive(self, into: Bits, source: int) -> None:
        """Fill uN[n], contiguous, with what a rank sends. Raises RanksLostError."""
        with _answering():
            dist.recv(_as_bytes(into), group_src=source, group=self._group)

    def on_first(self, make: Callable[[], T]) -> T | None:
        """What `make` returns on the first rank, there alone. Raises RankFailedError on every rank, RanksLostError."""
        made: list[T] = []
        self.from_first(lambda: made.append(make()))
        return made[0] if made else None

    def _attempt(self, make: Callable[[], T]) -> tuple[_Outcome[T], Exception | None]:
        try:
            return _Outcome(make(), None), None
        except RanksLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of any error
            return _Outcome(None, f"rank {self.rank}: {type(error).__name__}: {error}"), error


def open_ranks(timeout_s: float) -> Ranks:
    """All ranks of the job, on a group of their own: no rank waits longer than `timeout_s` for another.

    Every rank calls it. The time has to cover what the slowest rank takes to encode and send its shards.
    """
    return Ranks(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))


def _as_bytes(values: Bits) -> torch.Tensor:
    return torch.from_numpy(values.view(np.uint8))


def _value(outcome: _Outcome[T] | None, cause: Exception | None) -> T:
    if outcome is None:
        raise RanksLostError("a rank sent no answer")
    if outcome.failure is not None:
        raise RankFailedError(outcome.failure) from cause
    return outcome.value  # type: ignore[return-value]


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RanksLostError(f"a rank is gone or did not answer in time: {error}") from error
