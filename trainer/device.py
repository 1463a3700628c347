"""The device on which a process trains, and the options that make its results repeatable."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import torch

from tidemill.trainer.choices import Compute, StepMachine
from tidemill.trainer.config import TrainerSettings

KEPT_BLOCK, KEPT_BLOCK_SHARDED = 1 << 30, 1 << 23
"""Bytes of the largest block that `keep_freed_memory` keeps; the second for a sharded model. Gathered layers are
allocated and freed between long-lived activations: if kept, they left holes of up to half of a rank's memory."""

_FIXED_ON_A_GPU = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""Environment variables that the libraries read when they start. Without them, matrix products and sums over ranks may
differ in their last bits from one call to the next. A value that is already set is kept."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The position of this process among the processes of the job on its machine."""

    local_rank: int = 0
    ranks_here: int = 1


ALONE = RankPlace()


def device_of(settings: TrainerSettings, place: RankPlace) -> torch.device:
    """Return the device of this process.

    Raises ValueError for a GPU that does not exist, or one GPU for several processes.
    """
    name, _, number = settings.device.partition(":")
    there = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and not there):
        return torch.device("cpu")
    if number and place.ranks_here > 1:
        raise ValueError(
            f"trainer.device {settings.device} is one GPU for the {place.ranks_here} ranks of this machine: set it to "
            "cuda, and each rank takes its own"
        )
    wanted = int(number or place.local_rank)
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


def machine_of(settings: TrainerSettings, place: RankPlace, ranks: int) -> StepMachine:
    """Return the machine on which a job of `ranks` ranks computes its steps. Raises ValueError."""
    device = device_of(settings, place)
    return StepMachine(device.type, str(compute_dtype(settings, device)).removeprefix("torch."), ranks)


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
