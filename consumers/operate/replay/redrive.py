"""Reads dead letters and what became of them from the log, and sends some of them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tidemill.consumers.operate.reading import Progress, no_progress
from tidemill.consumers.operate.replay.letters import Letter, Sequel, Transform, Verdict, headers_of, judge, letter_of
from tidemill.consumers.operate.replay.raw import RANK, Lane
from tidemill.consumers.operate.replay.source import LogSource, Range
from tidemill.schemas.catalogue import CATALOGUE, DEAD_LETTER_SUFFIX
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.producer import RecordProducer

CLIENT_ID = "tidemill-redrive"


class DeadLetters:
    """The dead letters under one prefix."""

    def __init__(self, kafka: KafkaSettings, progress: Progress = no_progress) -> None:
        self._kafka, self._prefix, self._progress = kafka, kafka.topic_prefix, progress
        self._source = LogSource(kafka)
        self._codec = Codec(kafka.registry_url)

    def read(self, topics: Iterable[str] = ()) -> Iterator[Letter]:
        """Every letter of some topics, of all where none is named, in order of topic, partition and offset."""
        wanted = list(topics) or [topic.value for topic in CATALOGUE]
        lanes = [
            (topic + DEAD_LETTER_SUFFIX, partition)
            for topic in wanted
            for partition in range(self._source.partitions(topic + DEAD_LETTER_SUFFIX))
        ]
        found = list(self._source.scan({lane: self._source.bounds(lane) for lane in lanes}))
        for raw in sorted(found, key=lambda record: (RANK[record.topic], record.partition, record.offset)):
            yield letter_of(raw, self._prefix)

    def one(self, topic: str, partition: int, offset: int) -> Letter:
        """The letter at a place of a dead-letter topic. Raises LookupError when none lies there."""
        lane = (topic, partition)
        if partition < self._source.partitions(topic):
            bounds = self._source.bounds(lane)
            if bounds.start <= offset < bounds.end:
                raw = next(self._source.scan({lane: Range(offset, offset + 1)}), None)
                if raw is not None:
                    return letter_of(raw, self._prefix)
        raise LookupError(
            f"no dead letter lies at {topic}/{partition}/{offset}: `tidemill dead-letters list` shows all"
        )

    def judge(self, letters: Sequence[Letter], limit: int, transform: Transform | None = None) -> list[Verdict]:
        """Which letters may go back, and as what, in the order in which they came. Nothing is written."""
        sequel = self.sequel(letters)
        ordered = sorted(letters, key=lambda one: (RANK[one.source[0]], one.source[1], one.source_offset or 0))
        verdicts = []
        for letter in ordered:
            verdicts.append(judge(letter, sequel, self._codec, limit, transform))
            if not verdicts[-1].why_not:
                sequel.sent_back(letter)
        return verdicts

    def sequel(self, letters: Iterable[Letter]) -> Sequel:
        """What came of letters: their source partitions, read from the oldest letter's place on."""
        oldest: dict[Lane, int] = {}
        for letter in letters:
            if letter.source_offset is not None and letter.source[1] < self._source.partitions(letter.source[0]):
                oldest[letter.source] = min(letter.source_offset, oldest.get(letter.source, letter.source_offset))
        bounds = {lane: self._source.bounds(lane) for lane in oldest}
        sequel = Sequel({lane: bound.start for lane, bound in bounds.items()})
        ranges = {lane: Range(max(oldest[lane], bound.start), bound.end) for lane, bound in bounds.items()}
        total = sum(max(0, r.end - r.start) for r in ranges.values())
        for n, record in enumerate(self._source.scan(ranges)):
            sequel.observe(record, self._prefix)
            self._progress(n, total)
        return sequel

    def send_back(self, verdicts: Iterable[Verdict]) -> int:
        """Write the letters that may go back to where they came from, under their key, partition and time; how many.

        Raises DeliveryError when the log refuses one.
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
                    headers=headers_of(verdict, self._prefix),
                )
                sent += 1
        return sent

    def close(self) -> None:
        """Give the connections back."""
        self._source.close()
