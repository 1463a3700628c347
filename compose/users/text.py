"""The answers of `tidemill users` for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tidemill.compose.moments import utc

if TYPE_CHECKING:
    from tidemill.consumers.operate.rights.erase import ConsentStatus, Erasure, LettersHeld
    from tidemill.consumers.operate.rights.requests import RecordedWish
    from tidemill.schemas.records import UserRequest


def erasure_lines(done: Erasure) -> list[str]:
    """What an erasure did, and what it could not do."""
    lines = [f"user {done.user_id}: the log held {_counts(done.found)}"]
    if done.request is None:
        return [*lines, "nothing was written: this was a dry run", *_letters(done.dead_letters)]
    said = "carried on" if done.carried_on else "demanded"
    lines += [
        f"{said}: {_demand(done.request)}",
        f"erased: {_counts(done.tombstones)}; claimed bytes of {done.claims.deleted} objects",
    ]
    lines += [f"NOT DELETED, outside store.root: {uri}" for uri in done.claims.foreign]
    if done.left:
        lines.append(f"STILL COMING IN: {_counts(done.left)}; run it again")
    if done.unreadable:
        lines.append(f"unreadable, whose is not known: {_counts(done.unreadable)}")
    return [*lines, *_letters(done.dead_letters)]


def choice_lines(made: RecordedWish) -> list[str]:
    """A demand that was written."""
    said = "holds already" if made.carried_on else "written"
    return [f"user {made.request.user_id}: {_demand(made.request)} {said}, with {made.copies} copies"]


def standing_lines(found: ConsentStatus) -> list[str]:
    """How a user stands."""
    demands = [f"  {_demand(request)}" for request in found.demands]
    return [
        f"user {found.user_id}: the log holds {_counts(found.held)}",
        *(["demands, the last one holds:", *demands] if demands else ["no demands"]),
        *_letters(found.dead_letters),
    ]


def _demand(request: UserRequest) -> str:
    return f"{request.wish.value} {request.request_id} by {request.requested_by} at {utc(request.at)} UTC"


def _letters(letters: LettersHeld) -> list[str]:
    if letters.gone_at_ms is None:
        return []
    until = f"{utc(letters.gone_at_ms * 1_000)} UTC"
    return [f"dead letters: {_counts(letters.counts)}; no tombstone reaches them, retention removes them by {until}"]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n:,} in {topic}" for topic, n in sorted(counts.items()) if n) or "nothing"
