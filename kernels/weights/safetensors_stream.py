"""Weights as safetensors files, written piece by piece: no copy of a file is ever held.

The layout is safetensors' own: the header's length in 8 bytes, the header as JSON padded to a multiple of 8 bytes,
then the tensors. Wide elements come first, so that every tensor is aligned to its elements.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tidemill.kernels.weights.bits import Weight

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
"""Names of the element types in a safetensors header; packed int4 lies there as the bytes it is packed into."""


def split_files(weights: Mapping[str, Weight], file_bytes: int) -> dict[str, list[str]]:
    """Which tensors lie in which file, in order: `WEIGHTS` where all fit into `file_bytes`, else several.

    A file has at least one tensor, so one that is larger than `file_bytes` lies in a larger file.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name, weight in weights.items():
        if groups[-1] and size + weight.bits.nbytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += weight.bits.nbytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def index_of(weights: Mapping[str, Weight], files: Mapping[str, Sequence[str]]) -> bytes:
    """The index beside several files, as Hugging Face's loaders read it."""
    size = sum(weight.bits.nbytes for weight in weights.values())
    places = {name: file for file, names in files.items() for name in names}
    return json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2, sort_keys=True).encode()


def file_pieces(weights: Mapping[str, Weight]) -> Iterator[bytes | memoryview]:
    """The bytes of one safetensors file with these weights, in pieces of at most `PIECE_BYTES`."""
    ordered = dict(sorted(weights.items(), key=lambda item: (-item[1].bits.itemsize, item[0])))
    yield file_header(ordered)
    for weight in ordered.values():
        data = np.ascontiguousarray(weight.bits).reshape(-1).view(np.uint8).data
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]


def file_header(weights: Mapping[str, Weight]) -> bytes:
    """What a file begins with whose tensors are `weights`, in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
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
