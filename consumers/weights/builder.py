"""Builder of versions from the log and the object store, over any usable path of the graph, in memory and as files.

Invariants: a built version has the fingerprints of its manifest; after each delta the fingerprints of the changed
tensors are computed again from the weights; an unusable delta or anchor raises `UnusableWeights` with the reason. The
directory of a checkpoint appears whole or not at all, and only after the tensors in its files were read back and have
these fingerprints.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import fsspec

from tidemill.consumers.replica.config import FETCH_BYTES
from tidemill.consumers.weights.chain import Chain
from tidemill.kernels.fingerprint import TensorKey, fingerprint
from tidemill.kernels.weights.anchor import discard_copy, fetch_anchor
from tidemill.kernels.weights.bits import Weight
from tidemill.kernels.weights.checkpoint import WeightFilesError, map_checkpoint
from tidemill.kernels.weights.delta_fetch import Pieces, open_fetcher
from tidemill.kernels.weights.graph import Delta, PathStep, Unreachable, UpdatePath, VersionGraph
from tidemill.kernels.weights.mirror import Draft, Mirror
from tidemill.kernels.weights.rebuild import Rebuilder, RefusedStepError
from tidemill.kernels.weights.tensor_table import with_tensors
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import Manifest
from tidemill.schemas.stored_object import StoredObjectError, StoreUnavailableError

CONNECTIONS = 4
"""Connections to the log over which deltas are read."""


class UnusableWeights(ValueError):
    """Error for a delta or an anchor that is damaged, missing, or not the one that its manifest names."""


class Builder:
    """Builds versions of one log. Each mirror that it returns is one copy of the weights in memory.

    Args:
        directory: directory to which remote anchors are copied.
        progress: called with a description of the next step.
    """

    def __init__(self, pieces: Pieces, directory: Path, progress: Callable[[str], None] = lambda _: None) -> None:
        self._directory, self._progress = directory, progress
        self._rebuilder = Rebuilder(pieces, os.cpu_count() or 1, directory)

    def close(self) -> None:
        self._rebuilder.close()

    def with_tensors(self, manifest: Manifest) -> Manifest:
        """Return the manifest with its list of tensors. Raises UnusableWeights."""
        with _as_unusable():
            return with_tensors(manifest)

    def from_anchor(self, manifest: Manifest) -> Mirror:
        """Build a version from its anchor, with a check of every tensor. Raises UnusableWeights."""
        mirror = Mirror()
        with _as_unusable():
            self._rebuilder.follow(UpdatePath(manifest, ()), Draft(mirror))
        return mirror

    def check_anchor(self, manifest: Manifest) -> None:
        """Compare an anchor with its manifest, one tensor in memory at a time. Raises UnusableWeights."""
        if manifest.anchor is None:
            raise UnusableWeights(f"version {manifest.version} has no anchor")
        with _as_unusable():
            try:
                files = fetch_anchor(manifest.anchor.uri, self._directory)
                objection = fingerprint_objection(map_checkpoint(files), with_tensors(manifest))
            finally:
                # A chain may have more anchors than fit on the disk.
                discard_copy(manifest.anchor.uri, self._directory)
        if objection:
            raise UnusableWeights(f"it is not version {manifest.version}: {objection}")

    def apply(self, delta: Delta, mirror: Mirror, *, keep: bool = True) -> None:
        """Apply a delta to a mirror and compare the resulting weights; then `keep` them or revert.

        Raises UnusableWeights; the mirror is then unchanged.
        """
        draft = Draft(mirror)
        with _as_unusable():
            self._rebuilder.follow(UpdatePath(None, (delta,)), draft, recount=True)
        (draft.keep if keep else draft.revert)()

    def build(self, graph: VersionGraph, version: int) -> tuple[Mirror, UpdatePath, Path]:
        """Build a version over the best usable path; an unusable delta or anchor is on no later path of `graph`.

        Returns the version, its path, and the directory of the path's anchor: configuration, tokenizer, older weights.
        Raises VersionError.
        """
        reasons: list[str] = []
        while True:
            try:
                path = graph.require_path(version, anchor_exists)
            except Unreachable as error:
                raise Unreachable("; ".join([str(error), *reasons])) from error
            mirror, begun = Mirror(), list[PathStep]()

            def begin(step: PathStep, begun: list[PathStep] = begun) -> None:
                begun.append(step)
                self._progress(f"{'version' if isinstance(step, Delta) else 'anchor'} {step.version}")

            try:
                with _as_unusable():
                    anchor, _ = self._rebuilder.follow(path, Draft(mirror), recount=True, progress=begin)
                assert anchor is not None
                return mirror, path, anchor
            except UnusableWeights as error:
                step = begun[-1]
                graph.refuse(step)
                name = f"anchor of version {step.version}"
                if isinstance(step, Delta):
                    name = f"delta from {step.base} to {step.version}"
                reasons.append(f"the {name}: {error}")


@contextmanager
def open_builder(
    kafka: KafkaSettings, timeout_s: float, progress: Callable[[str], None] = lambda _: None
) -> Iterator[Builder]:
    """Open a builder on a log; its copies of anchors are removed at the end.

    Args:
        timeout_s: longest wait for a chunk that the log should have, in seconds.
    """
    with (
        tempfile.TemporaryDirectory(prefix="tidemill-weights-") as scratch,
        open_fetcher(kafka, timeout_s, CONNECTIONS, "tidemill-weights-chunks", FETCH_BYTES) as pieces,
        closing(Builder(pieces, Path(scratch), progress)) as builder,
    ):
        yield builder


def anchor_exists(manifest: Manifest) -> bool:
    if manifest.anchor is None:
        return False
    try:
        filesystem, path = fsspec.core.url_to_fs(manifest.anchor.uri)
        return bool(filesystem.isdir(path))
    except (OSError, ImportError, ValueError):
        return False


def fingerprint_objection(tensors: Mapping[str, Weight], manifest: Manifest) -> str:
    """Return why a checkpoint does not contain a version; empty if it does."""
    expected = {tensor.name: tensor.fingerprint for tensor in manifest.tensors}
    odd = sorted(set(tensors) ^ set(expected))
    if odd:
        return f"{odd[0]} is in one of checkpoint and manifest only"
    for name, weight in tensors.items():
        made = fingerprint(weight.bits, TensorKey.of(name)).hex()
        if made != expected[name]:
            return f"{name} has fingerprint {made}, its manifest says {expected[name]}"
    return ""


@contextmanager
def _as_unusable() -> Iterator[None]:
    try:
        yield
    except (RefusedStepError, WeightFilesError, StoredObjectError) as error:
        raise UnusableWeights(str(error)) from error
    except (StoreUnavailableError, TimeoutError) as error:
        raise UnusableWeights(f"it cannot be read now: {error}") from error


def checkout(chain: Chain, builder: Builder, version: int, directory: Path) -> dict[str, Any]:
    """Write `version` to `directory`, which must not exist or be empty.

    Returns its `version`, `directory` and `fingerprint`, the size of all files (`n_bytes`), and the path over which it
    was built (`way`). Raises VersionError, ValueError.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not an empty directory: name another")
    chain.manifest(version)
    mirror, path, anchor = builder.build(chain, version)
    staged = directory.absolute().parent / f".{directory.name}.{uuid.uuid4().hex[:12]}"
    try:
        mirror.save_whole(staged, anchor)
        manifest = builder.with_tensors(chain.manifest(version))
        try:
            objection = fingerprint_objection(map_checkpoint(staged), manifest)
        except WeightFilesError as error:
            raise ValueError(f"what was written cannot be read back: {error}") from error
        if objection:
            raise ValueError(f"what was written is not version {version}: {objection}")
        try:
            # A rename replaces an empty directory, and fails if another process has written files to it.
            os.replace(staged, directory)
        except OSError as error:
            raise ValueError(f"{directory} cannot be made: {error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    n_bytes = sum(file.stat().st_size for file in directory.iterdir())
    return {
        "version": version,
        "directory": str(directory),
        "fingerprint": mirror.fingerprint.hex(),
        "n_bytes": n_bytes,
        "way": str(path),
    }
