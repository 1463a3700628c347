"""The sink's process: reads every topic and dead-letter topic, writes the tables, and answers queries.

Invariant: if the log deleted records before the sink had read them, the sink exits, or it writes the gap to a table
before any later record.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager

import pyarrow as pa
from clickhouse_connect.driver.exceptions import ClickHouseError

from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
from tidemill.consumers.sink.erasures import PRODUCT, Erasures, erased_interactions, interaction_of, known_erasures
from tidemill.consumers.sink.http_api import query_server
from tidemill.consumers.sink.query import STATE_FILE, QueryFailed, SinkState, write_state
from tidemill.consumers.sink.rows import DeadLetter, DeadLetterReader, Row, row_of
from tidemill.consumers.sink.writer import Writer
from tidemill.schemas.catalogue import CATALOGUE, Names
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.client_settings import Partition
from tidemill.schemas.log.guard import RetentionGap
from tidemill.schemas.log.liveness import Liveness
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.shutdown import stop_on_signals

log = logging.getLogger(__name__)
POLL_S = 0.1
READ_ROWS = 100
"""Maximum records of one read: a batch may exceed its limit by this number, and by the dead letters of one read."""
FLUSH_S = 900.0
"""Maximum duration of a flush; after it the process counts as hung. The engine's own timeouts are shorter."""


class Source:
    """Reads every topic of the catalogue and its dead letters, as rows.

    Raises RetentionGap, here and in `read`, unless the settings accept gaps.
    """

    def __init__(self, kafka: KafkaSettings, sink: SinkSettings, writer: Writer) -> None:
        self._names = Names(kafka.topic_prefix)
        self._accept = sink.accept_gaps
        self._writer = writer
        full = {self._names.of(topic): topic for topic in CATALOGUE}
        while True:
            places = writer.next_offsets
            start = {(full[name], partition): offset for (name, partition), offset in places.items() if name in full}
            try:
                self._records = LogReader(kafka, list(CATALOGUE), start=start, client_id="tidemill-sink")
                break
            except RetentionGap as gap:
                self._pass(gap)
                writer.write([], {(gap.topic, gap.partition): gap.first})
        self._first_ends = self._at()
        deleted = {place: at for place, at in self._first_ends.items() if at and place not in writer.next_offsets}
        for (topic, partition), first in deleted.items():
            log.warning("%s[%d]: the log begins at offset %d: earlier records are a gap", topic, partition, first)
            writer.enter_gap(RetentionGap(topic, partition, 0, first))
        writer.write([], deleted)
        self._letters = DeadLetterReader(kafka, writer.next_offsets)

    def read(self, limit: int) -> list[Row]:
        """Return the next rows: at most `limit` records, and some dead letters."""
        rows = []
        try:
            found = self._records.poll(POLL_S, limit)
            rows += [row_of(located, self._names, CATALOGUE[located.topic].values) for located in found]
            rows += self._letters.poll(0)
        except RetentionGap as gap:
            self._pass(gap)
        return rows

    def next_offsets(self) -> dict[Partition, int]:
        """Return the next offset of every partition of the catalogue from which something was read or skipped."""
        return {place: offset for place, offset in self._at().items() if offset != self._first_ends[place]}

    def moved(self, known: Mapping[Partition, int]) -> bool:
        """Whether offsets were read or skipped, such as the end of a transaction, that `known` does not include."""
        return any(known.get(place) != offset for place, offset in self.next_offsets().items())

    def close(self) -> None:
        self._records.close()
        self._letters.close()

    def _at(self) -> dict[Partition, int]:
        return {(self._names.of(topic), p): offset for (topic, p), offset in self._records.next_offsets().items()}

    def _pass(self, gap: RetentionGap) -> None:
        if not self._accept:
            raise gap
        log.error("%s. It is accepted (`sink.accept_gaps`), and entered in the table of gaps", gap)
        self._writer.enter_gap(gap)


def run(kafka: KafkaSettings, run: RunSettings, sink: SinkSettings) -> None:
    """Fill the tables until SIGTERM or SIGINT, then write the rows that were read and close.

    Every run of the prefix is stored; `run` is the one that the log lines name.

    Raises:
        QueryFailed: the tables cannot be opened or written; another process has the embedded engine's directory open.
        OSError: the HTTP port cannot be bound.
        LookupError: a topic does not exist, or the log lost the offset to continue from (see `sink.accept_gaps`).
    """
    stop = stop_on_signals()
    with ExitStack() as stack:
        erasures = known_erasures(kafka)
        writer, url = stack.enter_context(open_tables(sink, erasures))
        names, searched = Names(kafka.topic_prefix), set[bytes]()
        about_answers = {name(topic) for topic in PRODUCT for name in (names.of, names.dead_letter)}

        def search_erased(found: Iterable[Row]) -> None:
            """Learn which interactions of dead letters were erased before this process began: it reads no tombstone of
            them. The log is searched once for each of them, unless the tables hold it."""
            if not erasures.before:
                return
            times = [
                (row.key, row.record.source_timestamp_ms)
                for row in found
                if isinstance(row.record, DeadLetter)
                and row.topic in about_answers
                and interaction_of(row.key) not in searched
            ]
            ids = {interaction_of(key) for key, _ in times}
            held = writer.held_interactions(ids)
            missing = ((key, written_ms) for key, written_ms in times if interaction_of(key) not in held)
            erasures.interactions |= erased_interactions(kafka, missing, erasures)
            searched.update(ids)

        if erasures.before:
            with DeadLetterReader(kafka, writer.next_offsets, PRODUCT, gaps=True) as reader:
                search_erased(reader.read_to_end())
        log.info("sink of run %s: tables in %s, queries at %s", run.run_id, sink.host or sink.directory, url)
        liveness = stack.enter_context(Liveness("the sink", kafka.stall_timeout_s))
        source = stack.enter_context(closing(Source(kafka, sink, writer)))
        rows, opened_at = list[Row](), 0.0

        def flush() -> None:
            liveness.beat(f"writing {len(rows)} rows", within_s=FLUSH_S)
            search_erased(rows)
            read = {(row.topic, row.partition): row.offset + 1 for row in rows}
            written = writer.write(rows, {**read, **source.next_offsets()})
            if written:
                log.debug("wrote %d rows", written)
            rows.clear()
            release_unused_memory()

        while not stop.is_set():
            liveness.beat("reading")
            found = source.read(min(READ_ROWS, sink.flush_rows))
            now = time.monotonic()
            opened_at = opened_at if rows else now
            rows += found
            full = len(rows) >= sink.flush_rows or sum(row.n_bytes for row in rows) >= sink.flush_bytes
            is_due = full or now - opened_at >= sink.flush_seconds
            if (rows and is_due) or (not rows and source.moved(writer.next_offsets)):
                flush()
        flush()


@contextmanager
def open_tables(sink: SinkSettings, erasures: Erasures | None = None) -> Iterator[tuple[Writer, str]]:
    """Open the tables; yield their only writer, and the address that answers queries, which is in the state file.

    Tables of an older release get the new columns and topics, since the named queries refer to all of them.
    Raises QueryFailed, OSError.
    """
    try:
        with closing(connect(sink)) as client, ExitStack() as stack:
            writer = Writer(
                client, sink.database, sink.table_engine, erasures, insert_bytes=sink.flush_bytes, merges=sink.merges
            )
            url = sink.server_url  # a server answers queries itself
            if sink.embedded:
                url = stack.enter_context(query_server(sink)).url
                write_state(sink.directory, SinkState(os.getpid(), url, sink.database))
                stack.callback((sink.directory / STATE_FILE).unlink, missing_ok=True)
            yield writer, url
    except ClickHouseError as error:
        raise QueryFailed(f"ClickHouse failed: {error}") from error


def release_unused_memory() -> None:
    """Return freed memory to the system; only Arrow's if the C library is not GNU's.

    Arrow's pool and the C library keep freed memory for later use, the latter for each thread that ever allocated: a
    process that reads, writes and answers in several threads would keep the memory of several flushes.
    """
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
