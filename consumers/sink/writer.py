"""Rows into tables, each exactly once, however often the sink is killed.

Why it holds: within a table the rows of a partition are inserted in offset order, one insert is one block, and a block
is there or it is not. So the highest offset in a table is exactly how far that table got, and a row at or below it is
never inserted again. The restart point of a partition is written after its rows, so it is never ahead of any table: it
only saves reading the log again from its beginning. No Kafka commit takes part.

What must not be there (`erasure`) is left out of the inserts and deleted before the restart point moves: a crash
repeats a deletion and never forgets one. Where a deletion takes a table's highest offsets away, only rows that are to
be left out or deleted again can be read again.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidemill.consumers.sink.columns import INTEGER, NAME, PARTITION, arrow_table
from tidemill.consumers.sink.config import FLUSH_BYTES, MergeSettings, TableEngine
from tidemill.consumers.sink.erasure import Deletion, Erasures, of_tombstones, of_user, requested
from tidemill.consumers.sink.rows import DeletedKey, Row, cut
from tidemill.consumers.sink.tables import (
    GAPS,
    WATERMARKS,
    Table,
    create_gaps,
    create_watermarks,
    table_settings,
    tables,
)
from tidemill.schemas.log.consumed import Partition
from tidemill.schemas.log.guard import RetentionGap

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
        """`rows` are in `table`."""
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


def arrow_file(data: pa.Table) -> memoryview:
    """A table as an Arrow file. Its size is found first: a buffer that grows is copied as often as it grows."""

    def write(sink: pa.NativeFile) -> None:
        with pa.ipc.new_file(sink, data.schema) as file:
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
        except AttributeError:
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
        self._progress = self._read_progress()

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
        self._erase(rows)
        self._mark(next_offsets)
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

    def _erase(self, rows: Sequence[Row]) -> None:
        for request in requested(rows):
            # Each partition has a copy of the request; the first one that is read has it carried out.
            if self._carried_out.get(request.user_id, -1) < request.at:
                for deletion in of_user(request, self._database):
                    self._delete(deletion)
                self._carried_out[request.user_id] = request.at
        for deletion in of_tombstones(rows):
            self._delete(deletion)

    def _delete(self, deletion: Deletion) -> None:
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
        full = f"`{self._database}`.`{table}`"
        self._client.raw_insert(full, data.schema.names, arrow_file(data.combine_chunks()), settings, "Arrow")

    def _mark(self, next_offsets: Mapping[Partition, int]) -> None:
        moved = {p: o for p, o in next_offsets.items() if self._progress.next_offsets.get(p) != o}
        if not moved:
            return
        columns = [
            NAME.array([topic for topic, _ in moved]),
            PARTITION.array([partition for _, partition in moved]),
            INTEGER.array(list(moved.values())),
        ]
        data = pa.Table.from_arrays(columns, names=["_topic", "_partition", "next_offset"])
        self._insert_arrow(WATERMARKS, data, "")
        self._progress.next_offsets.update(moved)

    def _create(self, engine: TableEngine, merges: MergeSettings) -> None:
        self._client.command(f"CREATE DATABASE IF NOT EXISTS `{self._database}`")
        self._client.command(create_watermarks(self._database))
        self._client.command(create_gaps(self._database))
        for table in tables().values():
            self._client.command(table.create(self._database, engine, merges))
            self._migrate(table)
        self._set_merges(merges)

    def _set_merges(self, merges: MergeSettings) -> None:
        listed = self._client.query(
            "SELECT name, engine_full FROM system.tables WHERE database = {database:String}",
            parameters={"database": self._database},
        ).result_rows
        said = {name: set(full.partition("SETTINGS ")[2].split(", ")) for name, full in listed}
        for table in tables().values():
            if not said[table.name].issuperset(table_settings(merges)):
                self._client.command(table.change(self._database, merges))

    def _migrate(self, table: Table) -> None:
        """Add the columns that a newer schema has; refuse a table whose columns have other types."""
        listed = self._client.query(f"DESCRIBE TABLE `{self._database}`.`{table.name}`").result_rows
        present = {row[0]: row[1] for row in listed}
        for column in table.all_columns:
            if column.name not in present:
                self._client.command(table.add(self._database, column))
            elif present[column.name] != column.type:
                raise RuntimeError(
                    f"{self._database}.{table.name}: column {column.name} is {present[column.name]} and the schema "
                    f"wants {column.type}: give the sink another `database`, and it reads the log into fresh tables"
                )

    def _read_progress(self) -> TableProgress:
        progress = TableProgress()
        for table in tables().values():
            found = self._client.query(
                f"SELECT _topic, _partition, max(_offset) FROM `{self._database}`.`{table.name}` GROUP BY ALL"
            )
            progress.highest.update({(table.name, (t, p)): offset for t, p, offset in found.result_rows})
        marks = self._client.query(
            f"SELECT _topic, _partition, max(next_offset) FROM `{self._database}`.`{WATERMARKS}` GROUP BY ALL"
        )
        progress.next_offsets.update({(topic, partition): offset for topic, partition, offset in marks.result_rows})
        return progress
