"""The ranks of engines together hold a checkpoint: checked once, and then each proof is added up over them. Pure.

Each rank says which boxes of each tensor it holds, and for a proof the fingerprint of each of them, in the same order.
Keeps true: every element of every tensor is held by some rank, or the engine is refused at its start; an element that
several ranks hold (norms, routers, shared heads of keys and values) is counted once, and its copies must agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.consumers.replica.ledger import Proof
from tidemill.consumers.replica.weight_map import UnsupportedModelError
from tidemill.kernels.fingerprint import ZERO, Fingerprint
from tidemill.kernels.weights.bits import TensorSpec

HeldBoxes = npt.NDArray[np.int64]
"""i8[boxes, 5] of one rank: number of the tensor, source, rows, row and pitch (`places.Box`) of each box."""

BoxPrints = npt.NDArray[np.uint64]
"""u8[boxes, 2] of one rank: the fingerprint of each box, low lane and high lane."""


class CopiesDisagreeError(ValueError):
    """Ranks that hold the same elements hold other values; the message names the tensor and the ranks."""


class Holdings:
    """Which elements each rank holds.

    Raises:
        UnsupportedModelError: elements of a tensor are held by no rank, or by several in boxes that differ.
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
            _check_whole(spec, distinct[begin:end, 1:])

    def add_up(self, ranks: Sequence[BoxPrints | bytes]) -> dict[str, Fingerprint]:
        """Fingerprint of each tensor, from those of its boxes on each rank.

        Raises:
            CopiesDisagreeError: two ranks hold other values of the same elements.
        """
        every = np.concatenate([np.frombuffer(prints, np.uint64).reshape(-1, 2) for prints in ranks])
        once = every[self._first]
        odd = np.flatnonzero((every != once[self._box_of]).any(axis=1))
        if odd.size:
            box = self._box_of[odd[0]]
            name = self._tensors[self._tensor_of[box]].name
            one, other = self._rank_of[self._first[box]], self._rank_of[odd[0]]
            raise CopiesDisagreeError(f"ranks {one} and {other} hold different copies of elements of {name}")
        sums = np.zeros((len(self._tensors), 2), dtype=np.uint64)
        np.add.at(sums, self._tensor_of, once)
        return {spec.name: Fingerprint(int(lo), int(hi)) for spec, (lo, hi) in zip(self._tensors, sums, strict=True)}

    def proof(self, cores: Sequence[Mapping[str, Any]]) -> Proof:
        """The proof that the ranks of all cores make; each core says `prints` and `proof_ms`, or its `damage`."""
        damage, found = "; ".join(told(cores, "damage")), {}
        try:
            found = {} if damage else self.add_up([prints for core in cores for prints in core["prints"]])
        except CopiesDisagreeError as error:
            damage = str(error)
        total = "" if damage else sum(found.values(), start=ZERO).hex()
        tensors = {name: one.hex() for name, one in found.items()}
        return Proof(total, tensors, damage, max(core["proof_ms"] for core in cores))


def told(cores: Sequence[Mapping[str, Any]], objection: str) -> list[str]:
    """The objections of the engine cores that have one, with the number of the core where there are several."""
    names = [f"engine {number}, " if len(cores) > 1 else "" for number in range(len(cores))]
    return [name + core[objection] for name, core in zip(names, cores, strict=True) if core[objection]]


def _check_whole(spec: TensorSpec, boxes: npt.NDArray[np.int64]) -> None:
    """Raises UnsupportedModelError unless boxes (source, rows, row, pitch), by their source, hold each element once."""
    position, rows, row, pitch = 0, 1, 0, 0
    """What is covered so far: everything below `position`, and then `rows` rows of `row`, at a distance of `pitch`."""
    for source, *shape in boxes.tolist():
        if row and shape[0] == rows and shape[2] == pitch and source == position + row:
            # The next columns of the same rows.
            row += shape[1]
        elif row:
            break
        elif source == position:
            rows, row, pitch = shape
        else:
            break
        if rows == 1 or row == pitch:
            position, row = position + rows * row, 0
    if row or position != spec.n_elements:
        raise UnsupportedModelError(
            f"elements of {spec.name} from {position} of {spec.n_elements} lie in no rank of the engine, or in several "
            "of them in pieces that differ: not mapped"
        )
