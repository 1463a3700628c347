"""The kernels on a CPU: the compiled loops, on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from tidemill.kernels import classes, exponents, fingerprint
from tidemill.kernels.backend_base import KernelBackend
from tidemill.kernels.classes import Active, ClassStreams, ClassTable, Counts
from tidemill.kernels.compare import changed_elements
from tidemill.kernels.elements import ElementType
from tidemill.kernels.fingerprint import Fingerprint, TensorKey

Row = npt.NDArray[Any]


class CpuBackend(KernelBackend[Row]):
    """Numpy arrays in, numpy arrays out, one thread, without the interpreter lock."""

    def host(self, array: Row) -> Row:
        """See `KernelBackend`."""
        return array

    def beside(self, array: Row, other: Row) -> Row:
        """See `KernelBackend`."""
        return array

    def compare_and_compact(self, old: Row, new: Row) -> Row:
        """See `KernelBackend`."""
        return changed_elements(old, new)[0]

    def compare_and_take(self, old: Row, new: Row) -> tuple[Row, Row, Row]:
        """See `KernelBackend`."""
        return changed_elements(old, new)

    def take(self, bits: Row, indices: Row) -> Row:
        """See `KernelBackend`."""
        taken: Row = bits[indices]
        return taken

    def scatter(self, bits: Row, indices: Row, new_at: Row) -> None:
        """See `KernelBackend`."""
        if indices.shape != new_at.shape or bits.dtype != new_at.dtype:
            raise ValueError(f"{new_at.size} patterns ({new_at.dtype}) for {indices.size} elements ({bits.dtype})")
        bits[indices] = new_at

    def split_classes(
        self, kind: ElementType, old: Row, old_at: Row, new_at: Row, indices: Row, table: ClassTable, active: Active
    ) -> ClassStreams:
        """See `KernelBackend`."""
        return classes.split_classes(kind, old, old_at, new_at, indices, table, active)

    def count_exponents(self, kind: ElementType, bits: Row) -> Counts:
        """See `KernelBackend`."""
        return exponents.count_exponents(kind, bits)

    def fingerprint(self, bits: Row, key: TensorKey, start: int = 0) -> Fingerprint:
        """See `KernelBackend`."""
        return fingerprint.fingerprint(bits, key, start)

    def fingerprint_at(self, bits: Row, key: TensorKey, indices: Row) -> Fingerprint:
        """See `KernelBackend`."""
        return fingerprint.fingerprint_at(bits, key, indices)

    def fingerprint_change(self, key: TensorKey, indices: Row, old_at: Row, new_at: Row) -> Fingerprint:
        """See `KernelBackend`."""
        return fingerprint.fingerprint_change(key, indices, old_at, new_at)
