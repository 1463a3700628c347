"""Records that may stand in the log more than once, and then only byte for byte the same."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Generic, TypeVar

from tidemill.consumers.operate.trace.place import Place, place_of
from tidemill.schemas.log.consumed import ConsumedRecord

R = TypeVar("R")
Held = TypeVar("Held", covariant=True)


@dataclass(frozen=True, slots=True)
class Standing(Generic[Held]):
    """A record, where it stands, and a digest of its bytes."""

    place: Place
    record: Held
    digest: bytes


def standing(located: ConsumedRecord, record: R) -> Standing[R]:
    """A record with its place; one that was never bytes is digested as it prints."""
    data = located.value if located.value else repr(record).encode()
    return Standing(place_of(located), record, hashlib.blake2b(data, digest_size=16).digest())
