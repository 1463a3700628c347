"""One version's weights in memory: the copy that the next version is compared with.

What it keeps true: the weights are those of the version that it names, bit for bit, in memory that nobody else writes;
the set of tensors, their types and shapes never change; `tensors` holds their fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from tidemill.kernels.delta import TensorChange
from tidemill.kernels.fingerprint import Fingerprint
from tidemill.kernels.weights.bits import Weight, WeightLike, as_weight, changed, tensor_info, total_fingerprint
from tidemill.kernels.weights.graph import VersionError
from tidemill.schemas.records import TensorInfo

Tensors = Mapping[str, WeightLike] | Iterable[tuple[str, WeightLike]]
"""A version as a trainer hands it over: by checkpoint name, each tensor once, in any order."""


class HeldVersion:
    """The weights of one version, owned.

    Args:
        version: which one.
        weights: every tensor; written to by `take_over`, read by nobody else.
        tensors: what a manifest says of them, in its order.
    """

    def __init__(self, version: int, weights: Mapping[str, Weight], tensors: Iterable[TensorInfo]) -> None:
        self.version = version
        self.weights = dict(weights)
        self.tensors = list(tensors)

    @classmethod
    def copy_of(cls, version: int, tensors: Tensors) -> HeldVersion:
        """A version from its tensors, copied one at a time.

        Raises TypeError for a type that a version cannot carry, VersionError for a name that comes twice or for none.
        """
        weights: dict[str, Weight] = {}
        infos: list[TensorInfo] = []
        for name, value in named(tensors):
            if name in weights:
                raise VersionError(f"version {version} has {name} twice")
            weight = as_weight(name, value)
            weights[name] = Weight(weight.dtype, np.array(weight.bits, copy=True, order="C"))
            infos.append(tensor_info(name, weights[name]))
        if not weights:
            raise VersionError(f"version {version} has no tensors")
        return cls(version, weights, infos)

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the whole version."""
        return total_fingerprint(self.tensors)

    def check(self, version: int, tensors: Mapping[str, WeightLike]) -> None:
        """Raise VersionError or TypeError unless `tensors` are of the same names, types and shapes. Copies nothing."""
        self._require_all(version, tensors.keys())
        for name, value in tensors.items():
            self._require_alike(version, name, *_outline(name, value))

    def take_over(self, version: int, tensors: Tensors) -> Iterator[TensorChange]:
        """Each tensor's change to `version`; when the next one is asked for, its new patterns are taken over.

        Only when the iterator ends are all of them in; call `becomes` then.

        Raises VersionError or TypeError for tensors that are not of the same names, types and shapes, possibly after
        some were taken over: this object is of no use then.
        """
        seen: set[str] = set()
        for name, value in named(tensors):
            if name in seen:
                raise VersionError(f"version {version} has {name} twice")
            seen.add(name)
            new = as_weight(name, value)
            self._require_alike(version, name, new.dtype, new.bits.shape)
            held = self.weights[name].bits
            yield TensorChange(name, new.dtype, held, new.bits)
            np.copyto(held, new.bits)
        self._require_all(version, seen)

    def becomes(self, version: int, changes: Mapping[str, Fingerprint]) -> None:
        """Be called `version` from now on, its weights having been changed by `changes`, by tensor."""
        self.version = version
        self.tensors = changed(self.tensors, [changes])

    def snapshot(self) -> HeldVersion:
        """A copy in memory of its own."""
        copied = {name: Weight(weight.dtype, weight.bits.copy()) for name, weight in self.weights.items()}
        return HeldVersion(self.version, copied, self.tensors)

    def _require_all(self, version: int, names: Iterable[str]) -> None:
        odd = sorted(self.weights.keys() ^ set(names))
        if odd:
            raise VersionError(
                f"version {version} has other tensors than version {self.version}; in one of them only: "
                f"{', '.join(odd[:5])}. A chain keeps its tensors: begin another run for another model"
            )

    def _require_alike(self, version: int, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        if name not in self.weights:
            raise VersionError(f"version {version} has a tensor {name}, version {self.version} does not")
        held = self.weights[name]
        if (held.dtype, held.bits.shape) != (dtype, shape):
            raise VersionError(
                f"version {version}: {name} is {dtype}{list(shape)}, in version {self.version} it is "
                f"{held.dtype}{list(held.bits.shape)}: a chain keeps types and shapes"
            )


def named(tensors: Tensors) -> Iterable[tuple[str, WeightLike]]:
    """The tensors with their names, in the order given."""
    return tensors.items() if isinstance(tensors, Mapping) else tensors


def _outline(name: str, value: WeightLike) -> tuple[str, tuple[int, ...]]:
    """Type and shape, without moving a tensor off its device."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch."), tuple(value.shape)
    weight = as_weight(name, value)
    return weight.dtype, weight.bits.shape
