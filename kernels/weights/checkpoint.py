"""Checkpoints on disk as bit patterns, mapped and not read: a file of weights is touched only where it is used.

A checkpoint is one safetensors file or the directory of a Hugging Face checkpoint, with its weights in one file or in
several beside an index. A file's header is checked by safetensors itself before a byte is mapped.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from tidemill.kernels.delta import TensorChange
from tidemill.kernels.elements import BY_NAME
from tidemill.kernels.fingerprint import Bits

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ELEMENT_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
}
"""Element types by their names in a safetensors header."""
LENGTH_SIZE = 8


class CheckpointError(ValueError):
    """A checkpoint is missing or damaged, or two of them do not hold the same tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class MappedTensor:
    """One tensor of a checkpoint."""

    dtype: str
    """Name of the element type (`kernels.elements`)."""
    bits: Bits
    """Patterns, of the tensor's shape, read-only, mapped from the file."""


def map_checkpoint(path: Path) -> dict[str, MappedTensor]:
    """The tensors of a safetensors file or a checkpoint directory, by name.

    Raises CheckpointError when there is none, it is damaged, or a tensor's type is none that a delta can carry.
    """
    files = _files(path) if path.is_dir() else [path]
    return {name: tensor for file in files for name, tensor in _map_file(file)}


def checkpoint_changes(base: Path, target: Path) -> Iterator[TensorChange]:
    """Every tensor of two checkpoints, before and after, in the order of the names.

    Raises CheckpointError like `map_checkpoint` and `tensor_changes`.
    """
    return tensor_changes(map_checkpoint(base), map_checkpoint(target))


def tensor_changes(old: Mapping[str, MappedTensor], new: Mapping[str, MappedTensor]) -> Iterator[TensorChange]:
    """Every tensor before and after, in the order of the names.

    Raises CheckpointError, before the first, when names, types or shapes differ.
    """
    if old.keys() != new.keys():
        odd = sorted(old.keys() ^ new.keys())
        side = "first" if odd[0] in old else "second"
        raise CheckpointError(
            f"{len(odd)} tensors are in one checkpoint only, such as {odd[0]!r} in the {side}; use an anchor"
        )
    for name in sorted(old):
        before, after = old[name], new[name]
        if (before.dtype, before.bits.shape) != (after.dtype, after.bits.shape):
            raise CheckpointError(
                f"{name}: {before.dtype} {before.bits.shape} became {after.dtype} {after.bits.shape}; use an anchor"
            )
    return (TensorChange(name, old[name].dtype, old[name].bits, new[name].bits) for name in sorted(old))


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.is_file():
        return [directory / WEIGHTS]
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not the index of a checkpoint: {error}") from error
    if outside := [name for name in names if Path(str(name)).name != name]:
        raise CheckpointError(f"{index} names files outside its directory, such as {outside[0]!r}")
    return [directory / name for name in sorted(names)]


def _map_file(path: Path) -> Iterator[tuple[str, MappedTensor]]:
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_SIZE), "little")
        header: dict[str, Any] = json.loads(file.read(length))
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[LENGTH_SIZE + length :]
    header.pop("__metadata__", None)
    for name, described in header.items():
        yield name, _tensor(f"{path}: {name}", described, data)


def _tensor(where: str, described: dict[str, Any], data: memoryview) -> MappedTensor:
    dtype = ELEMENT_NAMES.get(described["dtype"])
    if dtype is None:
        raise CheckpointError(f"{where} holds {described['dtype']}, which a delta cannot carry")
    begin, end = described["data_offsets"]
    bits = np.frombuffer(data[begin:end], BY_NAME[dtype].bits)
    return MappedTensor(dtype, bits.reshape(described["shape"]))
