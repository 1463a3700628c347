"""Anchors: a whole weight version as a Hugging Face checkpoint directory, anywhere fsspec reaches.

An anchor holds the base model's configuration and tokenizer and the version's weights in bf16, so that any engine can
load it as it stands. Its marker, `anchor.json`, is written last and lists every other file with size and digest: a
directory without a marker is an anchor that was never finished, and a file that does not fit it is refused.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tidemill.schemas.records import Anchor
from tidemill.trainer.serving_view import SERVING_DTYPE, ServingView

MARKER = "anchor.json"
MARKER_FORMAT = 1
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""What is taken over from the base model beside its configuration, as glob patterns."""

READ_BYTES = 1 << 22


class AnchorError(ValueError):
    """An anchor is missing, unfinished or damaged, or cannot be made."""


@dataclass(frozen=True, slots=True)
class AnchorFile:
    """One file of an anchor, as its marker lists it."""

    name: str
    n_bytes: int
    digest: str
    """xxh3-128, hexadecimal."""


def anchor_uri(root: str, run_id: str, branch: str, version: int) -> str:
    """Where the anchor of a version lies below the store's root."""
    return f"{root.rstrip('/')}/{run_id}/anchors/{branch}/v{version}"


def write_anchor(uri: str, base_model: Path, view: ServingView) -> Anchor:
    """Write a version as a checkpoint directory at `uri`; an unfinished or older one there is replaced.

    Args:
        base_model: directory whose configuration and tokenizer the anchor takes over.

    Raises AnchorError when `base_model` has no readable configuration.
    """
    files = begin_anchor(uri, base_model)
    with tempfile.TemporaryDirectory(prefix="tidemill-anchor-") as scratch:
        tensors = {name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for name, bits in view.items()}
        save_file(tensors, Path(scratch) / WEIGHTS, metadata={"format": "pt"})
        files += _put_files(uri, Path(scratch))
    return finish_anchor(uri, files)


def begin_anchor(uri: str, base_model: Path) -> list[AnchorFile]:
    """Empty the directory `uri` and write what an anchor takes over from `base_model`; weights and marker are to come.

    Raises AnchorError like `write_anchor`, before anything is removed.
    """
    with tempfile.TemporaryDirectory(prefix="tidemill-anchor-") as scratch:
        _stage(Path(scratch), base_model)
        filesystem, path = fsspec.core.url_to_fs(uri)
        if filesystem.exists(f"{path}/{MARKER}"):
            filesystem.rm_file(f"{path}/{MARKER}")
        # Weights of an unfinished anchor may be split over other files than the ones that come now.
        if filesystem.exists(path):
            filesystem.rm(path, recursive=True)
        filesystem.makedirs(path, exist_ok=True)
        return _put_files(uri, Path(scratch))


def finish_anchor(uri: str, files: Sequence[AnchorFile]) -> Anchor:
    """Write the marker that makes an anchor of the files at `uri`."""
    filesystem, path = fsspec.core.url_to_fs(uri)
    filesystem.pipe_file(f"{path}/{MARKER}", _marker(files))
    return Anchor(uri=filesystem.unstrip_protocol(path), n_bytes=sum(file.n_bytes for file in files))


def read_anchor(uri: str) -> dict[str, npt.NDArray[np.uint16]]:
    """The weights of an anchor, by name, as u2 bit patterns in their shapes.

    Raises AnchorError when the anchor is missing, unfinished or damaged.
    """
    with tempfile.TemporaryDirectory(prefix="tidemill-anchor-") as scratch:
        fetch_anchor(uri, Path(scratch))
        return _read_weights(Path(scratch))


def fetch_anchor(uri: str, directory: Path) -> None:
    """Copy an anchor's files into a local directory and check each of them. Raises AnchorError."""
    filesystem, path = fsspec.core.url_to_fs(uri)
    for file in _read_marker(filesystem, path):
        try:
            filesystem.get_file(f"{path}/{file.name}", str(directory / file.name))
        except FileNotFoundError as error:
            raise AnchorError(f"anchor {uri} has lost its file {file.name}") from error
        if _listed(directory / file.name) != file:
            raise AnchorError(f"{file.name} of anchor {uri} is not what was written: its bytes were changed")


def _put_files(uri: str, directory: Path) -> list[AnchorFile]:
    filesystem, path = fsspec.core.url_to_fs(uri)
    files = [_listed(file) for file in sorted(directory.iterdir())]
    for file in files:
        filesystem.put_file(str(directory / file.name), f"{path}/{file.name}")
    return files


def _stage(staged: Path, base_model: Path) -> None:
    (staged / CONFIG).write_text(_config(base_model))
    for pattern in COPIED:
        for source in base_model.glob(pattern):
            shutil.copyfile(source, staged / source.name)


def _config(base_model: Path) -> str:
    """The base model's configuration, telling of the weights that lie beside it."""
    try:
        config = json.loads((base_model / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise AnchorError(f"{base_model} is no Hugging Face model directory: {error}") from error
    config.pop("torch_dtype", None)
    return json.dumps({**config, "dtype": SERVING_DTYPE}, indent=2, sort_keys=True)


def _listed(file: Path) -> AnchorFile:
    state, n_bytes = xxhash.xxh3_128(), 0
    with file.open("rb") as opened:
        while piece := opened.read(READ_BYTES):
            state.update(piece)
            n_bytes += len(piece)
    return AnchorFile(file.name, n_bytes, state.hexdigest())


def _marker(files: Sequence[AnchorFile]) -> bytes:
    listed = {file.name: {"n_bytes": file.n_bytes, "digest": file.digest} for file in files}
    return json.dumps({"format": MARKER_FORMAT, "files": listed}, indent=2).encode()


def _read_marker(filesystem: Any, path: str) -> list[AnchorFile]:  # noqa: ANN401 - fsspec ships no types
    try:
        marker = json.loads(filesystem.cat_file(f"{path}/{MARKER}"))
        files = [AnchorFile(name, int(of["n_bytes"]), str(of["digest"])) for name, of in marker["files"].items()]
    except FileNotFoundError as error:
        raise AnchorError(f"no finished anchor at {path}: it has no {MARKER}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AnchorError(f"the marker of the anchor at {path} cannot be read: {error!r}") from error
    if marker.get("format") != MARKER_FORMAT or any(file.name != Path(file.name).name for file in files):
        raise AnchorError(f"the marker of the anchor at {path} is not of format {MARKER_FORMAT}")
    return files


def _read_weights(directory: Path) -> dict[str, npt.NDArray[np.uint16]]:
    view = {}
    try:
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is not a mapping
                    view[name] = _bits(name, opened.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise AnchorError(f"the anchor's weights cannot be read: {error}") from error
    return view


def _bits(name: str, tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    if tensor.dtype != torch.bfloat16:
        raise AnchorError(f"{name} of the anchor is {tensor.dtype}; an anchor holds {SERVING_DTYPE}")
    bits: npt.NDArray[np.uint16] = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return bits
