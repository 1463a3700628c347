"""Dead letters, and which of them may be sent back: decisions over what the log says, nothing else.

What could not be used goes back once, however many applications wrote a letter of it. Its copy in the source topic
names the record that it was, and that is the only memory of it: a copy that fails again is another letter, one attempt
further. Where the source no longer shows everything that came after a letter, whether it went back cannot be known, and
it stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tidemill.consumers.operate.replay.marks import header
from tidemill.consumers.operate.replay.raw import Lane, RawRecord, topic_of
from tidemill.schemas.catalogue import CATALOGUE, DEAD_LETTER_SUFFIX, is_compacted
from tidemill.schemas.codec import Codec, DecodeError
from tidemill.schemas.log.dead_letter import (
    HEADER_APPLICATION,
    HEADER_OFFSET,
    HEADER_PARTITION,
    HEADER_REASON,
    HEADER_TIMESTAMP,
    HEADER_TOPIC,
)
from tidemill.schemas.records import Record

HEADER_REDRIVE_OF = "tidemill-redrive-of"
"""On a record that was sent back: full topic, partition and offset of the one that could not be used."""
HEADER_ATTEMPTS = "tidemill-attempts"
"""On a record that was sent back: how many times its content has been."""

Transform = Callable[["Letter"], bytes | None]
"""Makes the value that goes back; None leaves the letter where it is."""


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter."""

    raw: RawRecord
    """As it lies in the dead-letter topic."""
    source: Lane
    """Topic and partition that it came from."""
    source_offset: int | None
    """None where its headers do not say: such a letter cannot go back."""
    source_timestamp_ms: int
    """Of the record that could not be used; of the letter where its headers do not say."""
    reason: str
    found_by: str

    @property
    def name(self) -> str:
        """What it is called on the command line: topic/partition/offset."""
        return f"{self.raw.topic}/{self.raw.partition}/{self.raw.offset}"

    @property
    def origin(self) -> str:
        """The record that could not be used: topic/partition/offset. Several letters can be of one."""
        return f"{self.source[0]}/{self.source[1]}/{self.source_offset}"

    @property
    def value(self) -> bytes | None:
        """The bytes that could not be used."""
        return self.raw.value

    @property
    def key(self) -> bytes | None:
        """The key that they were written under."""
        return self.raw.key


def letter_of(raw: RawRecord, prefix: str) -> Letter:
    """A record of a dead-letter topic as a letter, whatever its headers are."""
    topic = raw.topic.removesuffix(DEAD_LETTER_SUFFIX)
    partition, offset = _number(raw, HEADER_PARTITION), _number(raw, HEADER_OFFSET)
    own = _text(raw, HEADER_TOPIC, "") == prefix + topic and partition is not None
    return Letter(
        raw=raw,
        source=(topic, raw.partition if partition is None else partition),
        source_offset=offset if own else None,
        source_timestamp_ms=_number(raw, HEADER_TIMESTAMP) or raw.timestamp_ms,
        reason=_text(raw, HEADER_REASON, "no reason given"),
        found_by=_text(raw, HEADER_APPLICATION, "unknown"),
    )


def _text(raw: RawRecord, name: str, otherwise: str) -> str:
    value = header(raw, name)
    return otherwise if value is None else value.decode("utf-8", "replace")


def _number(raw: RawRecord, name: str) -> int | None:
    text = _text(raw, name, "")
    return int(text) if text.isdecimal() else None


@dataclass(slots=True)
class Sequel:
    """What the source topics say of letters: read from the oldest letter's place to the end."""

    kept_from: dict[Lane, int] = field(default_factory=dict)
    """First offset that the log holds of each partition."""
    _sent_back: set[str] = field(default_factory=set)
    _attempts: dict[tuple[str, int, int], int] = field(default_factory=dict)
    _newest: dict[tuple[Lane, bytes], int] = field(default_factory=dict)

    def observe(self, record: RawRecord, prefix: str) -> None:
        """The next record of a source partition."""
        of = _text(record, HEADER_REDRIVE_OF, "")
        if of:
            self._sent_back.add(of.removeprefix(prefix))
            self._attempts[*record.lane, record.offset] = _number(record, HEADER_ATTEMPTS) or 1
        if record.key is not None:
            self._newest[record.lane, record.key] = record.offset

    def sent_back(self, letter: Letter) -> None:
        """What a letter holds goes back now."""
        self._sent_back.add(letter.origin)

    def attempts(self, letter: Letter) -> int:
        """How many times what the letter holds was sent back before it failed there."""
        return self._attempts.get((*letter.source, letter.source_offset or 0), 0)

    def why_not(self, letter: Letter, limit: int) -> str:
        """Why a letter must not go back; empty when it may."""
        if letter.source_offset is None:
            return "its headers do not say where it came from"
        if letter.origin in self._sent_back:
            return "it was sent back already"
        if self.kept_from.get(letter.source, 0) > letter.source_offset:
            return "the log no longer shows whether it was sent back: its place has passed the topic's retention"
        if self.attempts(letter) >= limit:
            return f"it failed after {self.attempts(letter)} attempts; the limit is {limit}"
        newest = self._newest.get((letter.source, letter.key or b""), -1)
        if is_compacted(topic_of(letter.source[0])) and newest > letter.source_offset:
            return "a later record, or an erasure, took its key"
        return ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one letter."""

    letter: Letter
    value: bytes | None
    """What goes back; None when nothing does."""
    record: Record | None
    """What a reader will find in it."""
    attempts: int
    """Including this one."""
    why_not: str


def judge(letter: Letter, sequel: Sequel, codec: Codec, limit: int, transform: Transform | None) -> Verdict:
    """Whether and as what a letter goes back: only what its readers can read now does.

    Raises whatever the transformation raises.
    """
    attempts = sequel.attempts(letter) + 1
    why_not = sequel.why_not(letter, limit)
    if why_not:
        return Verdict(letter, None, None, attempts, why_not)
    value = letter.value if transform is None else transform(letter)
    if value is None:
        return Verdict(letter, None, None, attempts, "the transformation leaves it" if transform else "it has no value")
    record, problem = readable(value, letter.source[0], codec)
    return Verdict(letter, None if problem else value, record, attempts, problem)


def readable(value: bytes | None, topic: str, codec: Codec) -> tuple[Record | None, str]:
    """The record that readers of a topic find in a value, and why they find none."""
    try:
        record = codec.decode(value)
    except DecodeError as error:
        return None, f"it cannot be read: {error}"
    if not isinstance(record, CATALOGUE[topic_of(topic)].values):
        return record, f"{type(record).__name__} is no record of {topic}"
    return record, ""


def headers_of(verdict: Verdict, prefix: str) -> Mapping[str, bytes]:
    """Headers of a record that goes back."""
    return {
        HEADER_REDRIVE_OF: f"{prefix}{verdict.letter.origin}".encode(),
        HEADER_ATTEMPTS: str(verdict.attempts).encode(),
    }
