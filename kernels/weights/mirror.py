"""The CPU mirror of the served version. Every delta is checked against it before the engine is changed.

A mirror holds each tensor's own bit patterns, of any dtype. It changes to another version through a `Draft`, which
can be undone. Invariants:

- outside a draft the mirror holds, bit for bit, one version whose fingerprints equal its manifest's;
- a step of a draft makes exactly the version that its manifest names, or raises an error;
- `revert` restores the content before the draft, bit for bit. A draft of an empty mirror keeps nothing to undo it:
  it writes each block when it arrives, and holds one copy of the weights and the blocks that are being decoded.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from tidemill.kernels.block import EncodedBlock
from tidemill.kernels.compiled import Bits, Indices
from tidemill.kernels.delta import BlockChange, apply_change, resolve_all
from tidemill.kernels.fingerprint import ZERO, Fingerprint, TensorKey, fingerprint
from tidemill.kernels.weights.anchor import MARKER
from tidemill.kernels.weights.bits import Weight
from tidemill.kernels.weights.checkpoint import WeightFilesError, save_checkpoint
from tidemill.kernels.wire import DeltaError
from tidemill.schemas.records import Manifest, TensorInfo

SPARSE = 8
"""If fewer than one in this many elements of a tensor differ from an anchor's, only the differences are held."""


@dataclass(frozen=True, slots=True)
class ElementChange:
    """New bits for some elements of one checkpoint tensor."""

    name: str
    indices: Indices
    """i8[n], flat and unique, in any order, in checkpoint coordinates."""
    bits: Bits
    """uN[n], the tensor's own patterns."""


class Mirror:
    """Bit patterns of one version by tensor, with their fingerprints. Empty until its first draft is kept."""

    def __init__(self) -> None:
        self.version = -1
        self.weights: dict[str, Weight] = {}
        """Every tensor, in the mirror's own memory; read-only for callers."""
        self._fingerprints: dict[str, Fingerprint] = {}

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the whole version."""
        return sum(self._fingerprints.values(), start=ZERO)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprint of each tensor, hexadecimal."""
        return {name: value.hex() for name, value in self._fingerprints.items()}

    @property
    def n_elements(self) -> int:
        return sum(weight.bits.size for weight in self.weights.values())

    def bits(self, name: str) -> Bits:
        """Return one tensor, uN[n], flat, in the mirror's own memory; read-only for callers. Raises KeyError."""
        return self.weights[name].bits.reshape(-1)

    def resolve(self, block: EncodedBlock) -> tuple[BlockChange, ...]:
        """Return a block's changes to the mirror; empty if it has them already. From any thread; writes nothing.

        Raises DeltaError if the block is malformed or does not match these weights.
        """
        dtype = block.header.kind.name
        for name in block.names:
            if name not in self.weights or self.weights[name].dtype != dtype:
                raise DeltaError(f"the delta changes {name} ({dtype}), which is not served")
        return resolve_all(block, {name: self.bits(name) for name in block.names})

    def save(self, directory: Path) -> None:
        """Write the version's tensors as `model.safetensors`, from which the engine loads the whole model."""
        save_checkpoint(directory, self.weights)

    def save_whole(self, directory: Path, anchor: Path) -> None:
        """Write the version as a checkpoint in a new directory, with an anchor's configuration and tokenizer."""
        weights = ("*.safetensors", "*.safetensors.index.json", MARKER)
        shutil.copytree(anchor, directory, ignore=shutil.ignore_patterns(*weights))
        self.save(directory)


class Draft:
    """A change of a mirror to another version, in steps. End it with `keep` or `revert`."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror
        self.fresh = not mirror.weights
        """Whether the mirror was empty before the draft."""
        shapes = {name: weight.bits.shape for name, weight in mirror.weights.items()}
        self._before = (mirror.version, shapes, dict(mirror._fingerprints))
        self._held: list[tuple[str, Indices | None, Bits]] = []
        """In order of the steps: overwritten elements of a tensor (None: all), and their previous values, flat."""
        self._steps = 0

    def load(
        self, weights: Iterable[tuple[str, Weight]], uri: str, manifest: Manifest, outline: Sequence[TensorInfo] = ()
    ) -> None:
        """Change the mirror to the version of an anchor. Memory: one tensor, and the differences.

        Args:
            weights: the anchor's weights, each tensor once.
            uri: the anchor's URI, for errors.
            manifest: the version's manifest.
            outline: names, types and shapes of the tensors, for a manifest that does not list them.

        Raises WeightFilesError unless the tensors are those of the mirror, each has the fingerprint in the manifest,
        and their sum is the version's fingerprint.
        """
        mirror, missing = self.mirror, {tensor.name: tensor for tensor in manifest.tensors or outline}
        if mirror.weights and missing.keys() != mirror.weights.keys():
            raise WeightFilesError(f"version {manifest.version} has other tensors than the version that is served")
        for name, weight in weights:
            if name not in missing:
                raise WeightFilesError(f"anchor {uri} does not name the tensors of version {manifest.version}")
            expected, bits = missing.pop(name), np.array(weight.bits, copy=True).reshape(-1)
            made = fingerprint(bits, TensorKey.of(name))
            if manifest.tensors and made.hex() != expected.fingerprint:
                raise WeightFilesError(f"{name} of the anchor has fingerprint {made.hex()}, not {expected.fingerprint}")
            if bits.size != prod(expected.shape):
                raise WeightFilesError(
                    f"{name} of the anchor has {bits.size} elements, its manifest says {expected.shape}"
                )
            served = mirror.weights.get(name)
            if served is not None and (served.dtype, served.bits.size) != (expected.dtype, bits.size):
                raise WeightFilesError(f"{name} of the anchor has another shape or dtype than the one that is served")
            held = bits[:0] if served is None else served.bits.reshape(-1)
            if served is not None and SPARSE * (differing := np.flatnonzero(held != bits)).size < bits.size:
                self._write(name, differing, held[differing], bits[differing])
                bits = held
            elif served is not None:
                self._held.append((name, None, held))
            mirror.weights[name] = Weight(expected.dtype, bits.reshape(expected.shape))
            mirror._fingerprints[name] = made
        if missing:
            raise WeightFilesError(f"anchor {uri} does not name the tensors of version {manifest.version}")
        if mirror.fingerprint.hex() != manifest.fingerprint:
            raise WeightFilesError(f"the tensors of anchor {uri} do not add up to version {manifest.version}")
        mirror.version = manifest.version
        self._steps += 1

    def resolve(self, block: EncodedBlock) -> tuple[BlockChange, ...]:
        """Return the changes of a block of the next delta, for `advance`; from any thread.

        If the mirror was empty, writes the block now; the result then holds only fingerprints. Raises DeltaError.
        """
        found = self.mirror.resolve(block)
        if not self.fresh:
            return found
        for change in found:
            apply_change(change, self.mirror.bits(change.name))
        # Not slices: a slice would keep the memory of its whole array.
        nowhere, none = np.empty(0, np.int64), np.empty(0, np.uint8)
        return tuple(replace(change, indices=nowhere, old_bits=none, new_bits=none) for change in found)

    def advance(self, changes: Sequence[BlockChange], manifest: Manifest) -> None:
        """Apply the changes of one delta: all of its blocks, resolved by `resolve` since the last step.

        Raises DeltaError if they do not make the manifest's version; nothing is written here then.
        """
        made = dict(self.mirror._fingerprints)
        for change in changes:
            made[change.name] = made[change.name] + change.target - change.base
        total = sum(made.values(), start=ZERO).hex()
        if total != manifest.fingerprint:
            raise DeltaError(
                f"the delta does not make version {manifest.version}: it makes {total}, not {manifest.fingerprint}"
            )
        for change in changes:
            self._write(change.name, change.indices, change.old_bits, change.new_bits)
        self.mirror._fingerprints = made
        self.mirror.version = manifest.version
        self._steps += 1

    def check(self, manifest: Manifest) -> None:
        """Raise DeltaError if a tensor differs from the fingerprint that the manifest lists for it."""
        if not manifest.tensors:
            return
        made, expected = self.mirror.fingerprints, {tensor.name: tensor.fingerprint for tensor in manifest.tensors}
        wrong = [name for name in sorted({*made, *expected}) if made.get(name) != expected.get(name)]
        found = f"{len(wrong)} tensors differ, the first is {wrong[0]}" if wrong else ""
        if not wrong and self.mirror.fingerprint.hex() != manifest.fingerprint:
            found = "the tensors' fingerprints do not add up to the version's"
        if found:
            raise DeltaError(f"version {manifest.version} is not what its manifest lists: {found}")

    def recount(self, names: Iterable[str]) -> None:
        """Raise DeltaError unless these tensors' weights have the fingerprints that the deltas name."""
        for name in sorted(set(names)):
            made, claimed = fingerprint(self.mirror.bits(name), TensorKey.of(name)), self.mirror._fingerprints[name]
            if made != claimed:
                raise DeltaError(f"{name} became {made.hex()}, not {claimed.hex()}")

    def changes(self) -> tuple[ElementChange, ...]:
        """Return the changes from the version before the draft to the present state: each element at most once.

        Not for a draft of an empty mirror, which keeps no changes.
        """
        bits_of = self.mirror.bits
        if self._steps == 1 and all(indices is not None for _, indices, _ in self._held):
            return tuple(ElementChange(n, at, bits_of(n)[at]) for n, at, _ in self._held if at is not None)
        by_name: dict[str, list[tuple[Indices | None, Bits]]] = {}
        for name, indices, bits in self._held:
            by_name.setdefault(name, []).append((indices, bits))
        changes = []
        for name, steps in by_name.items():
            now, (first, before) = bits_of(name), steps[0]
            if first is None:
                # An anchor is the first step of a draft: a tensor that it replaced whole is the one in the engine.
                differing: Indices = np.flatnonzero(before != now)
            else:
                touched = np.concatenate([indices for indices, _ in steps if indices is not None])
                indices, at = np.unique(touched, return_index=True)
                differing = indices[np.concatenate([bits for _, bits in steps])[at] != now[indices]]
            if differing.size:
                changes.append(ElementChange(name, differing, now[differing]))
        return tuple(changes)

    def keep(self) -> None:
        """Accept the new version: release the previous values."""
        self._held.clear()

    def revert(self) -> None:
        """Restore the content before the draft."""
        mirror = self.mirror
        for name, indices, bits in reversed(self._held):
            if indices is None:
                mirror.weights[name] = Weight(mirror.weights[name].dtype, bits)
            else:
                mirror.bits(name)[indices] = bits
        mirror.version, shapes, mirror._fingerprints = self._before
        mirror.weights = {n: Weight(mirror.weights[n].dtype, mirror.bits(n).reshape(shapes[n])) for n in shapes}
        self._held.clear()

    def _write(self, name: str, indices: Indices, old: Bits, new: Bits) -> None:
        if not self.fresh:
            self._held.append((name, indices, old))
        self.mirror.bits(name)[indices] = new
