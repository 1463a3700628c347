"""Versions built from the log and the object store, without an engine: as files, and to verify a chain.

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
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec

from tidemill.consumers.replica.config import FETCH_BYTES
from tidemill.consumers.weights.chain import Chain, default_start
from tidemill.kernels.weights.checkpoint import WeightFilesError, map_checkpoint
from tidemill.kernels.weights.delta_fetch import Pieces, open_fetcher
from tidemill.kernels.weights.graph import Delta, PathStep, Unreachable, UpdatePath, VersionError, VersionGraph
from tidemill.kernels.weights.mirror import Draft, Mirror
from tidemill.kernels.weights.rebuild import Rebuilder, RefusedStepError
from tidemill.kernels.weights.tensor_table import with_tensors
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import Manifest
from tidemill.schemas.stored_object import StoreUnavailableError

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
        self._progress = progress
        self._rebuilder = Rebuilder(pieces, os.cpu_count() or 1, directory)

    def close(self) -> None:
        self._rebuilder.close()

    def change(
        self,
        mirror: Mirror,
        path: UpdatePath,
        *,
        keep: bool = True,
        progress: Callable[[PathStep], None] = lambda _: None,
    ) -> Path | None:
        """Change a mirror to the last version of a path, with a check of every tensor of every version on it.

        Args:
            keep: otherwise the mirror is changed back after the check.
            progress: called before each step.

        Returns the local directory of the path's anchor, if the mirror was empty. Raises UnusableWeights; the mirror is
        then unchanged.
        """
        draft = Draft(mirror)
        try:
            anchor, _ = self._rebuilder.follow(path, draft, recount=True, progress=progress)
        except RefusedStepError as error:
            raise UnusableWeights(str(error)) from error
        except (StoreUnavailableError, TimeoutError) as error:
            raise UnusableWeights(f"it cannot be read now: {error}") from error
        (draft.keep if keep else draft.revert)()
        return anchor

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
            mirror, steps = Mirror(), list[PathStep]()

            def begin(step: PathStep, steps: list[PathStep] = steps) -> None:
                steps.append(step)
                self._progress(f"{'version' if isinstance(step, Delta) else 'anchor'} {step.version}")

            try:
                anchor = self.change(mirror, path, progress=begin)
                assert anchor is not None
                return mirror, path, anchor
            except UnusableWeights as error:
                step = steps[-1]
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


def checkout(chain: Chain, builder: Builder, version: int, directory: Path) -> dict[str, Any]:
    """Write `version` to `directory`, which must not exist or be empty.

    Returns its `version`, `directory` and `fingerprint`, the size of all files (`n_bytes`), and the path over which it
    was built (`way`). Raises VersionError, ValueError.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not an empty directory: name another")
    manifest = chain.manifest(version)
    mirror, path, anchor = builder.build(chain, version)
    staged = directory.absolute().parent / f".{directory.name}.{uuid.uuid4().hex[:12]}"
    try:
        mirror.save_whole(staged, anchor)
        try:
            Draft(mirror).load(map_checkpoint(staged).items(), str(staged), with_tensors(manifest))
        except WeightFilesError as error:
            raise ValueError(f"what was written is not version {version}: {error}") from error
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


@dataclass(frozen=True, slots=True)
class FirstFault:
    version: int
    part: str
    """"manifest", "delta", "anchor", or "skip-delta from V"."""
    reason: str

    def __str__(self) -> str:
        return f"the {self.part} of version {self.version}: {self.reason}"


@dataclass(slots=True)
class Verification:
    """The result of a verification, up to the first fault."""

    start: int
    end: int
    """The last version that was verified."""
    versions: int = 0
    anchors: int = 0
    skip_deltas: int = 0
    n_bytes: int = 0
    """Bytes of the deltas and skip-deltas that were verified."""
    expired_before: list[int] = field(default_factory=list)
    """Versions older than the start whose chunks the log has deleted."""
    expired_skips: int = 0
    """Skip-deltas that were not verified because the log has deleted their chunks."""
    offender: FirstFault | None = None


def verify_chain(
    chain: Chain, builder: Builder, start: int, progress: Callable[[int, str], None] = lambda _done, _next: None
) -> Verification:
    """Verify every version from `start`, which must have an anchor, up to the first fault: fetch, decode, check and
    apply its delta, and compare every tensor.

    Each version is made from its parent in memory. Also verified: the anchors in between, skip-deltas (from the version
    that they start from), and versions published twice.

    Args:
        progress: called before each piece of work, with the number of verified versions and the next piece.

    Raises VersionError if `start` is unknown or has no anchor.
    """
    if chain.manifest(start).anchor is None:
        anchors = [version for version, manifest in sorted(chain.manifests.items()) if manifest.anchor]
        raise VersionError(
            f"version {start} has no anchor to verify from; these have one: {', '.join(map(str, anchors))}"
        )
    before = [v for v, m in sorted(chain.manifests.items()) if v < start and chain.expired(m.shards)]
    report = Verification(start, start, expired_before=before)
    mirror, at = Mirror(), (start, "anchor")
    try:
        for version in sorted(version for version in chain.manifests if version >= start):
            manifest, delta = chain.manifests[version], None if version == start else chain.delta(version)
            progress(report.versions, f"version {version}")
            at = version, "manifest"
            if version in chain.forks:
                raise UnusableWeights(chain.forks[version])
            if delta is not None:
                at = version, "delta"
                if expired := chain.expired(delta.shards):
                    raise UnusableWeights(f"{expired}; verify from {default_start(chain)} instead")
                if mirror.version != delta.base:
                    mirror, _, _ = builder.build(chain, delta.base)
                builder.change(mirror, UpdatePath(None, (delta,)))
                report.n_bytes += delta.n_bytes
            elif manifest.anchor is None:
                raise UnusableWeights("it has neither a parent nor an anchor")
            else:
                # The start, or another version without a parent.
                mirror = Mirror()
            if manifest.anchor is not None:
                at = version, "anchor"
                progress(report.versions, f"anchor {version}")
                builder.change(mirror, UpdatePath(manifest, ()))
                report.anchors += 1
            for skip in (delta for delta in chain.skip_deltas() if delta.base == version):
                if chain.expired(skip.shards):
                    report.expired_skips += 1
                    continue
                at = skip.version, f"skip-delta from {version}"
                progress(report.versions, f"skip-delta {version} to {skip.version}")
                builder.change(mirror, UpdatePath(None, (skip,)), keep=False)
                report.skip_deltas += 1
                report.n_bytes += skip.n_bytes
            report.versions, report.end = report.versions + 1, version
    except (UnusableWeights, VersionError) as error:
        report.offender = FirstFault(*at, str(error))
    return report
