"""Choice of the kernels: compiled loops on the CPU, or Triton on the GPU that holds the weights.

`TIDEMILL_KERNELS` decides:

    auto      (default) Triton if a tensor is on a GPU, otherwise the compiled loops. If Triton cannot run on the GPU,
              the tensor is copied to the CPU: slower, the same bytes, and one warning in the log
    strict    as auto, but instead of that copy an error gives the reason why Triton cannot run
    cpu       the compiled loops, for any tensor
    triton    Triton, for any array: a CPU array is copied to the GPU, or is used in place by Triton's interpreter

`backend_for` returns the kernels for an array: a numpy array of bit patterns or a PyTorch tensor.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from tidemill.kernels import classes, elements, fingerprint
from tidemill.kernels.classes import Active, ClassStreams, ClassTable
from tidemill.kernels.compiled import Counts
from tidemill.kernels.elements import AnyArray, ElementType, flat_row
from tidemill.kernels.fingerprint import Fingerprint, TensorKey

ENVIRONMENT = "TIDEMILL_KERNELS"
HOST_DEVICE = "cpu"

_log = logging.getLogger(__name__)


BackendMode = Literal["auto", "strict", "cpu", "triton"]
"""The values of `TIDEMILL_KERNELS`."""
BackendChoice = Literal["cpu", "triton", "fallback"]
"""The kernels for an array: the compiled loops, Triton, or the compiled loops on a copy of an array on a GPU."""


def choose(mode: BackendMode, on_gpu: bool, obstacle: Callable[[], str | None]) -> BackendChoice:
    """Choose the kernels for an array; `obstacle` returns the reason why Triton cannot run, None if it can.

    `obstacle` is called only if Triton is wanted. Raises RuntimeError.
    """
    if mode == "cpu" or (mode != "triton" and not on_gpu):
        return "cpu"
    reason = obstacle()
    if reason is None:
        return "triton"
    if mode == "auto":
        return "fallback"
    raise RuntimeError(f"{ENVIRONMENT}={mode} requires Triton's kernels, which cannot run: {reason}")


def choice_for(array: AnyArray, instead: str) -> BackendChoice:
    """Choose the kernels for an array by the environment; if a GPU has no Triton, the log states the `instead` text.

    Raises RuntimeError if Triton is required and cannot run, ValueError for an unknown mode.
    """
    mode = os.environ.get(ENVIRONMENT) or "auto"
    if mode not in get_args(BackendMode):
        raise ValueError(f"{ENVIRONMENT} is {mode!r}; it may be {', '.join(get_args(BackendMode))}")
    choice = choose(cast(BackendMode, mode), not is_on_host(array), triton_obstacle)
    if choice == "fallback":
        _warn_of_fallback(str(array.device), instead)
    return choice


def backend_for(array: AnyArray) -> KernelBackend:
    """Return the kernels for a numpy array or a PyTorch tensor. Raises like `choice_for`."""
    choice = choice_for(array, "are copied to the CPU for every kernel")
    return triton_backend() if choice == "triton" else CPU_BACKEND


def runs_triton(tensor: AnyArray) -> bool:
    """Whether Triton's kernels can read a PyTorch tensor in place; if not, torch's operations give the same result.

    On a GPU without Triton these are slower, give the same bits, and are logged once. A CPU tensor is never copied
    to a GPU, in any mode. Raises like `choice_for`.
    """
    choice = choice_for(tensor, "are quantised by torch's operations")
    return choice == "triton" and tensor.device.type == _triton_device()


def is_on_host(array: AnyArray) -> bool:
    """Whether a numpy array or a PyTorch tensor is in the CPU's memory."""
    return isinstance(array, np.ndarray) or array.device.type == HOST_DEVICE


@functools.cache
def triton_obstacle() -> str | None:
    """Run one Triton kernel and return the reason why Triton cannot run here; None if it can."""
    try:
        import torch

        from tidemill.kernels.triton_rows import INTERPRETED
        from tidemill.kernels.triton_rows import fingerprint as fingerprint_by_triton
    except ImportError as error:
        return f"it cannot be imported ({error})"
    if not INTERPRETED and not torch.cuda.is_available():
        return "PyTorch finds no GPU, and TRITON_INTERPRET=1 is not set"
    bits, key = np.arange(1000, dtype=np.uint16), TensorKey.of("probe")
    try:
        found = fingerprint_by_triton(torch.from_numpy(bits).to(_triton_device()), key)
    except Exception as error:  # noqa: BLE001 - a driver, compiler or memory that fails, with any error: Triton cannot run
        return f"a first kernel failed: {type(error).__name__}: {error}"
    return None if found == fingerprint.fingerprint(bits, key) else "a first kernel gave a wrong result"


@dataclass(frozen=True, eq=False)
class KernelBackend:
    """The kernels of the weight loop on one processor: the same input gives the same bytes on each processor.

    Arrays are flat, contiguous rows of bit patterns (uN[n]: u1, u2 or u4): numpy arrays, or PyTorch tensors of any type
    of that width. The arrays of one call are on one device. If this is not the processor's device, they are moved to
    it, and the results are moved back. Tables, counts and streams are small: they are always numpy arrays, on the host.
    Raises ValueError for arrays that do not fit each other.
    """

    rows: Any
    """Functions over rows, with the names of the methods here, for arrays in the processor's memory."""
    split: Any
    """The split into classes, and the count of exponents, for the same arrays."""
    near: Callable[..., AbstractContextManager[list[Any]]]
    """Moves patterns or indices to the processor's memory; if they are already there, returns views."""

    @staticmethod
    def host(array: AnyArray) -> npt.NDArray[Any]:
        """Return patterns or indices as a numpy array; a view of memory on the CPU, otherwise a copy."""
        found: npt.NDArray[Any] = array if isinstance(array, np.ndarray) else flat_row(array).cpu().numpy()
        return found

    @staticmethod
    def beside(array: AnyArray, other: AnyArray) -> AnyArray:
        """Return patterns or indices on the device of `other`, as an array of the same library."""
        if isinstance(other, np.ndarray):
            return KernelBackend.host(array)
        import torch

        return (torch.from_numpy(array) if isinstance(array, np.ndarray) else array).to(other.device)

    def changed_elements(self, old: AnyArray, new: AnyArray) -> tuple[AnyArray, ...]:
        """Find the elements that differ between `old` and `new` (uN[n] each).

        Returns their indices (i8[changed], ascending), and their patterns in `old` and in `new` (uN[changed] each).
        """
        with self.near(old, new) as rows:
            return tuple(self.beside(made, old) for made in self.rows.changed_elements(*rows))

    def split_classes(
        self,
        kind: ElementType,
        old: AnyArray,
        old_at: AnyArray,
        new_at: AnyArray,
        indices: AnyArray,
        table: ClassTable,
        active: Active,
    ) -> ClassStreams:
        """Split a block's changes into classes: see `kernels.classes.split_classes`."""
        with self.near(old, old_at, new_at, indices) as rows:
            return ClassStreams(*map(self.host, self.split.split_classes(kind, *rows, table, active)))

    def count_exponents(self, kind: ElementType, bits: AnyArray) -> Counts:
        """Count each exponent in `bits`: i8[exponents]."""
        with self.near(bits) as rows:
            return self.host(self.split.count_exponents(kind, *rows))

    def fingerprint(self, bits: AnyArray, key: TensorKey, start: int = 0) -> Fingerprint:
        """Compute the fingerprint of elements [start, start + n) of a tensor."""
        with self.near(bits) as (row,):
            made: Fingerprint = self.rows.fingerprint(row, key, start)
            return made

    def fingerprint_at(self, bits: AnyArray, key: TensorKey, indices: AnyArray) -> Fingerprint:
        """Compute the fingerprint of the elements at `indices` (i8[k], in any order) with patterns `bits` (uN[k])."""
        with self.near(bits, indices) as (row, places):
            made: Fingerprint = self.rows.fingerprint_at(row, key, places)
            return made

    def fingerprint_change(self, key: TensorKey, indices: AnyArray, old_at: AnyArray, new_at: AnyArray) -> Fingerprint:
        """Compute F(new) - F(old) for elements at `indices` (i8[k]): `old_at` becomes `new_at` (uN[k] each)."""
        with self.near(indices, old_at, new_at) as rows:
            made: Fingerprint = self.rows.fingerprint_change(key, *rows)
            return made


# The compiled loops: one thread, without the interpreter lock.
CPU_BACKEND = KernelBackend(
    SimpleNamespace(
        changed_elements=elements.changed_elements,
        fingerprint=fingerprint.fingerprint,
        fingerprint_at=fingerprint.fingerprint_at,
        fingerprint_change=fingerprint.fingerprint_change,
    ),
    classes,
    lambda *arrays: nullcontext([KernelBackend.host(array) for array in arrays]),
)


@functools.cache
def triton_backend() -> KernelBackend:
    """Return the Triton kernels: for tensors on a GPU, or on the CPU in Triton's interpreter."""
    from tidemill.kernels import triton_rows, triton_split

    return KernelBackend(triton_rows, triton_split, _on_gpu)


@contextmanager
def _on_gpu(*arrays: AnyArray) -> Iterator[list[Any]]:
    """Yield the arrays as tensors on a GPU, the current GPU within the context: Triton launches there."""
    import torch

    moved = []
    for array in arrays:
        if isinstance(array, np.ndarray):
            row = torch.from_numpy(array if array.flags.writeable else array.copy()).to(_triton_device())
        else:
            row = flat_row(array)
            row = row.to(_triton_device()) if is_on_host(row) else row
        moved.append(row)
    with torch.cuda.device(moved[0].device) if moved[0].is_cuda else nullcontext():
        yield moved


def _triton_device() -> str:
    from tidemill.kernels.triton_rows import INTERPRETED

    return HOST_DEVICE if INTERPRETED else "cuda"


@functools.cache
def _warn_of_fallback(device: str, instead: str) -> None:
    _log.warning(
        "KERNEL FALLBACK: the weights on %s %s, because Triton cannot run: %s. %s=strict makes this an error.",
        device,
        instead,
        triton_obstacle(),
        ENVIRONMENT,
    )
