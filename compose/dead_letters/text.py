"""Dead letters as tables and documents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tidemill.compose.rows import print_rows

if TYPE_CHECKING:
    from tidemill.consumers.operate.replay.dead_letters import Sequel, StoredLetter, Verdict
    from tidemill.schemas.records import Record

SHOWN_BYTES = 256
SUMMARY = ("topic", "reason", "letters", "first", "last", "found_by", "example")


def summary(letters: Iterable[StoredLetter]) -> list[tuple[object, ...]]:
    """Rows of SUMMARY, one a topic and reason: how many letters, the oldest and the newest, in UTC."""
    from tidemill.consumers.operate.replay.selection import utc_text

    found: dict[tuple[str, str], list[StoredLetter]] = {}
    for letter in letters:
        found.setdefault((letter.source[0], letter.reason), []).append(letter)
    return [
        (
            topic,
            reason,
            len(of),
            utc_text(min(letter.raw.timestamp_ms for letter in of)),
            utc_text(max(letter.raw.timestamp_ms for letter in of)),
            sorted({letter.found_by for letter in of}),
            of[-1].name,
        )
        for (topic, reason), of in found.items()
    ]


def letter_document(
    letter: StoredLetter, sequel: Sequel, record: Record | None, problem: str, whole: bool
) -> dict[str, Any]:
    """Everything about one letter."""
    from tidemill.consumers.operate.replay.selection import utc_text

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


def print_verdicts(verdicts: Iterable[Verdict], as_csv: bool) -> None:
    """Print what becomes of each letter, one a row."""
    rows = []
    for verdict in verdicts:
        topic, partition = verdict.letter.source
        kind = None if verdict.record is None else type(verdict.record).__name__
        into = f"{topic}[{partition}]"
        rows.append((verdict.letter.name, into, verdict.attempts, not verdict.why_not, kind, verdict.why_not))
    print_rows(("letter", "into", "attempts", "goes_back", "record", "why_not"), rows, as_csv=as_csv)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "backslashreplace")
