"""The ranks of a process group in CPU memory (gloo): an error of one rank is raised on all; every wait has a limit."""

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
from tidemill.kernels.weights.ranks import Ranks, RanksLostError

T = TypeVar("T")


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
        return gloo_ranks(dist.get_process_group_ranks(self._group), self._timeout_s)

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


def gloo_ranks(members: list[int] | None, timeout_s: float | None) -> Ranks:
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
