"""The processes of a training job, one, or all that torchrun started, on one machine or several; and their devices.

Each process computes on a device, with options that make its results repeatable.

Invariant: a rank that fails or is killed ends the job on every rank, with an error that names it, at the latest after
`trainer.ranks_timeout_s`; no wait is longer. Only while the first rank is idle, the other ranks wait without this
limit, and they end when it ends.
"""

from __future__ import annotations

import ctypes
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

from tidemill.kernels.weights.ranks import Ranks, RanksLostError, open_ranks
from tidemill.schemas.config import Section
from tidemill.schemas.shutdown import STOPS
from tidemill.trainer.choices import Compute, StepMachine
from tidemill.trainer.config import TrainerSettings

T = TypeVar("T")

KEPT_BLOCK, KEPT_BLOCK_SHARDED = 1 << 30, 1 << 23
"""Bytes of the largest block that `keep_freed_memory` keeps; the second for a sharded model. Gathered layers are
allocated and freed between long-lived activations: if kept, they left holes of up to half of a rank's memory."""

_FIXED_ON_A_GPU = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""Environment variables that the libraries read when they start. Without them, matrix products and sums over ranks may
differ in their last bits from one call to the next. A value that is already set is kept."""


def device_of(settings: TrainerSettings, job: Job) -> torch.device:
    """Return the device of this process.

    Raises ValueError for a GPU that does not exist, or one GPU for several processes.
    """
    name, _, number = settings.device.partition(":")
    there = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and not there):
        return torch.device("cpu")
    if number and job.ranks_here > 1:
        raise ValueError(
            f"trainer.device {settings.device} is one GPU for the {job.ranks_here} ranks of this machine: set it to "
            "cuda, and each rank takes its own"
        )
    wanted = int(number or job.local_rank)
    if wanted >= there:
        raise ValueError(
            f"trainer.device is {settings.device} and torch sees {there} CUDA devices here, not number {wanted}: set "
            "trainer.device to cpu, start fewer ranks, or look with `nvidia-smi` whether the driver is running"
        )
    return torch.device("cuda", wanted)


def compute_dtype(settings: TrainerSettings, device: torch.device) -> torch.dtype:
    """Return the type in which layers are computed."""
    if settings.compute is Compute.AUTO:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if settings.compute is Compute.FLOAT32 else torch.bfloat16


def machine_of(settings: TrainerSettings, job: Job) -> StepMachine:
    """Return the machine on which a job computes its steps. Raises ValueError."""
    device = device_of(settings, job)
    return StepMachine(device.type, str(compute_dtype(settings, device)).removeprefix("torch."), job.ranks.size)


def backend() -> str:
    """Return the backend of torch's process groups for the ranks."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def make_deterministic(threads: int, device: torch.device | None = None) -> None:
    """Fix the thread count and refuse nondeterministic operations, for the whole process."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # By default, this writes NaN into every new tensor before it is filled, which takes an eighth of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device is not None and device.type == "cuda":
        for name, value in _FIXED_ON_A_GPU.items():
            os.environ.setdefault(name, value)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.cuda.set_device(device)


def keep_freed_memory(largest_block: int) -> None:
    """Make this process keep the memory that a step frees, if its allocator is glibc's: the next step needs it again.

    Otherwise every page would be returned to the system, faulted in and cleared again, a twentieth of a step. Blocks
    above `largest_block` bytes are still returned.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, (1 << 31) - 4096)
        mallopt(mmap_threshold, largest_block)


AWAITED_S = 30 * 24 * 3600.0
"""Timeout of a rank that waits for a call of the first rank. If the first rank dies, the wait ends at once."""
ANSWERS_S = 3.0
"""Time for the other ranks to report that they have noticed a failure too; a rank without a report has failed."""
LOOK_S = 0.05
COMPUTING = ("schemas", "kernels", "trainer")
"""Folders with the code that a rank runs."""
_REASON = "tidemill/reasons/{}"
_LOST = "another rank is lost"


Call = tuple[str, Sequence[Any], Mapping[str, Any]]
"""A method's name and its arguments."""


@dataclass(frozen=True, slots=True)
class Job:
    """The job, from the view of this process."""

    ranks: Ranks
    """Channel for work that all ranks do together, with bounded waits."""
    local_rank: int = 0
    ranks_here: int = 1
    """The number of this process among those on its machine, and their number."""
    _calls: Ranks = field(default_factory=Ranks)
    """Channel for the calls that the first rank sends to the others."""
    _store: Any = None
    """The key-value store of torch for the job."""

    def require_same(self, settings: Mapping[str, Section]) -> None:
        """Raise ValueError on every rank unless all have the same settings, libraries and code."""
        folders = (Path(__file__).parents[1] / name for name in COMPUTING)
        files = (path for folder in folders for path in sorted(folder.rglob("*.py")))
        code = hashlib.sha256(b"".join(path.read_bytes() for path in files))
        facts = {f"{name}.{key}": value for name, of in settings.items() for key, value in of.model_dump().items()}
        facts |= {"torch": torch.__version__, "transformers": transformers.__version__, "code": code.hexdigest()[:16]}
        found = self.ranks.gather(lambda: facts)

        def compare() -> None:
            for rank, of_rank in enumerate(found):
                for name, value in of_rank.items():
                    first = found[0].get(name)  # None if the installations differ in their settings
                    if value != first:
                        raise ValueError(
                            f"rank {rank} has {name} {value}, rank 0 has {first}: start all ranks with the same "
                            "settings and the same installation"
                        )

        self.ranks.on_first(compare)

    def tell(self, call: Call | None) -> None:
        """Send a call to the other ranks; None: there are no more calls. For the first rank."""
        self._calls.from_first(lambda: call)

    def next_call(self) -> Call | None:
        """Wait for the next call of the first rank. For the other ranks. Raises RanksLostError if the first rank is
        lost.
        """
        nothing: Call | None = None
        return self._calls.from_first(lambda: nothing)

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, in which the ranks wait for each other.

        Raises the errors of `work` itself. If it failed because of another rank, raises RanksLostError, which names
        that rank and its reason, if it reported one.
        """
        if self._store is None:
            return work()
        try:
            return work()
        except Exception as error:
            # Within a layer, torch reports the end of another rank as a plain RuntimeError.
            transport = isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo/", "NCCL"))
            if not transport and not isinstance(error, RanksLostError | dist.DistError):
                self._say(f"{type(error).__name__}: {error}")
                raise
            self._say(_LOST)
            raise RanksLostError(f"{self._failed_ranks()} ({error})") from error

    def _say(self, what: str) -> None:
        with suppress(dist.DistError):
            self._store.set(_REASON.format(self.ranks.rank), what)

    def _failed_ranks(self) -> str:
        """Name the failures that the ranks reported, otherwise the ranks that do not answer."""
        deadline, reasons = time.monotonic() + ANSWERS_S, dict[int, str]()
        while len(reasons) < self.ranks.size and time.monotonic() < deadline:
            try:
                for rank in set(range(self.ranks.size)) - reasons.keys():
                    if self._store.check([_REASON.format(rank)]):
                        reasons[rank] = self._store.get(_REASON.format(rank)).decode()
            except dist.DistError:
                return "the first rank, or torchrun, is gone; start the trainer again, it goes on from the log"
            time.sleep(LOOK_S)
        failed = [f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items()) if reason != _LOST]
        silent = ", ".join(str(rank) for rank in range(self.ranks.size) if rank not in reasons)
        return "; ".join(failed) or f"rank {silent} is gone or hangs; start the trainer again, it goes on from the log"


SINGLE = Job(Ranks())


@contextmanager
def open_job(timeout_s: float) -> Iterator[Job]:
    """Open the job that torchrun started, otherwise a job of this process only; a rank waits `timeout_s` for others.

    All ranks except the first ignore SIGINT and SIGTERM: they end with the first one, which finishes its step.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield SINGLE
        return
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    dist.init_process_group(backend(), store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    if rank:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
    local_rank, ranks_here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    yield Job(open_ranks(timeout_s), local_rank, ranks_here, open_ranks(AWAITED_S), store)
    dist.destroy_process_group()
