"""Tools of the operator: they read the log whole, copy it, and act on what a user asks.

Here are records as these tools read them: their positions and their digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tidemill.schemas.log.consumed import ConsumedRecord, Position

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Progress = Callable[[int, int], None]
"""Called with the number of offsets that were read, and the number of all."""
R = TypeVar("R")
K = TypeVar("K", bound="DataclassInstance")
Content = TypeVar("Content", covariant=True)


@dataclass(frozen=True, slots=True)
class RecordAt(Generic[Content]):
    """A record, its place, and a digest of its bytes: a record may be in the log again only byte for byte the same."""

    place: Position
    record: Content
    digest: bytes


def record_at(consumed: ConsumedRecord, record: R) -> RecordAt[R]:
    """A record with its place; a record without bytes is digested as it prints."""
    data = consumed.value if consumed.value else repr(record).encode()
    return RecordAt(consumed.position, record, hashlib.blake2b(data, digest_size=16).digest())


def copied(kind: type[K], record: object, **own: Any) -> K:  # noqa: ANN401 - fields of any type
    """A dataclass `kind` with the fields of the same names that a record has, except those that are given."""
    names = (entry.name for entry in fields(kind) if entry.name not in own)
    return kind(**{name: getattr(record, name) for name in names}, **own)


def no_progress(_done: int, _total: int) -> None:
    """Report progress to nobody."""
