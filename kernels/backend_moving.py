"""A backend for arrays that lie elsewhere: they are moved to where it works, and what it makes is moved back.

A PyTorch tensor becomes a numpy array for the compiled loops: a view where it is in the CPU's memory, a copy where it
is on a GPU. A numpy array or a CPU's tensor becomes a tensor where Triton runs.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, TypeVar

import numpy.typing as npt
import torch

from tidemill.kernels.backend_base import Array, KernelBackend
from tidemill.kernels.classes import Active, ClassStreams, ClassTable, Counts
from tidemill.kernels.elements import ElementType
from tidemill.kernels.fingerprint import Fingerprint, TensorKey
from tidemill.kernels.tensor_rows import flat_row

Inner = TypeVar("Inner")


class MovingBackend(KernelBackend[Array], Generic[Array, Inner]):
    """`inner` for arrays that are moved to it."""

    def __init__(self, inner: KernelBackend[Inner]) -> None:
        self.inner = inner

    @abstractmethod
    def there(self, array: Array) -> Inner:
        """The array for the inner backend; a view where memory is shared."""

    @abstractmethod
    def back(self, made: Inner, beside: Array) -> Array:
        """An array that the inner backend made, where `beside` lies."""

    @abstractmethod
    def write_back(self, moved: Inner, array: Array) -> None:
        """Bring what the inner backend wrote into `there(array)` to the array itself."""

    def host(self, array: Array) -> npt.NDArray[Any]:
        return self.inner.host(self.there(array))

    def beside(self, array: npt.NDArray[Any], other: Array) -> Array:
        return self.back(self.inner.beside(array, self.there(other)), other)

    def compare_and_compact(self, old: Array, new: Array) -> Array:
        return self.back(self.inner.compare_and_compact(*self._there(old, new)), old)

    def compare_and_take(self, old: Array, new: Array) -> tuple[Array, Array, Array]:
        indices, old_at, new_at = self.inner.compare_and_take(*self._there(old, new))
        return self.back(indices, old), self.back(old_at, old), self.back(new_at, old)

    def take(self, bits: Array, indices: Array) -> Array:
        return self.back(self.inner.take(*self._there(bits, indices)), bits)

    def scatter(self, bits: Array, indices: Array, new_at: Array) -> None:
        moved, *rest = self._there(bits, indices, new_at)
        self.inner.scatter(moved, *rest)
        self.write_back(moved, bits)

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
        moved_old, moved_old_at, moved_new_at, places = self._there(old, old_at, new_at, indices)
        return self.inner.split_classes(kind, moved_old, moved_old_at, moved_new_at, places, table, active)

    def count_exponents(self, kind: ElementType, bits: Array) -> Counts:
        return self.inner.count_exponents(kind, self.there(bits))

    def fingerprint(self, bits: Array, key: TensorKey, start: int = 0) -> Fingerprint:
        return self.inner.fingerprint(self.there(bits), key, start)

    def fingerprint_at(self, bits: Array, key: TensorKey, indices: Array) -> Fingerprint:
        moved, places = self._there(bits, indices)
        return self.inner.fingerprint_at(moved, key, places)

    def fingerprint_change(self, key: TensorKey, indices: Array, old_at: Array, new_at: Array) -> Fingerprint:
        return self.inner.fingerprint_change(key, *self._there(indices, old_at, new_at))

    def _there(self, *arrays: Array) -> tuple[Inner, ...]:
        return tuple(self.there(array) for array in arrays)


class TensorAsArray(MovingBackend[torch.Tensor, npt.NDArray[Any]]):
    """PyTorch tensors for the loops of the CPU."""

    def there(self, array: torch.Tensor) -> npt.NDArray[Any]:
        row: npt.NDArray[Any] = flat_row(array).cpu().numpy()
        return row

    def back(self, made: npt.NDArray[Any], beside: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(made).to(beside.device)

    def write_back(self, moved: npt.NDArray[Any], array: torch.Tensor) -> None:
        if array.device.type != "cpu":
            flat_row(array).copy_(torch.from_numpy(moved))


class ArrayAsTensor(MovingBackend[npt.NDArray[Any], torch.Tensor]):
    """Numpy arrays for Triton, on `device`."""

    def __init__(self, inner: KernelBackend[torch.Tensor], device: str) -> None:
        super().__init__(inner)
        self._device = device

    def there(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(self._device)

    def back(self, made: torch.Tensor, beside: npt.NDArray[Any]) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = made.cpu().numpy()
        return array

    def write_back(self, moved: torch.Tensor, array: npt.NDArray[Any]) -> None:
        if moved.device.type != "cpu":
            array[...] = moved.cpu().numpy()


class TensorToDevice(MovingBackend[torch.Tensor, torch.Tensor]):
    """PyTorch tensors for Triton, on another device than their own."""

    def __init__(self, inner: KernelBackend[torch.Tensor], device: str) -> None:
        super().__init__(inner)
        self._device = device

    def there(self, array: torch.Tensor) -> torch.Tensor:
        return flat_row(array).to(self._device)

    def back(self, made: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        return made.to(beside.device)

    def write_back(self, moved: torch.Tensor, array: torch.Tensor) -> None:
        flat_row(array).copy_(moved)
