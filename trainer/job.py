"""The processes of a training job: one, or as many as torchrun started, on one machine or several.

Keeps true: a rank that fails or is killed ends the job on every rank, with an error that names it, at the latest after
`trainer.ranks_timeout_s`; nobody is waited for longer. While the first rank has nothing to do the others wait, however
long that is, and end when it does.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from torch.distributed.rendezvous import rendezvous

from tidemill.kernels.weights.ranks import Ranks, RanksLostError, SingleRank, open_ranks
from tidemill.schemas.config import Section
from tidemill.schemas.shutdown import STOPS
from tidemill.trainer.device import ALONE, RankPlace, backend

T = TypeVar("T")

AWAITED_S = 30 * 24 * 3600.0
"""How long a rank waits for the first one to call it. A first rank that dies ends the wait at once."""
ANSWERS_S = 3.0
"""How long the other ranks are given to say that they have noticed a failure too; who says nothing is the one."""
LOOK_S = 0.05
_SAID = "tidemill/said/{}"
_LOST = "another rank is lost"


Call = tuple[str, Sequence[Any], Mapping[str, Any]]
"""A method's name and its arguments."""


@dataclass(frozen=True, slots=True)
class Job:
    """This process's place in the job."""

    ranks: Ranks
    """For work that all ranks do together, with bounded waits."""
    place: RankPlace = ALONE
    _calls: Ranks = field(default_factory=SingleRank)
    """For what the first rank tells the others to do."""
    _store: Any = None
    """torch's key-value store of the job."""

    def require_same(self, settings: Mapping[str, Section]) -> None:
        """Raise ValueError on every rank unless all have the same settings, libraries and code of the trainer."""
        code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
        facts = {f"{name}.{key}": value for name, of in settings.items() for key, value in of.model_dump().items()}
        facts |= {"torch": torch.__version__, "transformers": transformers.__version__, "code": code.hexdigest()[:16]}
        found = self.ranks.gather(lambda: facts)

        def compare() -> None:
            for rank, of_rank in enumerate(found):
                for name, value in of_rank.items():
                    if value != found[0][name]:
                        raise ValueError(
                            f"rank {rank} has {name} {value}, rank 0 has {found[0][name]}: start all ranks with the "
                            "same settings and the same installation"
                        )

        self.ranks.on_first(compare)

    def tell(self, call: Call | None) -> None:
        """Tell the other ranks to make a call; None: that there will be no other one. For the first rank."""
        self._calls.from_first(lambda: call)

    def told(self) -> Call | None:
        """Wait for the next call of the first rank. For the other ranks. Raises RanksLostError if the first rank is
        gone.
        """
        nothing: Call | None = None
        return self._calls.from_first(lambda: nothing)

    def together(self, work: Callable[[], T]) -> T:
        """The result of `work`, in which the ranks wait for each other.

        Raises what it raises by itself here. Where it ends because of another rank, RanksLostError, which names that
        rank, with its reason if it gave one.
        """
        if self._store is None:
            return work()
        try:
            return work()
        except Exception as error:
            # Within a layer torch says in a plain RuntimeError that another rank ended.
            transport = isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo/", "NCCL"))
            if not transport and not isinstance(error, RanksLostError | dist.DistError):
                self._say(f"{type(error).__name__}: {error}")
                raise
            self._say(_LOST)
            raise RanksLostError(f"{self._failed_ranks()} ({error})") from error

    def _say(self, what: str) -> None:
        with suppress(dist.DistError):
            self._store.set(_SAID.format(self.ranks.rank), what)

    def _failed_ranks(self) -> str:
        """Name the failure that the ranks report, else the ranks that no longer answer."""
        deadline, said = time.monotonic() + ANSWERS_S, dict[int, str]()
        while len(said) < self.ranks.size and time.monotonic() < deadline:
            try:
                for rank in set(range(self.ranks.size)) - said.keys():
                    if self._store.check([_SAID.format(rank)]):
                        said[rank] = self._store.get(_SAID.format(rank)).decode()
            except dist.DistError:
                return "the first rank, or torchrun, is gone; start the trainer again, it goes on from the log"
            time.sleep(LOOK_S)
        failed = [f"rank {rank}: {reason}" for rank, reason in sorted(said.items()) if reason != _LOST]
        silent = ", ".join(str(rank) for rank in range(self.ranks.size) if rank not in said)
        return "; ".join(failed) or f"rank {silent} is gone or hangs; start the trainer again, it goes on from the log"


SINGLE = Job(SingleRank())


@contextmanager
def open_job(timeout_s: float) -> Iterator[Job]:
    """The job that torchrun made this process a rank of, else this process alone; a rank waits `timeout_s` for others.

    Ranks but the first ignore SIGINT and SIGTERM: they end with the first one, which finishes its step.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield SINGLE
        return
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    dist.init_process_group(backend(), store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    if rank:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
    place = RankPlace(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    yield Job(open_ranks(timeout_s), place, open_ranks(AWAITED_S), store)
    dist.destroy_process_group()
