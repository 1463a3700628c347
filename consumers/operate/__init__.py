"""Operator tools: they read the whole log, copy it, and carry out user requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

Progress = Callable[[int, int], None]
"""Called with the number of offsets read, and the total number."""
T = TypeVar("T")


def picked(record: object, names: str, **own: Any) -> dict[str, Any]:  # noqa: ANN401 - values of any type
    """Return `own`, followed by the fields of a record that `names` lists, separated by spaces."""
    return {**own, **{name: getattr(record, name) for name in names.split()}}


def no_progress(_done: int, _total: int) -> None:
    """Discard progress reports."""


def watched(items: Iterable[T], total: int, progress: Progress) -> Iterator[T]:
    """Yield the items; call `progress` at the first one, at each hundredth after it, and at the end."""
    for n, item in enumerate(items):
        if n % 100 == 0:
            progress(n, total)
        yield item
    progress(total, total)
