"""The calls that attention over a tree of tokens takes.

A row's tokens form a forest: a token's parent is the token before it in each sequence that holds it, and it stands
after its parent, directly followed by everything that goes on from it (depth-first order). A token attends to itself
and to its ancestors. Three kinds of calls cover those pairs, each pair once:

- a long run of tokens without a branch attends to itself causally;
- short runs, and whole subtrees that are as short, attend to themselves in batches, padded to a common length, under a
  mask (a run that is alone with its length is treated as a long one);
- everything below a run that branches attends to that run, without a mask.

So the arithmetic is that of the pairs there are, and the number of calls that of the long runs and branches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SHORT = 64
"""Most tokens of a run or subtree that is computed under a mask. Masked pairs cost as much as others, calls cost the
same for any number of tokens."""
_PADDING = 8
"""Short ones are padded to multiples of this, so that few batches hold them."""


@dataclass(frozen=True, slots=True)
class ShortRuns:
    """B runs or subtrees of at most N tokens, padded to N; padding attends to itself alone."""

    tokens: Tensor
    """i8[B * N]: the row's token in each slot; any token in padding."""
    slots: Tensor
    """i8[K]: the slots that are not padding."""
    mask: Tensor
    """f4[B, 1, N, N]: 0 where a slot (third axis) attends to another (fourth axis), else minus infinity."""

    def to(self, device: torch.device) -> ShortRuns:
        """The same on `device`."""
        return ShortRuns(self.tokens.to(device), self.slots.to(device), self.mask.to(device))


@dataclass(frozen=True, slots=True)
class TreeCalls:
    """The calls for a row of L tokens."""

    length: int
    """L."""
    runs: tuple[tuple[int, int], ...]
    """Start and end of each run that attends to itself by itself."""
    short: tuple[ShortRuns, ...]
    trunks: tuple[tuple[int, int, int], ...]
    """Start and end of each run that branches, and the end of what is below it, which begins at the run's end."""

    def to(self, device: torch.device) -> TreeCalls:
        """The same with the tensors on `device`."""
        return replace(self, short=tuple(runs.to(device) for runs in self.short))


def tree_calls(parents: npt.NDArray[np.int64]) -> TreeCalls:
    """The calls for tokens with these parents.

    Args:
        parents: i8[L], -1 for a token without one; in depth-first order.
    """
    starts, ends, stops = _runs(parents)
    below = np.repeat(stops, ends - starts)
    runs: list[tuple[int, int]] = []
    short: dict[int, list[tuple[int, int]]] = defaultdict(list)
    trunks: list[tuple[int, int, int]] = []
    place = 0
    while place < len(starts):
        start, end, stop = int(starts[place]), int(ends[place]), int(stops[place])
        whole = stop - start <= SHORT
        last = stop if whole else end
        if last - start <= SHORT:
            short[-(-(last - start) // _PADDING) * _PADDING].append((start, last))
        else:
            runs.append((start, last))
        if last < stop:
            trunks.append((start, end, stop))
        place = int(np.searchsorted(starts, last))
    for length, members in list(short.items()):
        if len(members) == 1 and below[members[0][0]] == below[slice(*members[0])].min():
            runs += short.pop(length)
    batches = (_batch(np.array(members), length, below) for length, members in sorted(short.items()))
    return TreeCalls(len(parents), tuple(runs), tuple(batches), tuple(trunks))


def separate_calls(lengths: Sequence[int]) -> TreeCalls:
    """The calls for sequences end to end that share nothing."""
    parents = np.arange(-1, sum(lengths) - 1)
    parents[np.cumsum([0, *lengths[:-1]])] = -1
    return tree_calls(parents)


def _runs(
    parents: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Start and end of each run without a branch, and the end of the subtree that it begins."""
    tokens = np.arange(len(parents))
    children = np.bincount(parents[parents >= 0], minlength=len(parents))
    starts = np.flatnonzero((parents != tokens - 1) | (children[tokens - 1] > 1) | (tokens == 0))
    ends = np.append(starts[1:], len(parents))
    above = np.searchsorted(starts, parents[starts], "right") - 1
    stops = ends.copy()
    for place in range(len(starts) - 1, -1, -1):
        if above[place] >= 0:
            stops[above[place]] = max(stops[above[place]], stops[place])
    return starts, ends, stops


def _batch(members: npt.NDArray[np.int64], length: int, below: npt.NDArray[np.int64]) -> ShortRuns:
    tokens = members[:, :1] + np.arange(length)
    real = tokens < members[:, 1:]
    tokens = np.where(real, tokens, members[:, :1])
    attending, attended = tokens[:, :, None], tokens[:, None, :]
    allowed = (attended <= attending) & (attending < below[attended]) & real[:, :, None] & real[:, None, :]
    allowed |= np.eye(length, dtype=np.bool_)
    mask = np.where(allowed, np.float32(0), np.float32(-np.inf))
    return ShortRuns(
        torch.from_numpy(tokens.reshape(-1)), torch.from_numpy(np.flatnonzero(real)), torch.from_numpy(mask[:, None])
    )
