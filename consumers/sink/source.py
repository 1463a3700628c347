"""What the sink reads: every topic and dead-letter topic, from where the tables stand.

What holds: what the log deleted before the sink had read it ends the sink, or is entered in a table before anything
that comes after it is written.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.dead_letters import DeadLetterReader
from tidemill.consumers.sink.rows import Row, row_of
from tidemill.consumers.sink.writer import Writer
from tidemill.schemas.catalogue import CATALOGUE, Names
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import Partition
from tidemill.schemas.log.guard import RetentionGap
from tidemill.schemas.log.reader import LogReader

log = logging.getLogger(__name__)

POLL_S = 0.1


class Source:
    """Every topic of the catalogue and its dead letters, as rows.

    Raises RetentionGap, here and in `read`, unless the settings accept gaps.
    """

    def __init__(self, kafka: KafkaSettings, sink: SinkSettings, writer: Writer) -> None:
        self._names = Names(kafka.topic_prefix)
        self._accept = sink.accept_gaps
        self._writer = writer
        self._records = self._open(kafka)
        self._begun = self._at()
        self._letters = DeadLetterReader(kafka, writer.next_offsets)

    def _open(self, kafka: KafkaSettings) -> LogReader:
        full = {self._names.of(topic): topic for topic in CATALOGUE}
        while True:
            places = self._writer.next_offsets
            start = {(full[name], partition): offset for (name, partition), offset in places.items() if name in full}
            try:
                return LogReader(kafka, list(CATALOGUE), start=start, client_id="tidemill-sink")
            except RetentionGap as gap:
                self._pass(gap)
                self._writer.write([], {(gap.topic, gap.partition): gap.first})

    def read(self, limit: int) -> list[Row]:
        """The next rows: at most `limit` records, and some dead letters."""
        rows = []
        try:
            found = self._records.poll(POLL_S, limit)
            rows += [row_of(located, self._names, CATALOGUE[located.topic].values) for located in found]
            rows += self._letters.poll(0)
        except RetentionGap as gap:
            self._pass(gap)
        return rows

    def next_offsets(self) -> dict[Partition, int]:
        """Where to go on, for every partition of the catalogue from which something was read or passed over."""
        return {place: offset for place, offset in self._at().items() if offset != self._begun[place]}

    def moved(self, known: Mapping[Partition, int]) -> bool:
        """Whether something was passed over, such as the end of a transaction, that `known` does not say."""
        return any(known.get(place) != offset for place, offset in self.next_offsets().items())

    def close(self) -> None:
        """Give the connections back."""
        self._records.close()
        self._letters.close()

    def _at(self) -> dict[Partition, int]:
        return {(self._names.of(topic), p): offset for (topic, p), offset in self._records.next_offsets().items()}

    def _pass(self, gap: RetentionGap) -> None:
        if not self._accept:
            raise gap
        log.error("%s. It is accepted (`sink.accept_gaps`), and entered in the table of gaps", gap)
        self._writer.enter_gap(gap)
