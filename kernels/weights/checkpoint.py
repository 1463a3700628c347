"""Checkpoints as bit patterns: mapped for reading, written piece by piece, so that no copy of a file is in memory.

A checkpoint is one safetensors file or the directory of a Hugging Face checkpoint, with its weights in one file, or in
several files and an index. The safetensors library checks a file's header before a byte is mapped. Files are written
with wide elements first, so that every tensor is aligned to its elements.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from tidemill.kernels.compiled import Bits
from tidemill.kernels.elements import BY_NAME, TensorChange
from tidemill.kernels.weights.bits import TensorSpec, Weight

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PIECE_BYTES = 4 << 20
ELEMENT_NAMES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "int4": "U8",
}
"""Names of the element types in a safetensors header; packed int4 is stored as the bytes that it is packed into."""
_TYPES = {stored: dtype for dtype, stored in ELEMENT_NAMES.items() if dtype != "int4"}
COMPUTE_TYPES = ("bfloat16", "float16", "float32")
"""Element types that a model's configuration can name as its own."""
LENGTH_SIZE = 8


class WeightFilesError(ValueError):
    """Error for files of weights, such as an anchor's, that are missing, unfinished or damaged, cannot be made, or have
    other tensors than expected: a retry cannot help."""


def map_checkpoint(path: Path) -> dict[str, Weight]:
    """Return the tensors of a safetensors file or a checkpoint directory, by name: read-only, mapped from the files.

    Raises WeightFilesError if it is missing or damaged, or if a delta cannot carry a tensor's type.
    """
    files, index = [path / WEIGHTS if path.is_dir() else path], path / INDEX
    if path.is_dir() and index.is_file():
        try:
            names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightFilesError(f"{index} is not the index of a checkpoint: {error}") from error
        if outside := [name for name in names if Path(str(name)).name != name]:
            raise WeightFilesError(f"{index} names files outside its directory, such as {outside[0]!r}")
        files = [path / name for name in sorted(names)]
    return {name: tensor for file in files for name, tensor in _map_file(file)}


def tensor_changes(old: Mapping[str, Weight], new: Mapping[str, Weight]) -> Iterator[TensorChange]:
    """Return every tensor before and after, in the order of the names.

    Raises WeightFilesError, before the first tensor, if names, types or shapes differ.
    """
    if old.keys() != new.keys():
        odd = sorted(old.keys() ^ new.keys())
        side = "first" if odd[0] in old else "second"
        raise WeightFilesError(
            f"{len(odd)} tensors are in one checkpoint only, such as {odd[0]!r} in the {side}; use an anchor"
        )
    for name in sorted(old):
        before, after = old[name], new[name]
        if (before.dtype, before.bits.shape) != (after.dtype, after.bits.shape):
            raise WeightFilesError(
                f"{name}: {before.dtype} {before.bits.shape} became {after.dtype} {after.bits.shape}; use an anchor"
            )
    return (TensorChange(name, old[name].dtype, old[name].bits, new[name].bits) for name in sorted(old))


def specs_of(tensors: Mapping[str, Weight]) -> list[TensorSpec]:
    """Return name, shape and type of every tensor."""
    return [TensorSpec(name, weight.bits.shape, weight.dtype) for name, weight in tensors.items()]


def bits_in_memory(tensors: Mapping[str, Weight], name: str) -> Bits:
    """Return one tensor's patterns, uN[n], flat, in its own memory. Raises WeightFilesError if it does not exist."""
    if name not in tensors:
        raise WeightFilesError(f"the checkpoint has no tensor {name}")
    return np.array(tensors[name].bits, copy=True).reshape(-1)


def save_checkpoint(directory: Path, weights: Mapping[str, Weight]) -> None:
    """Write tensors as the weights of a checkpoint directory, which is created if it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / WEIGHTS).open("wb") as file:
        file.writelines(file_pieces(weights))


def split_files(sizes: Mapping[str, int], file_bytes: int) -> list[list[str]]:
    """Group tensors into files of at most `file_bytes`, in order, from the bytes of each.

    A file has at least one tensor, so a tensor that is larger than `file_bytes` is stored in a larger file.
    """
    groups: list[list[str]] = []
    size = 0
    for name, n_bytes in sizes.items():
        if not groups or size + n_bytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += n_bytes
    return groups


def file_names(n: int) -> list[str]:
    """Return the names of the `n` files of a checkpoint, as Hugging Face's loaders expect them."""
    return [WEIGHTS] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]


def index_of(weights: Mapping[str, Weight], files: Mapping[str, Sequence[str]]) -> bytes:
    """Return the index of a checkpoint with several files, as Hugging Face's loaders read it."""
    size = sum(weight.bits.nbytes for weight in weights.values())
    places = {name: file for file, names in files.items() for name in names}
    return json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2, sort_keys=True).encode()


def file_pieces(
    weights: Mapping[str, Weight], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of one safetensors file with these weights, in pieces of at most `PIECE_BYTES`."""
    ordered = {name: weights[name] for name in file_order(weights)}
    yield file_header(ordered, metadata)
    for weight in ordered.values():
        yield from data_pieces(weight.bits)


def file_order(weights: Mapping[str, Weight]) -> list[str]:
    """Return the tensors of a file in order: wide elements first, so that every tensor is aligned to its elements."""
    return sorted(weights, key=lambda name: (-weights[name].bits.itemsize, name))


def data_pieces(bits: Bits) -> Iterator[memoryview]:
    """Yield the bytes of one tensor (uN, any shape), in pieces of at most `PIECE_BYTES`."""
    data = np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def file_header(weights: Mapping[str, Weight], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a file with the tensors `weights`, in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, weight in weights.items():
        start, end = end, end + weight.bits.nbytes
        entries[name] = {
            "dtype": ELEMENT_NAMES[weight.dtype],
            "shape": list(weight.bits.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _map_file(path: Path) -> Iterator[tuple[str, Weight]]:
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise WeightFilesError(f"{path} is not a safetensors file: {error}") from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_SIZE), "little")
        header: dict[str, Any] = json.loads(file.read(length))
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[LENGTH_SIZE + length :]
    header.pop("__metadata__", None)
    for name, described in header.items():
        dtype = _TYPES.get(described["dtype"])
        if dtype is None:
            raise WeightFilesError(f"{path}: {name} has dtype {described['dtype']}, which a delta does not support")
        begin, end = described["data_offsets"]
        yield name, Weight(dtype, np.frombuffer(data[begin:end], BY_NAME[dtype].bits).reshape(described["shape"]))
