"""Dealing tensors out by size: the same hands on every rank that deals the same tensors."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


def deal(sizes: Mapping[str, int], hands: int) -> dict[str, int]:
    """Which of `hands` takes each tensor: the largest first, each to the hand that has least; in the order of `sizes`.

    Raises ValueError for no hands.
    """
    if hands < 1:
        raise ValueError(f"tensors are dealt to at least one hand, not {hands}")
    loads = [(0, hand) for hand in range(hands)]
    dealt: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, hand = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[name], hand))
        dealt[name] = hand
    return {name: dealt[name] for name in sizes}
