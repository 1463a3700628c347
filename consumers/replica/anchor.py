"""Anchors: whole versions as Hugging Face checkpoint directories, read bit for bit.

Keeps true: tensors are bf16 and nothing is converted on the way (bits are u2, flat, in checkpoint order); an anchor of
a remote store is used only after its whole directory was copied.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import torch
from safetensors import safe_open

from tidemill.consumers.replica.weight_map import Bits, TensorSpec

_INDEX = "model.safetensors.index.json"


class AnchorError(RuntimeError):
    """An anchor cannot be read, or does not hold what its manifest says."""


def fetch_anchor(uri: str, staging: Path) -> Path:
    """A local directory with the anchor's files: the anchor itself where it is local, else a copy under `staging`.

    Raises:
        AnchorError: the directory does not exist or cannot be read.
    """
    try:
        filesystem, path = fsspec.core.url_to_fs(uri)
        if not filesystem.isdir(path):
            raise AnchorError(f"anchor {uri} does not exist: is the store's root the one that the trainer writes to?")
        return Path(path) if _is_local(filesystem) else _download(filesystem, path, staging)
    except (OSError, ImportError, ValueError) as error:
        raise AnchorError(f"anchor {uri} cannot be read: {error}") from error


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

    def bits(self, name: str) -> Bits:
        """One tensor's bf16 bits, u2[n], flat, in memory of its own."""
        loaded = self.tensor(name)
        if loaded.dtype != torch.bfloat16:
            raise AnchorError(f"{name} of anchor {self._directory} is {loaded.dtype}: serving weights are bfloat16")
        flat: Bits = loaded.contiguous().view(torch.int16).reshape(-1).numpy().view("<u2").copy()
        return flat

    def specs(self) -> list[TensorSpec]:
        """Name, shape and dtype of every tensor."""
        found = []
        for name in self.names:
            loaded = self.tensor(name)
            found.append(TensorSpec(name, tuple(loaded.shape), str(loaded.dtype).removeprefix("torch.")))
        return found


def _file_of_tensor(directory: Path) -> dict[str, Path]:
    index = directory / _INDEX
    try:
        if index.exists():
            return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        single = directory / "model.safetensors"
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    except Exception as error:
        # A damaged directory fails in I/O, JSON or safetensors' own exception: all mean the same here.
        raise AnchorError(f"anchor {directory} has no readable safetensors: {error}") from error
