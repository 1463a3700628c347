"""Anchors: a whole weight version as a Hugging Face checkpoint directory, anywhere fsspec reaches.

An anchor holds the base model's configuration and tokenizer and the version's weights in their own element types, so
that any engine can load it as it stands. Its marker, `anchor.json`, is written last and lists every other file with
size and digest: a directory without a marker is an anchor that was never finished, and a file that does not fit it is
refused by everyone who reads it. Weights are streamed into the store, so that writing an anchor takes no memory beside
the weights. A local anchor is read where it lies, one of a remote store only after it was copied.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import xxhash

from tidemill.kernels.weights.bits import Weight
from tidemill.kernels.weights.checkpoint import WeightFilesError, map_checkpoint
from tidemill.schemas.records import Anchor
from tidemill.schemas.stored_object import StoreUnavailableError, put_object

MARKER = "anchor.json"
MARKER_FORMAT = 1
CONFIG = "config.json"
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

COMPUTE_TYPES = ("bfloat16", "float16", "float32")
"""Element types that a model's configuration can name as its own."""

READ_BYTES = 1 << 22


class AnchorError(WeightFilesError):
    """An anchor is missing, unfinished or damaged, or cannot be made: trying again cannot help."""


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


def begin_anchor(uri: str, base_model: Path, dtype: str | None = "bfloat16") -> list[AnchorFile]:
    """Empty the directory `uri` and write what an anchor takes over from `base_model`; weights and marker are to come.

    Args:
        dtype: element type that the configuration names; None leaves the base model's.

    Raises AnchorError when `base_model` has no readable configuration, before anything is removed.
    """
    with tempfile.TemporaryDirectory(prefix="tidemill-anchor-") as scratch:
        _stage(Path(scratch), base_model, dtype)
        filesystem, path = fsspec.core.url_to_fs(uri)
        if filesystem.exists(f"{path}/{MARKER}"):
            filesystem.rm_file(f"{path}/{MARKER}")
        # Weights of an unfinished anchor may be split over other files than the ones that come now.
        if filesystem.exists(path):
            filesystem.rm(path, recursive=True)
        return [put_file(uri, file.name, [file.read_bytes()]) for file in sorted(Path(scratch).iterdir())]


def put_file(uri: str, name: str, pieces: Iterator[bytes | memoryview] | Sequence[bytes]) -> AnchorFile:
    """Write one file of the anchor at `uri`. Raises StoreUnavailableError when the store fails."""
    stored = put_object(f"{uri}/{name}", pieces)
    return AnchorFile(name, stored.n_bytes, stored.digest)


def finish_anchor(uri: str, files: Sequence[AnchorFile]) -> Anchor:
    """Write the marker that makes an anchor of the files at `uri`."""
    filesystem, path = fsspec.core.url_to_fs(uri)
    filesystem.pipe_file(f"{path}/{MARKER}", _marker(files))
    return Anchor(uri=filesystem.unstrip_protocol(path), n_bytes=sum(file.n_bytes for file in files))


def anchor_weights(uri: str) -> Iterator[tuple[str, Weight]]:
    """The weights of an anchor, read-only, one after the other; at most one file of a remote one is held, on disk.

    Raises AnchorError when the anchor is missing, unfinished or damaged, StoreUnavailableError when the store fails.
    """
    for file in _read_marker(uri):
        if file.name.endswith(".safetensors"):
            with tempfile.TemporaryDirectory(prefix="tidemill-anchor-") as scratch:
                yield from map_checkpoint(_checked(uri, file, Path(scratch))).items()


def fetch_anchor(uri: str, staging: Path) -> Path:
    """A local directory with an anchor's files, each checked: the anchor itself where it is local, else a copy.

    Args:
        staging: where a copy is made, in a directory of its own.

    Raises like `anchor_weights`.
    """
    files = _read_marker(uri)
    with _anchor_errors(uri):
        filesystem, path = fsspec.core.url_to_fs(uri)
    local = _is_local(filesystem)
    directory = Path(path) if local else staging / path.strip("/").replace("/", "_")
    if not local:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    for file in files:
        _checked(uri, file, directory)
    return directory


def discard_copy(uri: str, directory: Path) -> None:
    """Remove what `fetch_anchor` copied; an anchor that is local itself stays."""
    filesystem, _ = fsspec.core.url_to_fs(uri)
    if not _is_local(filesystem):
        shutil.rmtree(directory, ignore_errors=True)


def compute_type(weights: Mapping[str, Weight]) -> str | None:
    """The type that most elements of the model have, of those that a configuration can name; None without one."""
    sizes: Counter[str] = Counter()
    for weight in weights.values():
        if weight.dtype in COMPUTE_TYPES:
            sizes[weight.dtype] += weight.bits.size
    quantised = any(weight.dtype not in COMPUTE_TYPES for weight in weights.values())
    return sizes.most_common(1)[0][0] if sizes and not quantised else None


def _checked(uri: str, file: AnchorFile, directory: Path) -> Path:
    """One file of an anchor on a local disk, where it lies or as a copy in `directory`, once it fits the marker."""
    with _anchor_errors(uri):
        filesystem, path = fsspec.core.url_to_fs(uri)
        local = Path(path) / file.name if _is_local(filesystem) else directory / file.name
        try:
            if not _is_local(filesystem):
                filesystem.get_file(f"{path}/{file.name}", str(local))
            found = _listed(local)
        except FileNotFoundError as error:
            raise AnchorError(f"anchor {uri} has lost its file {file.name}") from error
    if found != file:
        raise AnchorError(f"{file.name} of anchor {uri} was changed after it was written")
    return local


@contextmanager
def _anchor_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except AnchorError:
        raise
    except (ImportError, ValueError) as error:
        raise AnchorError(f"anchor {uri} cannot be read: {error}") from error
    except OSError as error:
        raise StoreUnavailableError(f"anchor {uri}: the store failed: {error}") from error


def _is_local(filesystem: Any) -> bool:  # noqa: ANN401 - fsspec ships no types
    protocol = filesystem.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def _stage(staged: Path, base_model: Path, dtype: str | None) -> None:
    (staged / CONFIG).write_text(_config(base_model, dtype))
    for pattern in COPIED:
        for source in base_model.glob(pattern):
            shutil.copyfile(source, staged / source.name)


def _config(base_model: Path, dtype: str | None) -> str:
    """The base model's configuration, telling of the weights that lie beside it."""
    try:
        config = json.loads((base_model / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise AnchorError(f"{base_model} is no Hugging Face model directory: {error}") from error
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    return json.dumps(config, indent=2, sort_keys=True)


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


def _read_marker(uri: str) -> list[AnchorFile]:
    with _anchor_errors(uri):
        filesystem, path = fsspec.core.url_to_fs(uri)
        try:
            written = filesystem.cat_file(f"{path}/{MARKER}")
        except FileNotFoundError as error:
            if not filesystem.isdir(path):
                raise AnchorError(
                    f"no finished anchor at {uri}: it does not exist; is the store's root the one that the trainer "
                    "writes to?"
                ) from error
            raise AnchorError(f"no finished anchor at {uri}: it has no {MARKER}, which is written last") from error
    try:
        marker = json.loads(written)
        files = [AnchorFile(name, int(of["n_bytes"]), str(of["digest"])) for name, of in marker["files"].items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AnchorError(f"the marker of anchor {uri} cannot be read: {error!r}") from error
    if marker.get("format") != MARKER_FORMAT or any(file.name != Path(file.name).name for file in files):
        raise AnchorError(f"the marker of anchor {uri} is not of format {MARKER_FORMAT}")
    return files
