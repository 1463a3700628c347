"""Rows into tables, each exactly once, however often the sink is killed.

Why it holds: within a table the rows of a partition are inserted in offset order, one insert is one block, and a block
is there or it is not. So the highest offset in a table is exactly how far that table got, and a row at or below it is
never inserted again. The restart point of a partition is written after its rows, so it is never ahead of any table: it
only saves reading the log again from its beginning. No Kafka commit takes part.

What must not be there is left out of the inserts and deleted before the restart point moves: a crash repeats a deletion
and never forgets one. Where a deletion takes a table's highest offsets away, only rows that are to be left out or
deleted again can be read again. Two things order a deletion. An ERASE request takes every row of its user that dates
from before it, and what others said about their interactions; a tombstone takes the older rows of its own key. In any
order of reading, also when the log is read again from its beginning, this stays true: a row that dates from before its
user's newest ERASE is not written. A row dates from the earlier of its event time and its time in the log.

Members of online batches are no rows of a user: a pseudonym, a reward and a reference stay there, so that it can be
told which versions learnt from them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidemill.consumers.sink.columns import INTEGER, NAME, PARTITION, arrow_table
from tidemill.consumers.sink.config import FLUSH_BYTES, MergeSettings, TableEngine
from tidemill.consumers.sink.rows import DeadLetter, DeletedKey, Row, cut
from tidemill.consumers.sink.tables import GAPS, OWN_TABLES, WATERMARKS, table_settings, tables
from tidemill.schemas.catalogue import CATALOGUE, Topic
from tidemill.schemas.log.client_settings import Partition
from tidemill.schemas.log.guard import RetentionGap
from tidemill.schemas.records import Feedback, Interaction, Outcome, UserRequest, UserWish

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

INSERT_SETTINGS = {"async_insert": 0, "max_insert_threads": 1, "wait_end_of_query": 1}
DELETE_SETTINGS = "mutations_sync = 2"
"""A deletion has rewritten the parts that held the rows when it returns: nothing is merely hidden."""


@dataclass
class TableProgress:
    """How far each table and each partition got: decides what is still to be written."""

    highest: dict[tuple[str, Partition], int] = field(default_factory=dict)
    """Highest offset in a table, by table and place."""
    next_offsets: dict[Partition, int] = field(default_factory=dict)
    """Where reading starts again."""

    def missing(self, table: str, rows: Iterable[Row]) -> list[Row]:
        """The rows that `table` does not hold yet, ordered by place and offset."""
        fresh = (r for r in rows if r.offset > self.highest.get((table, (r.topic, r.partition)), -1))
        return sorted(fresh, key=lambda r: (r.topic, r.partition, r.offset))

    def wrote(self, table: str, rows: Iterable[Row]) -> None:
        for row in rows:
            key = (table, (row.topic, row.partition))
            if row.offset > self.highest.get(key, -1):
                self.highest[key] = row.offset


def insert_token(rows: Sequence[Row]) -> str:
    """Names a block by what it holds, `topic:partition:first-last`, so that its retry is recognised."""
    ranges: dict[Partition, list[int]] = defaultdict(list)
    for row in rows:
        ranges[row.topic, row.partition].append(row.offset)
    return ";".join(f"{topic}:{p}:{min(o)}-{max(o)}" for (topic, p), o in sorted(ranges.items()))


EVENT_TIMES: Mapping[type, str] = {Interaction: "served_at", Feedback: "observed_at", Outcome: "served_at"}
"""Record types that belong to a user, and the field that dates them."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """Rows of one table that must go: a condition in SQL, with its parameters."""

    table: str
    condition: str
    parameters: dict[str, Any] = field(default_factory=dict)


class Erasures:
    """The newest ERASE of each user."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def observe(self, record: object) -> None:
        """Take a request in; anything else is let pass. The same one twice changes nothing."""
        if isinstance(record, UserRequest) and record.wish is UserWish.ERASE:
            self._before[record.user_id] = max(record.at, self._before.get(record.user_id, record.at))

    def hides(self, row: Row) -> bool:
        """Whether a row is of an erased user and dates from before their request."""
        event_time = EVENT_TIMES.get(type(row.record))
        if event_time is None:
            return False
        before = self._before.get(row.record.user_id)  # type: ignore[union-attr]  # the types of EVENT_TIMES have it
        return before is not None and min(getattr(row.record, event_time), 1000 * row.timestamp_ms) <= before


def of_user(request: UserRequest, database: str) -> Iterator[Deletion]:
    """The deletions that an ERASE orders, in order: records about the user's interactions go before these do."""

    def theirs(record_type: type) -> str:
        event_time = f"toUnixTimestamp64Micro({EVENT_TIMES[record_type]})"
        return f"user_id = %(user)s AND least({event_time}, 1000 * toUnixTimestamp64Milli(_timestamp)) <= %(at)s"

    parameters = {"user": request.user_id, "at": request.at}
    served = tables()[Interaction].name
    served_to_user = f"SELECT interaction_id FROM `{database}`.`{served}` WHERE {theirs(Interaction)}"
    for record_type in (Feedback, Outcome):
        condition = f"({theirs(record_type)}) OR interaction_id IN ({served_to_user})"
        yield Deletion(tables()[record_type].name, condition, parameters)
    yield Deletion(tables()[DeadLetter].name, f"splitByChar('/', _key)[1] IN ({served_to_user})", parameters)
    yield Deletion(served, theirs(Interaction), parameters)


def of_tombstones(rows: Iterable[Row]) -> Iterator[Deletion]:
    """The deletions that tombstones order: older rows of the same key in the same partition."""
    newest: dict[tuple[Topic, Partition], dict[str, int]] = defaultdict(dict)
    for row in rows:
        if isinstance(row.record, DeletedKey):
            # Keys are bytes of anybody's making; as hexadecimal digits they pass through SQL unharmed.
            newest[row.record.topic, (row.topic, row.partition)][row.key.hex().upper()] = row.offset
    for (topic, (full, partition)), ends in newest.items():
        yield Deletion(
            tables()[CATALOGUE[topic].values[0]].name,
            "_topic = %(topic)s AND _partition = %(partition)s"
            " AND _offset < transform(hex(_key), %(keys)s, %(ends)s, toInt64(-1))",
            {"topic": full, "partition": partition, "keys": list(ends), "ends": list(ends.values())},
        )


def arrow_file(data: pa.Table, compression: str | None = None) -> memoryview:
    """A table as an Arrow file. Its size is found first: a buffer that grows is copied as often as it grows."""
    options = pa.ipc.IpcWriteOptions(compression=compression)

    def write(sink: pa.NativeFile) -> None:
        with pa.ipc.new_file(sink, data.schema, options=options) as file:
            file.write_table(data)

    size = pa.MockOutputStream()
    write(size)
    buffer = pa.allocate_buffer(size.size())
    write(pa.FixedSizeBufferWriter(buffer))
    return memoryview(buffer)


@cache
def leave_pandas_out() -> None:
    """Keep pyarrow from importing pandas at the first list that it is given: a third of a second for nothing here.

    It looks once a process, and again where somebody asks for a data frame.
    """
    if "pandas" not in sys.modules:
        sys.modules["pandas"] = None  # type: ignore[assignment]  # as if it were not installed
        try:
            pa.array([None])
        except AttributeError:  # of the module, which it takes for one all the same; it does not look again
            return
        finally:
            del sys.modules["pandas"]


class Writer:
    """The one writer of the tables.

    Args:
        erasures: what is known of erased users from the start; the rows themselves add to it.
        insert_bytes: of record values that one insert holds at most, a longer record aside.
        merges: what a merge of a table's parts holds at once; tables of other settings are changed.
    """

    def __init__(
        self,
        client: Client,
        database: str,
        engine: TableEngine,
        erasures: Erasures | None = None,
        *,
        insert_bytes: int = FLUSH_BYTES,
        merges: MergeSettings | None = None,
    ) -> None:
        leave_pandas_out()
        self._client = client
        self._database = database
        self._erasures = erasures or Erasures()
        self._carried_out: dict[str, int] = {}
        self._insert_bytes = insert_bytes
        self._create(engine, merges or MergeSettings())
        self._progress = TableProgress()
        for table in tables().values():
            found = client.query(
                f"SELECT _topic, _partition, max(_offset) FROM `{database}`.`{table.name}` GROUP BY ALL"
            ).result_rows
            self._progress.highest.update({(table.name, (topic, p)): offset for topic, p, offset in found})
        marks = client.query(
            f"SELECT _topic, _partition, max(next_offset) FROM `{database}`.`{WATERMARKS}` GROUP BY ALL"
        ).result_rows
        self._progress.next_offsets.update({(topic, p): offset for topic, p, offset in marks})

    @property
    def next_offsets(self) -> Mapping[Partition, int]:
        """Where each partition is to be read from; partitions not named, from their beginning."""
        return self._progress.next_offsets

    def write(self, rows: Sequence[Row], next_offsets: Mapping[Partition, int]) -> int:
        """Insert what the tables lack of `rows`, delete what these order, then move the restart points.

        Returns the number of rows inserted.
        """
        for row in rows:
            self._erasures.observe(row.record)
        by_type: dict[type, list[Row]] = defaultdict(list)
        for row in rows:
            if not isinstance(row.record, DeletedKey) and not self._erasures.hides(row):
                by_type[type(row.record)].append(row)
        written = 0
        for record_type, some in by_type.items():
            table = tables()[record_type]
            missing = self._progress.missing(table.name, some)
            for part in cut(missing, self._insert_bytes):
                self._insert_arrow(table.name, arrow_table(table.columns, part), insert_token(part))
                self._progress.wrote(table.name, part)
            written += len(missing)
        for row in rows:
            # Each partition has a copy of a request; the first one that is read has it carried out.
            request = row.record
            if not isinstance(request, UserRequest) or request.wish is not UserWish.ERASE:
                continue
            if self._carried_out.get(request.user_id, -1) < request.at:
                self._delete(of_user(request, self._database))
                self._carried_out[request.user_id] = request.at
        self._delete(of_tombstones(rows))
        moved = {p: o for p, o in next_offsets.items() if self._progress.next_offsets.get(p) != o}
        if moved:
            topics, partitions = zip(*moved, strict=True)
            columns = [NAME.array(topics), PARTITION.array(partitions), INTEGER.array(list(moved.values()))]
            data = pa.Table.from_arrays(columns, names=["_topic", "_partition", "next_offset"])
            self._insert_arrow(WATERMARKS, data, "")
            self._progress.next_offsets.update(moved)
        return written

    def enter_gap(self, gap: RetentionGap) -> None:
        """Enter records that no table will hold; the same gap twice is one."""
        columns = [
            NAME.array([gap.topic]),
            PARTITION.array([gap.partition]),
            INTEGER.array([gap.wanted]),
            INTEGER.array([gap.first]),
        ]
        data = pa.Table.from_arrays(columns, names=["_topic", "_partition", "first_offset", "end_offset"])
        self._insert_arrow(GAPS, data, "")

    def _delete(self, deletions: Iterable[Deletion]) -> None:
        for deletion in deletions:
            table, where = f"`{self._database}`.`{deletion.table}`", deletion.condition
            found = self._client.query(f"SELECT count() FROM {table} WHERE {where}", parameters=deletion.parameters)
            # A mutation rewrites parts, even where it deletes nothing from them.
            if found.result_rows[0][0]:
                statement = f"ALTER TABLE {table} DELETE WHERE {where} SETTINGS {DELETE_SETTINGS}"
                self._client.command(statement, parameters=deletion.parameters)

    def _insert_arrow(self, table: str, data: pa.Table, token: str) -> None:
        settings: dict[str, Any] = {**INSERT_SETTINGS, "max_insert_block_size": max(len(data), 1)}
        if token:
            settings["insert_deduplication_token"] = token
        # On its way to a server; the embedded engine asks for none.
        compression = self._client.write_compression if self._client.write_compression in ("lz4", "zstd") else None
        file, full = arrow_file(data.combine_chunks(), compression), f"`{self._database}`.`{table}`"
        self._client.raw_insert(full, data.schema.names, file, settings, "Arrow")

    def _create(self, engine: TableEngine, merges: MergeSettings) -> None:
        """Create the tables; give those of an older release the columns of a newer schema, and other merges."""
        database, command = self._database, self._client.command
        command(f"CREATE DATABASE IF NOT EXISTS `{database}`")
        for name, definition in OWN_TABLES.items():
            command(f"CREATE TABLE IF NOT EXISTS `{database}`.`{name}`\n{definition}")
        for table in tables().values():
            command(table.create(database, engine, merges))
            listed = self._client.query(f"DESCRIBE TABLE `{database}`.`{table.name}`").result_rows
            present = {row[0]: row[1] for row in listed}
            for column in table.all_columns:
                name, kind = column.name, column.type
                if name not in present:
                    command(f"ALTER TABLE `{database}`.`{table.name}` ADD COLUMN IF NOT EXISTS `{name}` {kind}")
                elif present[name] != kind:
                    raise RuntimeError(
                        f"{database}.{table.name}: column {name} is {present[name]} and the schema wants {kind}: give "
                        "the sink another `database`, and it reads the log into fresh tables"
                    )
        listed = self._client.query(
            "SELECT name, engine_full FROM system.tables WHERE database = {database:String}",
            parameters={"database": database},
        ).result_rows
        said = {name: set(full.partition("SETTINGS ")[2].split(", ")) for name, full in listed}
        for table in tables().values():
            if not said[table.name].issuperset(table_settings(merges)):
                command(f"ALTER TABLE `{database}`.`{table.name}` MODIFY SETTING {', '.join(table_settings(merges))}")
