"""The kernels of the weight loop, behind one interface: on each backend the same input gives the same bytes.

Arrays are flat, contiguous rows of bit patterns (uN[n]: u1, u2 or u4), of the kind that the implementation works on:
numpy arrays, or PyTorch tensors. Those of one call lie on one device. Tables, counts and streams are small and belong
to the host: they are numpy arrays everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import numpy.typing as npt

from tidemill.kernels.classes import Active, ClassStreams, ClassTable, Counts
from tidemill.kernels.elements import ElementType
from tidemill.kernels.fingerprint import Fingerprint, TensorKey

Array = TypeVar("Array")


class KernelBackend(ABC, Generic[Array]):
    """One way to run the kernels. Raises ValueError for arrays that do not fit each other."""

    @abstractmethod
    def host(self, array: Array) -> npt.NDArray[Any]:
        """Patterns or indices as a numpy array; the same memory where that is the CPU's, else a copy."""

    @abstractmethod
    def beside(self, array: npt.NDArray[Any], other: Array) -> Array:
        """The inverse of `host`: patterns or indices where `other` lies."""

    @abstractmethod
    def compare_and_compact(self, old: Array, new: Array) -> Array:
        """Indices (i8[changed], ascending) of the elements that differ between `old` and `new` (uN[n] each)."""

    def compare_and_take(self, old: Array, new: Array) -> tuple[Array, Array, Array]:
        """The same indices, and the patterns of `old` and of `new` there (uN[changed] each)."""
        indices = self.compare_and_compact(old, new)
        return indices, self.take(old, indices), self.take(new, indices)

    @abstractmethod
    def take(self, bits: Array, indices: Array) -> Array:
        """The patterns (uN[k]) of `bits` at `indices` (i8[k], each in range)."""

    @abstractmethod
    def scatter(self, bits: Array, indices: Array, new_at: Array) -> None:
        """Write `new_at` (uN[k]) into `bits` at `indices` (i8[k], each in range and once), in place."""

    @abstractmethod
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
        """Split a block's changes into classes: see `kernels.classes.split_classes`."""

    @abstractmethod
    def count_exponents(self, kind: ElementType, bits: Array) -> Counts:
        """How often each exponent occurs in `bits`: i8[exponents]."""

    @abstractmethod
    def fingerprint(self, bits: Array, key: TensorKey, start: int = 0) -> Fingerprint:
        """Fingerprint of elements [start, start + n) of a tensor."""

    @abstractmethod
    def fingerprint_at(self, bits: Array, key: TensorKey, indices: Array) -> Fingerprint:
        """Fingerprint of the elements at `indices` (i8[k], in any order), whose patterns are `bits` (uN[k])."""

    @abstractmethod
    def fingerprint_change(self, key: TensorKey, indices: Array, old_at: Array, new_at: Array) -> Fingerprint:
        """F(new) - F(old) when the elements at `indices` (i8[k]) go from `old_at` to `new_at` (uN[k] each)."""
