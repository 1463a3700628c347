"""The kernels by Triton: on a GPU's tensors, or on CPU tensors in Triton's interpreter."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidemill.kernels import triton_compact, triton_fingerprint, triton_move, triton_split
from tidemill.kernels.backend_base import KernelBackend
from tidemill.kernels.classes import Active, ClassStreams, ClassTable, Counts
from tidemill.kernels.elements import ElementType
from tidemill.kernels.fingerprint import Fingerprint, TensorKey
from tidemill.kernels.tensor_rows import flat_row


class TritonBackend(KernelBackend[torch.Tensor]):
    """PyTorch tensors of any 1, 2 or 4 byte type in, tensors of their patterns out, on the same device."""

    def host(self, array: torch.Tensor) -> npt.NDArray[Any]:
        return _host(flat_row(array))

    def beside(self, array: npt.NDArray[Any], other: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(array).to(other.device)

    def compare_and_compact(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        with _current(old):
            return triton_compact.compare_and_compact(old, new)

    def take(self, bits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        with _current(bits):
            return triton_move.take(bits, indices)

    def scatter(self, bits: torch.Tensor, indices: torch.Tensor, new_at: torch.Tensor) -> None:
        with _current(bits):
            triton_move.scatter(bits, indices, new_at)

    def split_classes(
        self,
        kind: ElementType,
        old: torch.Tensor,
        old_at: torch.Tensor,
        new_at: torch.Tensor,
        indices: torch.Tensor,
        table: ClassTable,
        active: Active,
    ) -> ClassStreams:
        with _current(old):
            tables = (_copied(table, old), _copied(active, old))
            streams = triton_split.split_classes(kind, old, new_at, indices, *tables, classes=int(table[-1]) + 1)
            return ClassStreams(_host(streams.counts), _host(streams.gaps), _host(streams.steps))

    def count_exponents(self, kind: ElementType, bits: torch.Tensor) -> Counts:
        with _current(bits):
            return _host(triton_split.count_exponents(kind, bits))

    def fingerprint(self, bits: torch.Tensor, key: TensorKey, start: int = 0) -> Fingerprint:
        with _current(bits):
            return triton_fingerprint.fingerprint(bits, key, start)

    def fingerprint_at(self, bits: torch.Tensor, key: TensorKey, indices: torch.Tensor) -> Fingerprint:
        with _current(bits):
            return triton_fingerprint.fingerprint_at(bits, key, indices)

    def fingerprint_change(
        self, key: TensorKey, indices: torch.Tensor, old_at: torch.Tensor, new_at: torch.Tensor
    ) -> Fingerprint:
        with _current(old_at):
            return triton_fingerprint.fingerprint_change(key, indices, old_at, new_at)


def _current(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Make a tensor's GPU the current one, on which Triton launches; nothing for a tensor of the CPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _copied(table: npt.NDArray[np.uint8], tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a small table on a tensor's device; a copy, because numpy may hold it read-only."""
    return torch.tensor(table, dtype=torch.uint8, device=tensor.device)


def _host(tensor: torch.Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = tensor.cpu().numpy()
    return array
