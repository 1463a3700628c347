"""Tools of the operator: they read the log whole, copy it, and act on what a user asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

Progress = Callable[[int, int], None]
"""Called with the number of offsets that were read, and the number of all."""
T = TypeVar("T")


def picked(record: object, names: str, **own: Any) -> dict[str, Any]:  # noqa: ANN401 - values of any type
    """Some fields of a record, named in one text, behind values of another origin."""
    return {**own, **{name: getattr(record, name) for name in names.split()}}


def no_progress(_done: int, _total: int) -> None:
    """Report progress to nobody."""


def watched(items: Iterable[T], total: int, progress: Progress) -> Iterator[T]:
    """The items; `progress` is told of the first one, of each hundredth after it, and of the end."""
    for n, item in enumerate(items):
        if n % 100 == 0:
            progress(n, total)
        yield item
    progress(total, total)
