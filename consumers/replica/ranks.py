"""Messages between the server and the ranks of its engines: shared changes, held elements, and sums for proofs.

Changes. The server decodes a delta once and writes it to one anonymous file in memory, which every rank maps and reads
while it decodes tokens. A rank checks the digest before it uses an element, so that a damaged file is refused. The file
has no name in a directory, so that it uses no space of a small /dev/shm and disappears with the server in all cases.
Layout: the header's length (u8, little-endian), the header (JSON: [name, changed elements, bytes of a pattern] of each
change), then the indices (i8) and the patterns of each change. Every part begins at a multiple of 8 bytes.

Held elements. Each rank reports its boxes of each tensor, and for a proof the fingerprint of each box, in the same
order. Invariants: some rank holds every element of every tensor, otherwise the engine is refused at its start; an
element that several ranks hold (norms, routers, shared heads of keys and values) is counted once, and its copies must
be equal.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tidemill.consumers.replica.ledger import Proof
from tidemill.consumers.replica.weight_map import UnsupportedModelError
from tidemill.kernels.fingerprint import ZERO, Fingerprint
from tidemill.kernels.weights.bits import TensorSpec
from tidemill.kernels.weights.mirror import ElementChange

_ALIGNED = 8


@contextmanager
def handed_over(changes: Sequence[ElementChange]) -> Iterator[tuple[str, str]]:
    """Share changes with all processes of this user; yield path and digest, which are valid within the context."""
    header = json.dumps([[change.name, change.indices.size, change.bits.itemsize] for change in changes]).encode()
    arrays = (array for change in changes for array in (change.indices.astype("<i8", copy=False), change.bits))
    digest = xxhash.xxh3_128()
    with os.fdopen(os.memfd_create("tidemill-changes"), "wb") as file:

        def write(part: bytes | memoryview) -> None:
            # The padding aligns every array for its elements.
            for piece in (part, bytes(-len(part) % _ALIGNED)):
                file.write(piece)
                digest.update(piece)

        write(len(header).to_bytes(_ALIGNED, "little"))
        write(header)
        for array in arrays:
            write(np.ascontiguousarray(array).view(np.uint8).data)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}", digest.hexdigest()


def taken_over(path: str, digest: str) -> list[ElementChange]:
    """Map the changes of `handed_over`. Raises ValueError if they are damaged, OSError if they do not exist."""
    with open(path, "rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if xxhash.xxh3_128(data).hexdigest() != digest:
        raise ValueError("the changes in shared memory are not those that were written: their digest differs")
    length = int.from_bytes(data[:_ALIGNED], "little")
    at, changes = _ALIGNED + length + -length % _ALIGNED, []
    for name, count, width in json.loads(bytes(data[_ALIGNED : _ALIGNED + length])):
        indices = np.frombuffer(data, "<i8", count, at)
        at += indices.nbytes
        bits = np.frombuffer(data, f"<u{width}", count, at)
        at += bits.nbytes + -bits.nbytes % _ALIGNED
        changes.append(ElementChange(name, indices, bits))
    return changes


HeldBoxes = npt.NDArray[np.int64]
"""i8[boxes, 5] of one rank: number of the tensor, source, rows, row and pitch (`places.Box`) of each box."""

BoxPrints = npt.NDArray[np.uint64]
"""u8[boxes, 2] of one rank: the fingerprint of each box, low lane and high lane."""


class RankCoverage:
    """The elements that each rank holds.

    Raises:
        UnsupportedModelError: no rank holds elements of a tensor, or several hold them in boxes that differ.
    """

    def __init__(self, tensors: Sequence[TensorSpec], ranks: Sequence[HeldBoxes | bytes]) -> None:
        self._tensors = tensors
        tables = [np.frombuffer(boxes, np.int64).reshape(-1, 5) for boxes in ranks]
        self._rank_of = np.repeat(np.arange(len(tables)), [len(boxes) for boxes in tables])
        every = np.concatenate(tables)
        distinct, self._first, self._box_of = np.unique(every, axis=0, return_index=True, return_inverse=True)
        self._tensor_of = distinct[:, 0]
        bounds = np.searchsorted(self._tensor_of, np.arange(len(tensors) + 1))
        for spec, begin, end in zip(tensors, bounds[:-1], bounds[1:], strict=True):
            position, rows, row, pitch = 0, 1, 0, 0
            # Covered so far: all elements below `position`, then `rows` rows of `row`, at a distance of `pitch`.
            for source, *shape in distinct[begin:end, 1:].tolist():
                if row and shape[0] == rows and shape[2] == pitch and source == position + row:
                    # The next columns of the same rows.
                    row += shape[1]
                elif not row and source == position:
                    rows, row, pitch = shape
                else:
                    break
                if rows == 1 or row == pitch:
                    position, row = position + rows * row, 0
            if row or position != spec.n_elements:
                raise UnsupportedModelError(
                    f"elements of {spec.name} from {position} of {spec.n_elements} lie in no rank of the engine, or in "
                    "several of them in pieces that differ: not mapped"
                )

    def add_up(self, ranks: Sequence[BoxPrints | bytes]) -> dict[str, Fingerprint]:
        """Return the fingerprint of each tensor, from the fingerprints of its boxes on each rank.

        Raises:
            ValueError: two ranks hold different values of the same elements; it names the tensor and the ranks.
        """
        every = np.concatenate([np.frombuffer(prints, np.uint64).reshape(-1, 2) for prints in ranks])
        once = every[self._first]
        odd = np.flatnonzero((every != once[self._box_of]).any(axis=1))
        if odd.size:
            box = self._box_of[odd[0]]
            name = self._tensors[self._tensor_of[box]].name
            one, other = self._rank_of[self._first[box]], self._rank_of[odd[0]]
            raise ValueError(f"ranks {one} and {other} hold different copies of elements of {name}")
        sums = np.zeros((len(self._tensors), 2), dtype=np.uint64)
        np.add.at(sums, self._tensor_of, once)
        return {spec.name: Fingerprint(int(lo), int(hi)) for spec, (lo, hi) in zip(self._tensors, sums, strict=True)}

    def proof(self, cores: Sequence[Mapping[str, Any]]) -> Proof:
        """Return the proof from the ranks of all cores; each core reports `prints` and `proof_ms`, or `damage`."""
        damage, found = "; ".join(objections(cores, "damage")), {}
        try:
            found = {} if damage else self.add_up([prints for core in cores for prints in core["prints"]])
        except ValueError as error:
            damage = str(error)
        total = "" if damage else sum(found.values(), start=ZERO).hex()
        tensors = {name: one.hex() for name, one in found.items()}
        return Proof(total, tensors, damage, max(core["proof_ms"] for core in cores))


def objections(cores: Sequence[Mapping[str, Any]], objection: str) -> list[str]:
    """Return the objections of the engine cores that have one, with the core's number if there are several cores."""
    names = [f"engine {number}, " if len(cores) > 1 else "" for number in range(len(cores))]
    return [name + core[objection] for name, core in zip(names, cores, strict=True) if core[objection]]
