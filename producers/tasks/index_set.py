"""A set of numbers that grows with a run and needs memory only for its gaps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class IndexSet:
    """A set of numbers from 0 on."""

    def __init__(self) -> None:
        self._edges: list[int] = []
        """In order, the numbers at which the membership changes: the first member, the first one after it that is no
        member, and so on."""

    def add(self, index: int) -> None:
        if index in self:
            return
        for edge in (index, index + 1):
            at = bisect_left(self._edges, edge)
            if self._edges[at : at + 1] == [edge]:
                del self._edges[at]
            else:
                self._edges.insert(at, edge)

    def __contains__(self, index: int) -> bool:
        return bisect_right(self._edges, index) % 2 == 1

    def __len__(self) -> int:
        return sum(self._edges[1::2]) - sum(self._edges[::2])

    @property
    def first_missing(self) -> int:
        """The smallest number that is not in the set."""
        return self._edges[1] if 0 in self else 0
