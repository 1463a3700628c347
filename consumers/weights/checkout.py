"""Writes a version as a Hugging Face checkpoint directory.

Keeps true: the directory appears whole or not at all, and only after the tensors in its files were read back and have
the fingerprints of the version's manifest.
"""

from __future__ import annotations

import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from tidemill.consumers.weights.builder import Builder, fingerprint_objection
from tidemill.consumers.weights.chain import Chain
from tidemill.kernels.weights.anchor import MARKER
from tidemill.kernels.weights.checkpoint import WeightFilesError, map_checkpoint
from tidemill.kernels.weights.mirror import Mirror
from tidemill.schemas.records import Manifest

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", MARKER)
"""What of an anchor is not taken over: its weights and the marker that lists them."""


class CheckoutError(ValueError):
    """A version cannot be written where it was asked for."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A version as files."""

    version: int
    directory: str
    fingerprint: str
    n_bytes: int
    """Size of all files."""
    way: str
    """How the version was built: the path to it."""


def checkout(chain: Chain, builder: Builder, version: int, directory: Path) -> Checkout:
    """Write `version` to `directory`, which must not exist or be empty.

    Raises UnknownVersion, Unreachable, CheckoutError.
    """
    _require_free(directory)
    chain.manifest(version)
    built = builder.build(chain, version)
    staged = directory.absolute().parent / f".{directory.name}.{uuid.uuid4().hex[:12]}"
    try:
        _write(built.mirror, built.anchor_directory, staged)
        _prove(staged, built.mirror, builder.with_tensors(chain.manifest(version)))
        _reveal(staged, directory)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    n_bytes = sum(file.stat().st_size for file in directory.iterdir())
    return Checkout(version, str(directory), built.mirror.fingerprint.hex(), n_bytes, str(built.path))


def _require_free(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckoutError(f"{directory} exists and is not an empty directory: name another")


def _write(mirror: Mirror, anchor: Path, staged: Path) -> None:
    shutil.copytree(anchor, staged, ignore=shutil.ignore_patterns(*WEIGHT_FILES))
    mirror.save(staged)


def _prove(staged: Path, mirror: Mirror, manifest: Manifest) -> None:
    try:
        objection = fingerprint_objection(map_checkpoint(staged), manifest)
    except WeightFilesError as error:
        raise CheckoutError(f"what was written cannot be read back: {error}") from error
    if objection:
        raise CheckoutError(f"what was written is not version {mirror.version}: {objection}")


def _reveal(staged: Path, directory: Path) -> None:
    """A rename replaces an empty directory, and fails on one that somebody filled meanwhile."""
    try:
        os.replace(staged, directory)
    except OSError as error:
        raise CheckoutError(f"{directory} cannot be made: {error}") from error
