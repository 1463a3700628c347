"""This rank's parts of one version's weights, in memory: the copy that the next version is compared with.

Invariants: the weights are those of the named version, bit for bit, in memory that only this module writes; the set
of tensors, their types, shapes and cuts never change; each part's fingerprint is that of its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from tidemill.kernels.backend import KernelBackend
from tidemill.kernels.compiled import Bits
from tidemill.kernels.elements import BY_NAME, TensorChange
from tidemill.kernels.fingerprint import Fingerprint
from tidemill.kernels.weights.graph import VersionError
from tidemill.kernels.weights.ranks import Ranks
from tidemill.kernels.weights.tensor_parts import (
    PartInfo,
    Parts,
    Place,
    TensorLike,
    TensorPart,
    Tensors,
    as_part,
    exchange,
    named,
    part_info,
    place_of,
    spans_of_all,
)


class HeldVersion:
    """This rank's parts of one version, in its own memory.

    Args:
        version: number of the version.
        parts: part of every tensor; `take_over` writes to it, and only this object reads it.
        fingerprints: fingerprint of each part; computed if None.
    """

    def __init__(self, version: int, parts: Parts, fingerprints: Mapping[str, Fingerprint] | None = None) -> None:
        self.version = version
        self.parts = dict(parts)
        if fingerprints is None:
            fingerprints = {name: part.fingerprint() for name, part in parts.items()}
        self._fingerprints = dict(fingerprints)

    @classmethod
    def copy_of(cls, version: int, tensors: Tensors, *, on_device: bool = False) -> HeldVersion:
        """Copy a version's tensors one at a time: into the CPU's memory, or each on its own device.

        Raises TypeError for a type that a version cannot carry, VersionError for a repeated name or no tensors.
        """
        parts = {}
        for name, value in named(version, tensors):
            part = as_part(name, value)
            on_host = isinstance(part.bits, np.ndarray) or not on_device
            parts[name] = replace(part, bits=_host_copy(part) if on_host else part.bits.clone())
        if not parts:
            raise VersionError(f"version {version} has no tensors")
        return cls(version, parts)

    @property
    def infos(self) -> dict[str, PartInfo]:
        """This rank's report on its parts, in their order."""
        return {name: part_info(part, self._fingerprints[name]) for name, part in self.parts.items()}

    def check(self, version: int, tensors: Mapping[str, TensorLike], *, cuts: bool = True) -> None:
        """Raise VersionError or TypeError unless `tensors` have the same names, types, shapes and cuts.

        Copies nothing. Without `cuts`, other elements of the same tensors are allowed.
        """
        self._require_all(version, tensors.keys())
        for name, value in tensors.items():
            self._require_alike(version, name, place_of(name, value), cuts)

    def take_over(
        self, version: int, tensors: Tensors, names: Container[str] | None = None, *, on_device: bool = False
    ) -> Iterator[TensorChange]:
        """Yield each tensor's change to `version`; copy its new patterns when the next change is requested.

        After the iterator has ended, all tensors are copied; call `becomes` then.

        Args:
            version: the version of the tensors.
            tensors: all tensors, in the form that a trainer passes.
            names: the tensors to copy; all if None.
            on_device: compare and hold each tensor on its own device; otherwise in the CPU's memory.

        Raises VersionError or TypeError for tensors that do not have the same names, types, shapes and cuts, possibly
        after some were copied: this object must not be used afterwards.
        """
        seen: set[str] = set()
        for name, value in named(version, tensors):
            seen.add(name)
            if names is not None and name not in names:
                continue
            new = as_part(name, value)
            self._require_alike(version, name, place_of(name, new), cuts=True)
            bits = new.bits if on_device else KernelBackend.host(new.bits)
            held = KernelBackend.beside(self.parts[name].bits, bits)
            self.parts[name] = replace(self.parts[name], bits=held)
            yield TensorChange(name, new.dtype, held, bits, new.start, new.total)
            if isinstance(held, np.ndarray):
                np.copyto(held, bits)
            else:
                held.copy_(bits)
        self._require_all(version, seen)

    def becomes(self, version: int, covered: Iterable[Mapping[str, tuple[int, Fingerprint]]]) -> None:
        """Set the version number after `take_over` has ended.

        Args:
            covered: `DeltaShard.covered` of each shard of the change.
        """
        self.version = version
        for name, (n, made) in ((name, found) for shard in covered for name, found in shard.items()):
            part = self.parts[name]
            # Blocks without a change are in no shard.
            self._fingerprints[name] = made if n == part.n else part.fingerprint()

    def snapshot(self) -> HeldVersion:
        """Return a copy in the CPU's memory."""
        copied = {name: replace(part, bits=_host_copy(part)) for name, part in self.parts.items()}
        return HeldVersion(self.version, copied, self._fingerprints)

    def _require_all(self, version: int, names: Iterable[str]) -> None:
        odd = sorted(self.parts.keys() ^ set(names))
        if odd:
            raise VersionError(
                f"version {version} has other tensors than version {self.version}; in one of them only: "
                f"{', '.join(odd[:5])}. A chain keeps its tensors: begin another run for another model"
            )

    def _require_alike(self, version: int, name: str, found: Place, cuts: bool) -> None:
        if name not in self.parts:
            raise VersionError(f"version {version} has a tensor {name}, version {self.version} does not")
        held = place_of(name, self.parts[name])
        if (held.dtype, held.shape) != (found.dtype, found.shape):
            raise VersionError(
                f"version {version}: {name} is {found.dtype}{list(found.shape)}, in version {self.version} it is "
                f"{held.dtype}{list(held.shape)}: a chain keeps types and shapes"
            )
        if cuts and held != found:
            raise VersionError(
                f"version {version}: this rank has {found.n} elements of {name} from {found.start} on, of version "
                f"{self.version} it holds {held.n} from {held.start} on: a delta keeps where tensors are cut; open the "
                "publisher again after a change"
            )


def _host_copy(part: TensorPart) -> Bits:
    return np.array(KernelBackend.host(part.bits), copy=True)


def rebuild_whole(make: Callable[[], HeldVersion], ranks: Ranks) -> HeldVersion:
    """Run `make` on the first rank, which holds the whole version; the other ranks hold none of its elements.

    Raises the errors of `make`, on every rank.
    """
    made = ranks.on_first(make)

    def outline() -> tuple[int, dict[str, Place]]:
        assert made is not None
        return made.version, {name: place_of(name, part) for name, part in made.parts.items()}

    version, places = ranks.from_first(outline)
    if made is not None:
        return made
    return HeldVersion(
        version,
        {
            name: TensorPart(name, place.dtype, place.shape, 0, np.empty(0, BY_NAME[place.dtype].bits))
            for name, place in places.items()
        },
    )


def rebuild_parts(make: Callable[[], HeldVersion], version: int, like: Tensors, ranks: Ranks) -> HeldVersion:
    """Run `make` on the first rank and distribute the version, so that each rank has its part.

    The first rank holds the whole version at first, and sends the other ranks their parts tensor by tensor.

    Args:
        version: number of the version that will continue it.
        like: tensors of that version, which define the cuts; on several ranks a mapping with this rank's parts.

    Raises the errors of `make`, and VersionError if `like` has other tensors, on every rank.
    """
    whole = rebuild_whole(make, ranks)
    if ranks.size == 1:
        return whole
    given = dict(named(version, like))
    ranks.gather(lambda: whole.check(version, given, cuts=False))
    wanted = spans_of_all({name: place_of(name, value)[2:] for name, value in given.items()}, ranks)
    held = spans_of_all({name: place_of(name, part)[2:] for name, part in whole.parts.items()}, ranks)
    names = list(whole.parts)
    return HeldVersion(
        whole.version, {name: exchange(whole.parts.pop(name), held[name], wanted[name], ranks) for name in names}
    )
