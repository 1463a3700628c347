"""Elements that move between ranks, one tensor at a time: a tensor that is cut one way becomes cut another way.

Every rank calls these in the same order. A rank holds what it had and what it gets of one tensor, and no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tidemill.kernels.weights.ranks import Ranks
from tidemill.kernels.weights.tensor_parts import TensorPart

Span = tuple[int, int]
"""Elements of a tensor: the first, and how many."""


def spans_of_all(spans: Mapping[str, Span], ranks: Ranks) -> dict[str, list[Span]]:
    """The spans of every rank, in rank order, by tensor; on every rank. Raises RanksLostError."""
    found = ranks.gather(lambda: spans)
    return ranks.from_first(lambda: {name: [of_rank[name] for of_rank in found] for name in spans})


def exchange(own: TensorPart, held: Sequence[Span], wanted: Sequence[Span], ranks: Ranks) -> TensorPart:
    """This rank's `wanted` elements of a tensor of which every rank has its `held` ones; called by all ranks.

    Both are in rank order and cover what is wanted once. The part itself where nothing moves; else memory of its own.
    Raises RanksLostError.
    """
    if list(held) == list(wanted):
        return own
    start, n = wanted[ranks.rank]
    made = np.empty(n, own.bits.dtype)
    for source, (first, length) in enumerate(held):
        for to, (begin, size) in enumerate(wanted):
            low, high = max(first, begin), min(first + length, begin + size)
            if low >= high:
                continue
            if source == ranks.rank:
                moved = own.bits[low - own.start : high - own.start]
                if to == source:
                    made[low - start : high - start] = moved
                else:
                    ranks.send(moved, to)
            elif to == ranks.rank:
                ranks.receive(made[low - start : high - start], source)
    return replace(own, start=start, bits=made)
