"""The ranks that work together, one process or several: an error of one rank is raised on all; every wait has a limit.

Invariants: a call ends in the same way on every rank, with a value or with an error that names the failed rank; if a
rank died or hangs, the call ends on the others at the latest after the group's timeout. After `RanksLostError` the
group cannot be used again. One process needs no process group: `Ranks` itself only calls the function.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

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


class ProcessGroupRanks(Ranks):
    """The ranks of a process group in CPU memory (gloo), whose timeout limits every wait.

    Args:
        group: the process group; the default group if None.
        timeout_s: timeout of the groups that `sibling` creates; PyTorch's default if None.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float | None = None) -> None:
        self._group, self._timeout_s = group, timeout_s
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def from_first(self, make: Callable[[], T]) -> T:
        outcome, cause = self._attempt(make) if self.is_first else (None, None)
        shared = [outcome]
        with _answering():
            dist.broadcast_object_list(shared, group_src=0, group=self._group)
        return _values(shared, cause)[0]

    def gather(self, make: Callable[[], T]) -> list[T]:
        outcome, cause = self._attempt(make)
        found: list[_Outcome[T] | None] | None = [None] * self.size if self.is_first else None
        with _answering():
            dist.gather_object(outcome, found, group_dst=0, group=self._group)
        failures = self.from_first(lambda: [one[1] for one in found or [] if one and one[1]])
        if failures:
            raise _error(failures) from cause
        return _values(found or [], None)

    def sibling(self) -> Ranks:
        return _gloo(dist.get_process_group_ranks(self._group), self._timeout_s)

    def send(self, values: Bits, to: int) -> None:
        with _answering():
            dist.send(torch.from_numpy(values.view(np.uint8)), group_dst=to, group=self._group)

    def receive(self, into: Bits, source: int) -> None:
        with _answering():
            dist.recv(torch.from_numpy(into.view(np.uint8)), group_src=source, group=self._group)

    def _attempt(self, make: Callable[[], T]) -> tuple[_Outcome[T], Exception | None]:
        try:
            return (make(), None), None
        except RanksLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of any error
            kind = type(error)
            try:
                # Another process must be able to make the error again from a message alone.
                again = pickle.loads(pickle.dumps(kind)) is kind and str(kind("message")) == "message"
            except Exception:  # noqa: BLE001 - a constructor may raise anything when it is given a message
                again = False
            message = f"rank {self.rank}: {kind.__name__}: {error}"
            return (None, (kind if again else RuntimeError, message)), error


def open_ranks(timeout_s: float) -> Ranks:
    """Return all ranks of the job, with their own group: no rank waits longer than `timeout_s` for another.

    Returns one process if torch.distributed is not initialised. Every rank calls it. The timeout must be longer than
    the slowest rank needs to encode and send its shards, and than the first needs to rebuild the newest version.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    return _gloo(None, timeout_s)


def _gloo(members: list[int] | None, timeout_s: float | None) -> Ranks:
    """Create a group of the job's ranks (of all if `members` is None); the members call it."""
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    group = dist.new_group(members, timeout, "gloo", use_local_synchronization=members is not None)
    return ProcessGroupRanks(group, timeout_s)


_Outcome = tuple[T | None, tuple[type[Exception], str] | None]
"""A rank's value, or the class and message of its error, as sent to the other ranks."""


def _error(failures: Sequence[tuple[type[Exception], str]]) -> Exception:
    kinds = {kind for kind, _ in failures}
    kind = kinds.pop() if len(kinds) == 1 else RuntimeError
    return kind("; ".join(message for _, message in failures))


def _values(outcomes: Sequence[_Outcome[T] | None], cause: Exception | None) -> list[T]:
    found: list[T] = []
    for outcome in outcomes:
        if outcome is None:
            raise RanksLostError("a rank sent no answer")
        value, failure = outcome
        if failure is not None:
            raise _error([failure]) from cause
        found.append(value)  # type: ignore[arg-type]
    return found


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RanksLostError(f"a rank ended or did not answer in time: {error}") from error
