"""The CPU mirror of the served version: what every delta is checked against before the engine is touched.

Keeps true: the mirror holds, bit for bit, one version whose fingerprints are its manifest's; staging a delta changes
nothing, and what it returns makes exactly the version that the delta's manifest names, or there is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tidemill.consumers.replica.anchor import AnchorError, AnchorReader
from tidemill.consumers.replica.live_weights import ElementChange
from tidemill.consumers.replica.weight_map import Bits
from tidemill.kernels.delta import DeltaError, EncodedBlock, FingerprintMismatch, resolve
from tidemill.kernels.fingerprint import ZERO, Fingerprint, TensorKey, fingerprint
from tidemill.schemas.records import Manifest


@dataclass(frozen=True, slots=True)
class Staged:
    """A checked delta: the elements to write, and the fingerprints that the tensors then have."""

    version: int
    changes: tuple[ElementChange, ...]
    fingerprints: Mapping[str, Fingerprint]


class Mirror:
    """One version's bits by tensor, u2[n] each, with their fingerprints."""

    def __init__(self, version: int, tensors: dict[str, Bits], shapes: dict[str, tuple[int, ...]]) -> None:
        self.version = version
        self._shapes = shapes
        self._tensors = tensors
        self._fingerprints = {name: fingerprint(bits, TensorKey.of(name)) for name, bits in tensors.items()}

    @classmethod
    def from_anchor(cls, directory: Path, manifest: Manifest) -> Mirror:
        """Read a version from its anchor. Raises AnchorError unless every fingerprint is the manifest's."""
        reader = AnchorReader(directory)
        if set(reader.names) != {tensor.name for tensor in manifest.tensors}:
            raise AnchorError(f"anchor {directory} does not name the tensors of version {manifest.version}")
        shapes = {tensor.name: tuple(tensor.shape) for tensor in manifest.tensors}
        mirror = cls(manifest.version, {name: reader.bits(name) for name in reader.names}, shapes)
        wrong = mirror._differences(manifest, mirror._fingerprints)
        if wrong:
            raise AnchorError(f"anchor {directory} is not version {manifest.version}: {wrong}")
        return mirror

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the whole version."""
        return sum(self._fingerprints.values(), start=ZERO)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprint of each tensor, hexadecimal."""
        return {name: value.hex() for name, value in self._fingerprints.items()}

    def bits(self, name: str) -> Bits:
        """One tensor, u2[n], flat: the mirror's own memory, for reading. Raises KeyError."""
        return self._tensors[name]

    def stage(self, blocks: Iterable[EncodedBlock], manifest: Manifest) -> Staged:
        """Check every block of a delta against the mirror, and the result against the manifest.

        Raises:
            DeltaError: a block is malformed, does not fit these weights, or the result is not the manifest's version.
        """
        changes: list[ElementChange] = []
        made = dict(self._fingerprints)
        for block in blocks:
            if block.name not in self._tensors or block.dtype != "bfloat16":
                raise DeltaError(f"the delta changes {block.name} ({block.dtype}), which is not served")
            change = resolve(block, self._tensors[block.name])
            if change is not None:
                changes.append(ElementChange(block.name, change.indices, change.new_bits))
                made[block.name] = made[block.name] + block.target - block.base
        wrong = self._differences(manifest, made)
        if wrong:
            raise FingerprintMismatch(f"the delta does not make version {manifest.version}: {wrong}")
        return Staged(manifest.version, tuple(changes), made)

    def commit(self, staged: Staged) -> None:
        """Become the staged version."""
        for change in staged.changes:
            self._tensors[change.name][change.indices] = change.bits
        self._fingerprints = dict(staged.fingerprints)
        self.version = staged.version

    def save(self, directory: Path) -> None:
        """Write the version's tensors as `model.safetensors`, for the engine to read whole."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: torch.from_numpy(bits.view("<i2")).view(torch.bfloat16).reshape(self._shapes[name])
            for name, bits in self._tensors.items()
        }
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    def _differences(self, manifest: Manifest, made: Mapping[str, Fingerprint]) -> str:
        """Which tensors are not the manifest's; empty when all are."""
        expected = {tensor.name: tensor.fingerprint for tensor in manifest.tensors}
        names = sorted({*made, *expected})
        wrong = [name for name in names if name not in made or made[name].hex() != expected.get(name)]
        if not wrong and sum(made.values(), start=ZERO).hex() != manifest.fingerprint:
            return "the tensors' fingerprints do not add up to the version's"
        return f"{len(wrong)} tensors differ, the first is {wrong[0]}" if wrong else ""
