"""Dead letters as tables and documents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from tidemill.consumers.replay.letters import Letter, Sequel, Verdict
    from tidemill.schemas.records import Record

SHOWN_BYTES = 256


def summary(letters: Iterable[Letter]) -> list[dict[str, Any]]:
    """Letters by topic and reason: how many, the oldest and the newest."""
    from tidemill.consumers.replay.selection import utc_text

    found: dict[tuple[str, str], list[Letter]] = {}
    for letter in letters:
        found.setdefault((letter.source[0], letter.reason), []).append(letter)
    return [
        {
            "topic": topic,
            "reason": reason,
            "letters": len(of),
            "first": utc_text(min(letter.raw.timestamp_ms for letter in of)),
            "last": utc_text(max(letter.raw.timestamp_ms for letter in of)),
            "found_by": sorted({letter.found_by for letter in of}),
            "example": of[-1].name,
        }
        for (topic, reason), of in found.items()
    ]


def summary_table(rows: list[dict[str, Any]]) -> Table:
    """One line a topic and reason."""
    table = Table("topic", "letters", "first (UTC)", "last (UTC)", "found by", "newest", "reason")
    for row in rows:
        table.add_row(
            row["topic"], f"{row['letters']:,}", row["first"], row["last"], ", ".join(row["found_by"]), row["example"],
            row["reason"],
        )  # fmt: skip
    return table


def letter_document(letter: Letter, sequel: Sequel, record: Record | None, problem: str, whole: bool) -> dict[str, Any]:
    """Everything about one letter."""
    from tidemill.consumers.replay.selection import utc_text

    value = letter.value or b""
    return {
        "letter": letter.name,
        "source": letter.origin,
        "reason": letter.reason,
        "found_by": letter.found_by,
        "written": utc_text(letter.raw.timestamp_ms),
        "attempts": sequel.attempts(letter),
        "why_it_cannot_go_back": sequel.why_not(letter, 2**31) or problem,
        "key": _text(letter.key),
        "headers": {name: _text(header) for name, header in letter.raw.headers},
        "n_bytes": len(value),
        "hex": (value if whole else value[:SHOWN_BYTES]).hex(" "),
        "record": None if record is None else record_document(record),
    }


def record_document(record: Record) -> dict[str, Any]:
    """A record as JSON can hold it; bytes as hexadecimal, the first of them."""
    return {"kind": type(record).__name__, **_plain(asdict(record))}


def _plain(value: Any) -> Any:  # noqa: ANN401 - a JSON tree with bytes in it
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value[:SHOWN_BYTES].hex() + ("…" if len(value) > SHOWN_BYTES else "")
    return value


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    """What becomes of one letter."""
    return {
        "letter": verdict.letter.name,
        "source": verdict.letter.origin,
        "goes_back": not verdict.why_not,
        "why_not": verdict.why_not,
        "attempts": verdict.attempts,
        "record": None if verdict.record is None else record_document(verdict.record),
    }


def verdict_table(verdicts: Iterable[Verdict]) -> Table:
    """One line a letter."""
    table = Table("letter", "into", "attempt", "goes back")
    for verdict in verdicts:
        topic, partition = verdict.letter.source
        kind = "" if verdict.record is None else type(verdict.record).__name__
        outcome = f"no: {verdict.why_not}" if verdict.why_not else f"as {kind}"
        table.add_row(verdict.letter.name, f"{topic}[{partition}]", str(verdict.attempts), outcome)
    return table


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "backslashreplace")
