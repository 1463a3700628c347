"""Anchors: whole versions as Hugging Face checkpoint directories, read bit for bit.

Keeps true: a tensor is read as the bit patterns of its own dtype and nothing is converted on the way (uN, flat, in
checkpoint order); an anchor of a remote store is used only after its whole directory was copied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tidemill.kernels.elements import BY_NAME
from tidemill.kernels.weights.bits import TensorSpec

Patterns = npt.NDArray[np.unsignedinteger[Any]]
"""uN[n], flat: u1, u2 or u4 by the tensor's dtype."""

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Torch's integers by width, which numpy knows too."""


class AnchorError(RuntimeError):
    """An anchor is gone, or does not hold what its manifest says: trying again cannot help."""


class AnchorUnavailableError(ConnectionError):
    """The store does not answer; it may later."""


def fetch_anchor(uri: str, staging: Path) -> Path:
    """A local directory with the anchor's files: the anchor itself where it is local, else a copy under `staging`.

    Raises:
        AnchorError: the directory does not exist, or no file system serves its URI.
        AnchorUnavailableError: the store failed.
    """
    try:
        filesystem, path = fsspec.core.url_to_fs(uri)
        if not filesystem.isdir(path):
            raise AnchorError(f"anchor {uri} does not exist: is the store's root the one that the trainer writes to?")
        return Path(path) if _is_local(filesystem) else _download(filesystem, path, staging)
    except (FileNotFoundError, ImportError, ValueError) as error:
        raise AnchorError(f"anchor {uri} cannot be read: {error}") from error
    except OSError as error:
        raise AnchorUnavailableError(f"anchor {uri}: the store failed: {error}") from error


def discard_copy(uri: str, directory: Path) -> None:
    """Remove what `fetch_anchor` copied; an anchor that is local itself stays."""
    filesystem, _ = fsspec.core.url_to_fs(uri)
    if not _is_local(filesystem):
        shutil.rmtree(directory, ignore_errors=True)


def _is_local(filesystem: Any) -> bool:  # noqa: ANN401 - fsspec ships no types
    return "file" in _protocols(filesystem.protocol)


def _protocols(protocol: str | tuple[str, ...]) -> tuple[str, ...]:
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _download(filesystem: Any, path: str, staging: Path) -> Path:  # noqa: ANN401 - fsspec ships no types
    target = staging / path.strip("/").replace("/", "_")
    shutil.rmtree(target, ignore_errors=True)
    staging.mkdir(parents=True, exist_ok=True)
    filesystem.get(path.rstrip("/") + "/", str(target) + "/", recursive=True)
    return target


class AnchorReader:
    """The tensors of a checkpoint directory, by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = _file_of_tensor(directory)

    @property
    def names(self) -> list[str]:
        """Every tensor of the checkpoint."""
        return list(self._files)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as it is stored. Raises AnchorError when it is missing or unreadable."""
        if name not in self._files:
            raise AnchorError(f"anchor {self._directory} holds no tensor {name}")
        try:
            with safe_open(self._files[name], framework="pt") as opened:
                loaded: torch.Tensor = opened.get_tensor(name)
                return loaded
        except (OSError, ValueError, RuntimeError) as error:  # safetensors raises its own subclass of Exception
            raise AnchorError(f"{name} of anchor {self._directory} cannot be read: {error}") from error

    def bits(self, name: str) -> Patterns:
        """One tensor's bit patterns, uN[n], flat, in memory of its own. Raises AnchorError for an unknown dtype."""
        loaded = self.tensor(name)
        dtype = str(loaded.dtype).removeprefix("torch.")
        if dtype not in BY_NAME:
            raise AnchorError(f"{name} of anchor {self._directory} is {dtype}: known are {', '.join(BY_NAME)}")
        patterns = BY_NAME[dtype].bits
        # A tensor of no dimension cannot be viewed in another width.
        flat: Patterns = loaded.contiguous().reshape(-1).view(_SIGNED[patterns.itemsize]).numpy().view(patterns).copy()
        return flat

    def specs(self) -> list[TensorSpec]:
        """Name, shape and dtype of every tensor."""
        found = []
        for name in self.names:
            loaded = self.tensor(name)
            found.append(TensorSpec(name, tuple(loaded.shape), str(loaded.dtype).removeprefix("torch.")))
        return found


def save_checkpoint(directory: Path, tensors: Iterable[tuple[TensorSpec, Patterns]]) -> None:
    """Write tensors (flat bit patterns) as the weights of a checkpoint directory, which is made where it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    written = {spec.name: _tensor(spec, bits) for spec, bits in tensors}
    save_file(written, directory / WEIGHTS, metadata={"format": "pt"})


def _tensor(spec: TensorSpec, bits: Patterns) -> torch.Tensor:
    # Packed int4 is stored as the bytes that it is.
    dtype = torch.uint8 if spec.dtype == "int4" else getattr(torch, spec.dtype)
    signed = bits.view(f"<i{bits.itemsize}") if bits.itemsize > 1 else bits
    return torch.from_numpy(signed).view(dtype).reshape(spec.shape)


def _file_of_tensor(directory: Path) -> dict[str, Path]:
    index = directory / _INDEX
    try:
        if index.exists():
            return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        single = directory / WEIGHTS
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    except Exception as error:
        # A damaged directory fails in I/O, JSON or safetensors' own exception: all mean the same here.
        raise AnchorError(f"anchor {directory} has no readable safetensors: {error}") from error
