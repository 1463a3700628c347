"""The arithmetic of places for a parameter that lies on a GPU: torch's index operations in place of compiled loops.

The same results as `places.HostStorage`, on any device that torch has; patterns are torch's signed integers of their
width. Writes are queued on the worker's own stream and waited for, so that the next forward pass reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tidemill.consumers.replica.places import Box, Elements, Indices, Layout


class DeviceStorage:
    """A parameter's storage as a flat tensor of signed integers. Only for layouts without an order of their own."""

    def __init__(self, elements: torch.Tensor) -> None:
        self._elements = elements
        self.size = elements.numel()

    def find(
        self, changes: Sequence[tuple[Layout, Indices, Elements]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `HostStorage.find`: i8[n] and two signed iN[n] on the device."""
        found = [self._place(*change) for change in changes]
        places, new = torch.cat([where for where, _ in found]), torch.cat([bits for _, bits in found])
        return places, new, self._elements[places]

    def put(self, places: torch.Tensor, elements: torch.Tensor) -> None:
        """As `HostStorage.put`."""
        self._elements.index_copy_(0, places, elements)
        self._wait()

    def write(self, layout: Layout, box: Box, bits: Elements) -> None:
        """As `HostStorage.write`."""
        rows = self._elements.as_strided((box.rows, box.row), (box.step, 1), box.target)
        rows.copy_(self._widened(layout, bits).view(box.rows, box.row))
        self._wait()

    def read(self, layout: Layout, box: Box, begin: int, bits: Elements) -> torch.Tensor | None:
        """As `HostStorage.read`; the patterns stay on the device, as unsigned integers, and `bits` is not written."""
        at = torch.arange(begin, begin + bits.size, device=self._elements.device)
        number = torch.div(at, box.row, rounding_mode="floor")
        elements = self._elements[box.target + number * box.step + at - number * box.row]
        if bool((elements & ((1 << layout.shift) - 1)).any()):
            return None
        signed, unsigned = _TYPES[bits.itemsize]
        return (elements >> layout.shift).to(signed).view(unsigned)

    def _place(self, layout: Layout, indices: Indices, bits: Elements) -> tuple[torch.Tensor, torch.Tensor]:
        at = self._here(np.asarray(indices, dtype=np.int64))
        source, target, rows, row, pitch, step = self._here(np.ascontiguousarray(layout.table.T))
        box = torch.searchsorted(source.contiguous(), at, right=True) - 1
        within = at - source[box]
        number = torch.div(within, pitch[box], rounding_mode="floor")
        column = within - number * pitch[box]
        held = (box >= 0) & (number < rows[box]) & (column < row[box])
        return (target[box] + number * step[box] + column)[held], self._widened(layout, bits)[held]

    def _widened(self, layout: Layout, bits: Elements) -> torch.Tensor:
        signed: torch.Tensor = self._here(bits.view(f"i{bits.itemsize}"))
        return signed.to(self._elements.dtype) << layout.shift

    def _here(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        # A copy: torch does not take memory that can only be read.
        return torch.from_numpy(np.array(array)).to(self._elements.device)

    def _wait(self) -> None:
        if self._elements.device.type != "cpu":
            torch.accelerator.synchronize(self._elements.device)


_TYPES = {1: (torch.int8, torch.uint8), 2: (torch.int16, torch.uint16), 4: (torch.int32, torch.uint32)}
