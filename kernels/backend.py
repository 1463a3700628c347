"""Which kernels run: compiled loops on the CPU, or Triton on the GPU that holds the weights.

`TIDEMILL_KERNELS` decides:

    auto      (default) Triton where a tensor is on a GPU, the compiled loops for all else. A GPU's tensor that cannot
              have Triton is copied to the CPU: slower, the same bytes, and said once, loudly
    strict    as auto, but that copy is an error that says why Triton cannot run
    cpu       the compiled loops, for any tensor
    triton    Triton, for any array: a CPU's is copied to the GPU, or stays where it is under Triton's interpreter

`backend_for` gives the kernels for an array: a numpy array of bit patterns or a PyTorch tensor.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.kernels import classes, compare, fingerprint
from tidemill.kernels.backend_base import KernelBackend
from tidemill.kernels.classes import Active, ClassStreams, ClassTable, Counts
from tidemill.kernels.elements import AnyArray, DeltaError, ElementType, flat_bits
from tidemill.kernels.fingerprint import Fingerprint, TensorKey

ENVIRONMENT = "TIDEMILL_KERNELS"
HOST_DEVICE = "cpu"

_log = logging.getLogger(__name__)


class KernelUnavailableError(RuntimeError):
    """The kernels that were asked for cannot run here, and nothing may take their place; the message says why."""


class BackendMode(StrEnum):
    """What `TIDEMILL_KERNELS` may say."""

    AUTO = "auto"
    STRICT = "strict"
    CPU = "cpu"
    TRITON = "triton"


class BackendChoice(Enum):
    """What runs the kernels for an array."""

    CPU = "the compiled loops"
    TRITON = "Triton"
    FALLBACK = "the compiled loops, on a copy of what lies on the GPU"


def choose(mode: BackendMode, on_gpu: bool, obstacle: Callable[[], str | None]) -> BackendChoice:
    """What runs the kernels for an array; `obstacle` says what keeps Triton from running, None if nothing does.

    `obstacle` is asked only where Triton is wanted. Raises KernelUnavailableError.
    """
    if mode is BackendMode.CPU or (mode is not BackendMode.TRITON and not on_gpu):
        return BackendChoice.CPU
    reason = obstacle()
    if reason is None:
        return BackendChoice.TRITON
    if mode is BackendMode.AUTO:
        return BackendChoice.FALLBACK
    raise KernelUnavailableError(f"{ENVIRONMENT}={mode} asks for Triton's kernels, which cannot run: {reason}")


def mode_of(value: str | None, strict: bool = False) -> BackendMode:
    """The mode that the environment's `value` and a caller's `strict` make. Raises ValueError for an unknown value."""
    try:
        mode = BackendMode(value or BackendMode.AUTO)
    except ValueError as error:
        raise ValueError(f"{ENVIRONMENT} is {value!r}; it may be {', '.join(BackendMode)}") from error
    return BackendMode.STRICT if strict and mode is BackendMode.AUTO else mode


def backend_for(array: AnyArray, strict: bool = False) -> KernelBackend[Any]:
    """The kernels for a numpy array or a PyTorch tensor; with `strict`, "auto" in the environment means "strict".

    Raises KernelUnavailableError where Triton is asked for and cannot run, ValueError for an unknown mode.
    """
    mode = mode_of(os.environ.get(ENVIRONMENT), strict)
    is_numpy = isinstance(array, np.ndarray)
    if is_numpy and mode is not BackendMode.TRITON:
        return CPU_BACKEND
    on_gpu = not is_on_host(array)
    choice = choose(mode, on_gpu, triton_obstacle)
    if choice is BackendChoice.FALLBACK:
        _warn_of_fallback(str(array.device), "are copied to the CPU for every kernel")
    if choice is BackendChoice.TRITON:
        return _triton_backend(on_gpu, is_numpy)
    return _cpu_backend_of_tensors()


def runs_triton(tensor: AnyArray) -> bool:
    """Whether Triton's kernels take a PyTorch tensor where it lies; else torch's own operations do what they would.

    On a GPU without Triton that is slower, the same bits, and said once. A CPU's tensor is not copied to a GPU,
    whatever the mode. Raises like `backend_for`.
    """
    choice = choose(mode_of(os.environ.get(ENVIRONMENT)), not is_on_host(tensor), triton_obstacle)
    if choice is BackendChoice.FALLBACK:
        _warn_of_fallback(str(tensor.device), "are quantised by torch's operations")
    return choice is BackendChoice.TRITON and tensor.device.type == _triton_device()


def is_on_host(array: AnyArray) -> bool:
    """Whether a numpy array or a PyTorch tensor lies in the CPU's memory."""
    return isinstance(array, np.ndarray) or array.device.type == HOST_DEVICE


def flat_rows(bits: AnyArray, kind: ElementType) -> AnyArray:
    """The patterns of an element type as one row, of the kind of array that they are.

    Raises DeltaError when they are not of the type's width, or a tensor that is not contiguous.
    """
    if isinstance(bits, np.ndarray):
        return flat_bits(bits, kind)
    if bits.element_size() != kind.bits.itemsize:
        raise DeltaError(f"a {kind.name} tensor has {kind.bits} bit patterns, got {bits.dtype}")
    if not bits.is_contiguous():
        raise DeltaError(f"a {kind.name} tensor of shape {tuple(bits.shape)} is not contiguous")
    return bits.detach().view(-1)


@functools.cache
def triton_obstacle() -> str | None:
    """What keeps Triton from running kernels here, found by running one; None if nothing does."""
    try:
        import torch

        from tidemill.kernels.triton_fingerprint import fingerprint as fingerprint_by_triton
        from tidemill.kernels.triton_runtime import INTERPRETED
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


Row = npt.NDArray[Any]


class CpuBackend(KernelBackend[Row]):
    """The compiled loops: numpy arrays in, numpy arrays out, one thread, without the interpreter lock."""

    def host(self, array: Row) -> Row:
        return array

    def beside(self, array: Row, other: Row) -> Row:
        return array

    def compare_and_compact(self, old: Row, new: Row) -> Row:
        return compare.changed_elements(old, new)[0]

    def compare_and_take(self, old: Row, new: Row) -> tuple[Row, Row, Row]:
        return compare.changed_elements(old, new)

    def take(self, bits: Row, indices: Row) -> Row:
        taken: Row = bits[indices]
        return taken

    def scatter(self, bits: Row, indices: Row, new_at: Row) -> None:
        if indices.shape != new_at.shape or bits.dtype != new_at.dtype:
            raise ValueError(f"{new_at.size} patterns ({new_at.dtype}) for {indices.size} elements ({bits.dtype})")
        bits[indices] = new_at

    def split_classes(
        self, kind: ElementType, old: Row, old_at: Row, new_at: Row, indices: Row, table: ClassTable, active: Active
    ) -> ClassStreams:
        return classes.split_classes(kind, old, old_at, new_at, indices, table, active)

    def count_exponents(self, kind: ElementType, bits: Row) -> Counts:
        return compare.count_exponents(kind, bits)

    def fingerprint(self, bits: Row, key: TensorKey, start: int = 0) -> Fingerprint:
        return fingerprint.fingerprint(bits, key, start)

    def fingerprint_at(self, bits: Row, key: TensorKey, indices: Row) -> Fingerprint:
        return fingerprint.fingerprint_at(bits, key, indices)

    def fingerprint_change(self, key: TensorKey, indices: Row, old_at: Row, new_at: Row) -> Fingerprint:
        return fingerprint.fingerprint_change(key, indices, old_at, new_at)


CPU_BACKEND = CpuBackend()


def _triton_device() -> str:
    from tidemill.kernels.triton_runtime import INTERPRETED

    return HOST_DEVICE if INTERPRETED else "cuda"


@functools.cache
def _triton_backend(on_gpu: bool, is_numpy: bool) -> KernelBackend[Any]:
    from tidemill.kernels.backend_moving import ArrayAsTensor, TensorToDevice
    from tidemill.kernels.backend_triton import TritonBackend

    if is_numpy:
        return ArrayAsTensor(TritonBackend(), _triton_device())
    if not on_gpu and _triton_device() != HOST_DEVICE:
        return TensorToDevice(TritonBackend(), _triton_device())
    return TritonBackend()


@functools.cache
def _cpu_backend_of_tensors() -> KernelBackend[Any]:
    from tidemill.kernels.backend_moving import TensorAsArray

    return TensorAsArray(CPU_BACKEND)


@functools.cache
def _warn_of_fallback(device: str, instead: str) -> None:
    _log.warning(
        "KERNEL FALLBACK: the weights on %s %s, because Triton cannot run: %s. %s=strict makes this an error.",
        device,
        instead,
        triton_obstacle(),
        ENVIRONMENT,
    )
