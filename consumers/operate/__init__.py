"""Tools of the operator: they read the log whole, copy it, and act on what a user asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Progress = Callable[[int, int], None]
"""Called with the number of offsets that were read, and the number of all."""
T = TypeVar("T")
K = TypeVar("K", bound="DataclassInstance")


def copied(kind: type[K], record: object, **own: Any) -> K:  # noqa: ANN401 - fields of any type
    """A dataclass `kind` with the fields of the same names that a record has, except those that are given."""
    names = (entry.name for entry in fields(kind) if entry.name not in own)
    return kind(**{name: getattr(record, name) for name in names}, **own)


def no_progress(_done: int, _total: int) -> None:
    """Report progress to nobody."""


def watched(items: Iterable[T], total: int, progress: Progress) -> Iterator[T]:
    """The items; `progress` is told of the first one, of each hundredth after it, and of the end."""
    for n, item in enumerate(items):
        if n % 100 == 0:
            progress(n, total)
        yield item
    progress(total, total)
