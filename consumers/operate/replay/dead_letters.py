"""Redrive of dead letters: the check which letters may be sent back, and sending them.

A record that could not be used is sent back once, even if several applications wrote a dead letter about it. Its copy
in the source topic names the record, and this is stored nowhere else: a copy that fails again is a new dead letter with
one more attempt. If the source topic no longer holds every record after a dead letter's record, it cannot be known
whether the record was sent back, and the letter is not sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.consumers.operate import Progress, no_progress, watched
from tidemill.consumers.operate.replay.records import RANK, Lane, LogSource, Range, RawRecord, topic_of
from tidemill.consumers.operate.replay.target import header
from tidemill.consumers.operate.rights.records import user_of
from tidemill.consumers.sink.erasures import Erasures, erased_interactions
from tidemill.consumers.sink.rows import dead_letter
from tidemill.schemas.catalogue import CATALOGUE, DEAD_LETTER_SUFFIX, Topic, is_compacted
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import decoded
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import Feedback, Record

HEADER_REDRIVE_OF = "tidemill-redrive-of"
"""On a record that was sent back: full topic, partition and offset of the record that could not be used."""
HEADER_ATTEMPTS = "tidemill-attempts"
"""On a record that was sent back: how many times its content was sent back."""

ERASED = "its user was erased"
ERASED_INTERACTION = "its interaction was erased, or the log no longer holds it after an erasure"
"""Reasons why such letters must not be sent back."""
NUMBER = re.compile(rb"[0-9]{1,9}")
"""A usable number of attempts in a header; any other one counts as 1."""
UNSAID = -1
"""The value of a number that the headers of a letter do not contain."""

Transform = Callable[["StoredLetter"], bytes | None]
"""Returns the value to send back; None does not send the letter."""


@dataclass(frozen=True, slots=True)
class StoredLetter:
    raw: RawRecord
    """The record as it is in the dead-letter topic."""
    source: Lane
    """Its source topic and partition."""
    source_offset: int | None
    """None if its headers do not contain it: such a letter cannot be sent back."""
    source_timestamp_ms: int
    """Timestamp of the record that could not be used; that of the letter if its headers do not contain it."""
    reason: str
    found_by: str

    @property
    def name(self) -> str:
        """Its name on the command line: topic/partition/offset."""
        return f"{self.raw.topic}/{self.raw.partition}/{self.raw.offset}"

    @property
    def origin(self) -> str:
        """The record that could not be used: topic/partition/offset. Several letters can have the same."""
        return f"{self.source[0]}/{self.source[1]}/{self.source_offset}"

    @property
    def order(self) -> tuple[int, int, int]:
        """Its place among all letters: by topic, partition and offset."""
        return RANK[self.raw.topic], self.raw.partition, self.raw.offset

    @property
    def value(self) -> bytes | None:
        return self.raw.value

    @property
    def key(self) -> bytes | None:
        return self.raw.key


def letter_of(raw: RawRecord, prefix: str) -> StoredLetter:
    """Return a record of a dead-letter topic as a letter; its headers may be missing or malformed."""
    topic = raw.topic.removesuffix(DEAD_LETTER_SUFFIX)
    parsed = dead_letter(raw.headers, ("", UNSAID, UNSAID, UNSAID), b"")
    is_placed = parsed.source_topic == prefix + topic and min(parsed.source_partition, parsed.source_offset) > UNSAID
    return StoredLetter(
        raw=raw,
        source=(topic, raw.partition if parsed.source_partition <= UNSAID else parsed.source_partition),
        source_offset=parsed.source_offset if is_placed else None,
        source_timestamp_ms=parsed.source_timestamp_ms if parsed.source_timestamp_ms > 0 else raw.timestamp_ms,
        reason=parsed.reason,
        found_by=parsed.found_by,
    )


SHOWN_REASON = 160
"""Characters at the beginning of a reason by which letters are counted: a reason may quote a value of any length."""
QUOTED = re.compile(r"'[^']*'|\d[\d.,]*")
"""Values that a reason quotes, and numbers: reasons that differ only in these are counted together."""


def counts(letters: Iterable[StoredLetter]) -> dict[tuple[str, str], dict[str, Any]]:
    """Count letters by source topic and beginning of their reason, without the values that it quotes, in the order of
    the first letter of each. Keeps no letters.

    Returns of each the beginning of one `reason`, their number (`letters`), the times of the oldest and the newest
    (`oldest_ms`, `newest_ms`), the applications that wrote them (`found_by`), and the places of the `first` and of the
    `last`, this one with its name.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for letter in letters:
        place, at_ms = letter.order, letter.raw.timestamp_ms
        reason = letter.reason if len(letter.reason) <= SHOWN_REASON else f"{letter.reason[:SHOWN_REASON]}..."
        count = found.setdefault(
            (letter.source[0], QUOTED.sub("", reason)),
            {
                "reason": reason,
                "letters": 0,
                "oldest_ms": at_ms,
                "newest_ms": at_ms,
                "found_by": set(),
                "first": place,
                "last": (),
            },
        )
        count["letters"] += 1
        count["oldest_ms"] = min(count["oldest_ms"], at_ms)
        count["newest_ms"] = max(count["newest_ms"], at_ms)
        count["found_by"].add(letter.found_by)
        count["first"] = min(count["first"], place)
        count["last"] = max(count["last"], (place, letter.name))
    return dict(sorted(found.items(), key=lambda item: item[1]["first"]))


@dataclass(slots=True)
class RedriveHistory:
    """The later records of the dead letters' source topics, read from the position of the oldest letter to the end."""

    kept_from: dict[Lane, int] = field(default_factory=dict)
    """First offset that the log still holds of each partition that exists."""
    erasures: Erasures = field(default_factory=Erasures)
    _sent_back: set[str] = field(default_factory=set)
    _attempts: dict[tuple[str, int, int], int] = field(default_factory=dict)
    _newest: dict[tuple[Lane, bytes], int] = field(default_factory=dict)

    def observe(self, record: RawRecord, prefix: str) -> None:
        of, attempts = (header(record, name) or b"" for name in (HEADER_REDRIVE_OF, HEADER_ATTEMPTS))
        if of:
            self._sent_back.add(of.decode("utf-8", "replace").removeprefix(prefix))
            # Any process may have written the header, and Python refuses to convert very long numbers.
            self._attempts[*record.lane, record.offset] = int(attempts) if NUMBER.fullmatch(attempts) else 1
        if record.key is not None:
            self._newest[record.lane, record.key] = record.offset

    def sent_back(self, letter: StoredLetter) -> None:
        self._sent_back.add(letter.origin)

    def attempts(self, letter: StoredLetter) -> int:
        """Return how many times the letter's value was sent back before this failure."""
        return self._attempts.get((*letter.source, letter.source_offset or 0), 0)

    def why_not(self, letter: StoredLetter, limit: int) -> str:
        """Return the reason why a letter must not be sent back; empty if it may."""
        if letter.source_offset is None:
            return "its headers do not name its origin"
        if letter.source not in self.kept_from:
            return "the partition from which it came does not exist"
        if letter.origin in self._sent_back:
            return "it was sent back already"
        if self.kept_from[letter.source] > letter.source_offset:
            return "the log no longer shows whether it was sent back: its position is past the topic's retention"
        if self.attempts(letter) >= limit:
            return f"it failed after {self.attempts(letter)} attempts; the limit is {limit}"
        newest = self._newest.get((letter.source, letter.key or b""), -1)
        if is_compacted(topic_of(letter.source[0])) and newest > letter.source_offset:
            return "a later record or an erasure has its key"
        return ""

    def why_erased(self, letter: StoredLetter, record: Record | None) -> str:
        """Return the reason if `record`, decoded from the letter, is data of a user who was erased after it was
        written, or after its event time; empty if it is not.

        The erasure wrote no tombstone for it, because the record could not be decoded at that time.
        """
        user_id, written_at = user_of(record), letter.source_timestamp_ms * 1_000
        was_written_before = user_id is not None and written_at <= self.erasures.before.get(user_id, -1)
        if was_written_before or self.erasures.covers(record, letter.source_timestamp_ms):
            return ERASED
        if isinstance(record, Feedback) and record.interaction_id.encode() in self.erasures.interactions:
            return ERASED_INTERACTION
        return ""


@dataclass(frozen=True, slots=True)
class Verdict:
    letter: StoredLetter
    value: bytes | None
    """The value to send back; None if nothing is sent."""
    record: Record | None
    """The record that a reader will decode from it."""
    attempts: int
    """Including this one."""
    why_not: str


def judge(
    letter: StoredLetter, sequel: RedriveHistory, codec: Codec, limit: int, transform: Transform | None
) -> Verdict:
    """Decide whether a letter is sent back, and with which value: only a value that its readers can decode is sent.

    Raises the errors of the transformation.
    """
    attempts = sequel.attempts(letter) + 1
    why_not = sequel.why_not(letter, limit)
    if why_not:
        return Verdict(letter, None, None, attempts, why_not)
    value = letter.value if transform is None else transform(letter)
    if value is None:
        return Verdict(
            letter, None, None, attempts, "the transformation returned None" if transform else "it has no value"
        )
    record, problem = readable(value, letter.source[0], codec)
    problem = sequel.why_erased(letter, record) or problem
    return Verdict(letter, None if problem else value, record, attempts, problem)


def readable(value: bytes | None, topic: str, codec: Codec) -> tuple[Record | None, str]:
    """Return the record that readers of a topic decode from a value, and the reason if they cannot use it."""
    record, error = decoded(codec, value)
    if record is None:
        return None, f"it cannot be read: {error}"
    if not isinstance(record, CATALOGUE[topic_of(topic)].values):
        return record, f"{type(record).__name__} is no record of {topic}"
    return record, ""


CLIENT_ID = "tidemill-redrive"


class DeadLetters:
    def __init__(self, kafka: KafkaSettings, progress: Progress = no_progress) -> None:
        self._kafka, self._prefix, self._progress = kafka, kafka.topic_prefix, progress
        self._source = LogSource(kafka)
        self._codec = Codec(kafka.registry_url)

    def read(self, topics: Iterable[str] = ()) -> Iterator[StoredLetter]:
        """Yield every letter of the topics, by default of all, in offset order within each partition."""
        wanted = list(topics) or [topic.value for topic in CATALOGUE]
        for raw in self._source.scan(self._source.whole(topic + DEAD_LETTER_SUFFIX for topic in wanted)):
            yield letter_of(raw, self._prefix)

    def one(self, topic: str, partition: int, offset: int) -> StoredLetter:
        """Return the letter at a position of a dead-letter topic. Raises LookupError if there is none."""
        lane = (topic, partition)
        if partition < self._source.partitions(topic):
            bounds = self._source.bounds(lane)
            if bounds.start <= offset < bounds.end:
                raw = next(self._source.scan({lane: Range(offset, offset + 1)}), None)
                if raw is not None:
                    return letter_of(raw, self._prefix)
        raise LookupError(
            f"there is no dead letter at {topic}/{partition}/{offset}: `tidemill dead-letters list` shows all"
        )

    def judge(self, letters: Sequence[StoredLetter], limit: int, transform: Transform | None = None) -> list[Verdict]:
        """Decide which letters are sent back, and with which values. Nothing is written.

        The verdicts are in the order of the records that could not be used, and then in that of their letters.
        """
        sequel = self.sequel(letters)
        ordered = sorted(
            letters, key=lambda one: (RANK[one.source[0]], one.source[1], one.source_offset or 0, one.order)
        )
        verdicts = []
        for letter in ordered:
            verdicts.append(judge(letter, sequel, self._codec, limit, transform))
            if not verdicts[-1].why_not:
                sequel.sent_back(letter)
        return verdicts

    def sequel(self, letters: Sequence[StoredLetter]) -> RedriveHistory:
        """Read the erasures, the interactions that the letters are feedback on, and the source partitions of the
        letters, these from the oldest letter's position to the end."""
        oldest: dict[Lane, int] = {}
        for letter in letters:
            if letter.source_offset is not None and letter.source[1] < self._source.partitions(letter.source[0]):
                oldest[letter.source] = min(letter.source_offset, oldest.get(letter.source, letter.source_offset))
        bounds = {lane: self._source.bounds(lane) for lane in oldest}
        sequel = RedriveHistory({lane: bound.start for lane, bound in bounds.items()})
        for raw in self._source.scan(self._source.whole([Topic.USER_REQUESTS.value])):
            sequel.erasures.observe(decoded(self._codec, raw.value)[0])
        feedback = [letter for letter in letters if letter.source[0] == Topic.FEEDBACK.value]
        judged = ((letter.key or b"", letter.source_timestamp_ms) for letter in feedback)
        sequel.erasures.interactions |= erased_interactions(self._kafka, judged, sequel.erasures)
        ranges = {lane: Range(max(oldest[lane], bound.start), bound.end) for lane, bound in bounds.items()}
        total = sum(max(0, r.end - r.start) for r in ranges.values())
        for record in watched(self._source.scan(ranges), total, self._progress):
            sequel.observe(record, self._prefix)
        return sequel

    def send_back(self, verdicts: Iterable[Verdict]) -> int:
        """Write the accepted letters to their source topics, with key, partition and time; return their number.

        Raises DeliveryError if the log refuses one.
        """
        sent = 0
        with RecordProducer(self._kafka, CLIENT_ID, self._codec) as producer:
            for verdict in verdicts:
                if verdict.why_not:
                    continue
                topic, partition = verdict.letter.source
                producer.send_bytes(
                    self._prefix + topic,
                    verdict.value,
                    key=verdict.letter.key,
                    partition=partition,
                    timestamp_ms=verdict.letter.source_timestamp_ms,
                    headers={
                        HEADER_REDRIVE_OF: f"{self._prefix}{verdict.letter.origin}".encode(),
                        HEADER_ATTEMPTS: str(verdict.attempts).encode(),
                    },
                )
                sent += 1
        return sent

    def close(self) -> None:
        self._source.close()
