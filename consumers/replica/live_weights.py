"""Reads and writes the engine's live parameters in checkpoint coordinates, bit for bit.

Keeps true: a write either happens whole or not at all (everything is checked before the first element is touched), and
what is read back is what the next forward pass uses, because both go through the parameters' own storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidemill.consumers.replica.weight_map import Bits, Indices, Run, UnsupportedModelError

_PIECE = 1 << 20
"""Elements read back at once: bounds the memory of a proof to a few MiB."""


class NotRepresentableError(ValueError):
    """A live fp32 element has bits below bf16: it cannot be any version's value."""


@dataclass(frozen=True, slots=True)
class ElementChange:
    """New bits for some elements of one checkpoint tensor."""

    name: str
    indices: Indices
    """i8[n], flat and unique, in checkpoint coordinates."""
    bits: Bits
    """u2[n]."""


@dataclass(frozen=True, slots=True)
class Overwritten:
    """What elements of a parameter's storage held before a write, whatever it was."""

    parameter: str
    places: Indices
    elements: npt.NDArray[Any]


class LiveWeights:
    """The live storage of a model behind its recorded map."""

    def __init__(self, model: torch.nn.Module, runs: Mapping[str, tuple[Run, ...]]) -> None:
        self._runs = dict(runs)
        parameters = dict(model.named_parameters())
        used = {run.parameter for tensor_runs in runs.values() for run in tensor_runs}
        self._storage = {name: _element_bits(name, parameters[name]) for name in used}

    @property
    def names(self) -> list[str]:
        """Checkpoint tensors, in the checkpoint's order."""
        return list(self._runs)

    def length(self, name: str) -> int:
        """Number of elements of a checkpoint tensor."""
        return sum(run.length for run in self._runs[name])

    def write(self, changes: Sequence[ElementChange]) -> list[Overwritten]:
        """Overwrite elements and return what they held, for `restore`.

        Raises:
            ValueError: a name, an index or a length is wrong; nothing was written.
        """
        for change in changes:
            self._check(change)
        held = [self._overwrite(change) for change in changes]
        return [piece for pieces in held for piece in pieces]

    def restore(self, overwritten: Sequence[Overwritten]) -> None:
        """Take a `write` back, in the reverse order."""
        for piece in reversed(overwritten):
            self._storage[piece.parameter][piece.places] = piece.elements

    def write_all(self, whole: Mapping[str, Bits]) -> None:
        """Overwrite tensors entirely with u2[n] each. Raises ValueError for a wrong length, before any write."""
        for name, bits in whole.items():
            if bits.shape != (self.length(name),):
                raise ValueError(f"{name} has {self.length(name)} elements, the new value has {bits.shape}")
        for name, bits in whole.items():
            for run in self._runs[name]:
                storage = self._storage[run.parameter]
                source = bits[run.source : run.source + run.length]
                storage[run.target : run.target + run.length] = _from_bf16(source, storage.dtype)

    def pieces(self, name: str) -> Iterator[tuple[int, Bits]]:
        """Read a tensor back as (start, u2[n]) pieces, in order.

        Raises:
            NotRepresentableError: an element is not a bf16 value.
        """
        for run in self._runs[name]:
            for offset in range(0, run.length, _PIECE):
                n = min(_PIECE, run.length - offset)
                start = run.target + offset
                yield run.source + offset, _to_bf16(self._storage[run.parameter][start : start + n], name)

    def _check(self, change: ElementChange) -> None:
        if change.name not in self._runs:
            raise ValueError(f"the engine serves no tensor {change.name}")
        if change.indices.shape != change.bits.shape or change.indices.ndim != 1:
            raise ValueError(f"{change.name}: {change.indices.shape} indices for {change.bits.shape} values")
        if len(change.indices) and not 0 <= change.indices.min() <= change.indices.max() < self.length(change.name):
            raise ValueError(f"{change.name}: an index is outside its {self.length(change.name)} elements")

    def _overwrite(self, change: ElementChange) -> list[Overwritten]:
        held = []
        for run, chosen, places in self._locate(change.name, change.indices):
            storage = self._storage[run.parameter]
            held.append(Overwritten(run.parameter, places, storage[places]))
            storage[places] = _from_bf16(change.bits[chosen], storage.dtype)
        return held

    def _locate(self, name: str, indices: Indices) -> Iterator[tuple[Run, Any, Indices]]:
        runs = self._runs[name]
        if len(runs) == 1:
            yield runs[0], slice(None), indices - runs[0].source + runs[0].target
            return
        for run in runs:
            chosen = np.flatnonzero((indices >= run.source) & (indices < run.source + run.length))
            yield run, chosen, indices[chosen] - run.source + run.target


def _element_bits(name: str, parameter: torch.nn.Parameter) -> npt.NDArray[Any]:
    views = {torch.float32: (torch.int32, np.uint32), torch.bfloat16: (torch.int16, np.uint16)}
    if parameter.dtype not in views or parameter.device.type != "cpu":
        raise UnsupportedModelError(f"{name} is {parameter.dtype} on {parameter.device}: serve float32 or bfloat16")
    whole = torch.empty(0, dtype=parameter.dtype).set_(parameter.data.untyped_storage())
    as_int, as_bits = views[parameter.dtype]
    return whole.view(as_int).numpy().view(as_bits)


def _to_bf16(elements: npt.NDArray[Any], name: str) -> Bits:
    if elements.dtype == np.uint16:
        return np.ascontiguousarray(elements)
    halves = np.ascontiguousarray(elements).astype("<u4", copy=False).view("<u2").reshape(-1, 2)
    if np.bitwise_or.reduce(halves[:, 0], initial=np.uint16(0)):
        raise NotRepresentableError(f"a live element of {name} is not a bf16 value")
    return np.ascontiguousarray(halves[:, 1])


def _from_bf16(bits: Bits, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if dtype == np.uint16:
        return bits
    return bits.astype(np.uint32) << np.uint32(16)
