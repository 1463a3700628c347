"""A backend for arrays that lie elsewhere: they are moved to where it works, and what it makes is moved back.

A PyTorch tensor becomes a numpy array for the compiled loops: a view where it is in the CPU's memory, a copy where it
is on a GPU. A numpy array or a CPU's tensor becomes a tensor where Triton runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import numpy.typing as npt
import torch

from tidemill.kernels.backend_base import Array, KernelBackend
from tidemill.kernels.classes import Active, ClassStreams, ClassTable, Counts
from tidemill.kernels.elements import ElementType
from tidemill.kernels.fingerprint import Fingerprint, TensorKey
from tidemill.kernels.tensor_rows import flat_row

Inner = TypeVar("Inner")


class Movement(ABC, Generic[Array, Inner]):
    """How an array goes to where a backend works."""

    @abstractmethod
    def there(self, array: Array) -> Inner:
        """The array for the backend; a view where memory is shared."""

    @abstractmethod
    def back(self, made: Inner, beside: Array) -> Array:
        """What the backend made, where `beside` lies."""

    @abstractmethod
    def write_back(self, moved: Inner, array: Array) -> None:
        """Bring what the backend wrote into `there(array)` to the array itself."""


class TensorAsArray(Movement[torch.Tensor, npt.NDArray[Any]]):
    """PyTorch tensors for the loops of the CPU."""

    def there(self, array: torch.Tensor) -> npt.NDArray[Any]:
        """See `Movement`."""
        row: npt.NDArray[Any] = flat_row(array).cpu().numpy()
        return row

    def back(self, made: npt.NDArray[Any], beside: torch.Tensor) -> torch.Tensor:
        """See `Movement`."""
        return torch.from_numpy(made).to(beside.device)

    def write_back(self, moved: npt.NDArray[Any], array: torch.Tensor) -> None:
        """See `Movement`."""
        if array.device.type != "cpu":
            flat_row(array).copy_(torch.from_numpy(moved))


class ArrayAsTensor(Movement[npt.NDArray[Any], torch.Tensor]):
    """Numpy arrays for Triton, on `device`."""

    def __init__(self, device: str) -> None:
        self._device = device

    def there(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """See `Movement`."""
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(self._device)

    def back(self, made: torch.Tensor, beside: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """See `Movement`."""
        array: npt.NDArray[Any] = made.cpu().numpy()
        return array

    def write_back(self, moved: torch.Tensor, array: npt.NDArray[Any]) -> None:
        """See `Movement`."""
        if moved.device.type != "cpu":
            array[...] = moved.cpu().numpy()


class TensorToDevice(Movement[torch.Tensor, torch.Tensor]):
    """PyTorch tensors for Triton, on another device than their own."""

    def __init__(self, device: str) -> None:
        self._device = device

    def there(self, array: torch.Tensor) -> torch.Tensor:
        """See `Movement`."""
        return flat_row(array).to(self._device)

    def back(self, made: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        """See `Movement`."""
        return made.to(beside.device)

    def write_back(self, moved: torch.Tensor, array: torch.Tensor) -> None:
        """See `Movement`."""
        flat_row(array).copy_(moved)


class MovingBackend(KernelBackend[Array], Generic[Array, Inner]):
    """`inner` for arrays that `movement` takes to it."""

    def __init__(self, inner: KernelBackend[Inner], movement: Movement[Array, Inner]) -> None:
        self.inner = inner
        self._move = movement

    def host(self, array: Array) -> npt.NDArray[Any]:
        """See `KernelBackend`."""
        return self.inner.host(self._move.there(array))

    def beside(self, array: npt.NDArray[Any], other: Array) -> Array:
        """See `KernelBackend`."""
        return self._move.back(self.inner.beside(array, self._move.there(other)), other)

    def compare_and_compact(self, old: Array, new: Array) -> Array:
        """See `KernelBackend`."""
        return self._move.back(self.inner.compare_and_compact(*self._there(old, new)), old)

    def compare_and_take(self, old: Array, new: Array) -> tuple[Array, Array, Array]:
        """See `KernelBackend`."""
        indices, old_at, new_at = self.inner.compare_and_take(*self._there(old, new))
        return self._move.back(indices, old), self._move.back(old_at, old), self._move.back(new_at, old)

    def take(self, bits: Array, indices: Array) -> Array:
        """See `KernelBackend`."""
        return self._move.back(self.inner.take(*self._there(bits, indices)), bits)

    def scatter(self, bits: Array, indices: Array, new_at: Array) -> None:
        """See `KernelBackend`."""
        moved, *rest = self._there(bits, indices, new_at)
        self.inner.scatter(moved, *rest)
        self._move.write_back(moved, bits)

    def split_classes(
        self,
        kind: ElementType,
        old: Array,
        old_at: Array,
        new_at: Array,
        indices: Array,
        table: ClassTable,
        active: Active,
    ) -> ClassStreams:
        """See `KernelBackend`."""
        moved_old, moved_old_at, moved_new_at, places = self._there(old, old_at, new_at, indices)
        return self.inner.split_classes(kind, moved_old, moved_old_at, moved_new_at, places, table, active)

    def count_exponents(self, kind: ElementType, bits: Array) -> Counts:
        """See `KernelBackend`."""
        return self.inner.count_exponents(kind, self._move.there(bits))

    def fingerprint(self, bits: Array, key: TensorKey, start: int = 0) -> Fingerprint:
        """See `KernelBackend`."""
        return self.inner.fingerprint(self._move.there(bits), key, start)

    def fingerprint_at(self, bits: Array, key: TensorKey, indices: Array) -> Fingerprint:
        """See `KernelBackend`."""
        moved, places = self._there(bits, indices)
        return self.inner.fingerprint_at(moved, key, places)

    def fingerprint_change(self, key: TensorKey, indices: Array, old_at: Array, new_at: Array) -> Fingerprint:
        """See `KernelBackend`."""
        return self.inner.fingerprint_change(key, *self._there(indices, old_at, new_at))

    def _there(self, *arrays: Array) -> tuple[Inner, ...]:
        return tuple(self._move.there(array) for array in arrays)
