"""Writes rows to tables, each exactly once, even if the sink is killed at any time.

Reason: within a table the rows of a partition are inserted in offset order, one insert is one block, and a block is
written whole or not at all. So the highest offset in a table is the exact progress of that table, and a row at or below
it is never inserted again. The restart offset of a partition is written after its rows, so it is never ahead of any
table: it only avoids reading the log again from its beginning. No Kafka commit is involved.

Rows that must not be stored are left out of the inserts and deleted before the restart offset moves: a crash repeats a
deletion and never skips one. If a deletion removes a table's highest offsets, only rows that are left out or deleted
again can be read again. Two kinds of records cause deletions. An ERASE request deletes every row of its user that dates
from before it, and the records of other users about their interactions; a tombstone deletes the older rows of its key.
Invariant, in any order of reading, also if the log is read again from its beginning: a row that dates from before its
user's newest ERASE is not written. A row dates from the earlier of its event time and its time in the log.

Members of online batches are not rows of a user: a pseudonym, a reward and a reference remain there, to show which
versions learnt from them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidemill.consumers.sink.columns import INTEGER, NAME, PARTITION, POSITION, Column, Gathered
from tidemill.consumers.sink.config import FLUSH_BYTES, MergeSettings, TableEngine
from tidemill.consumers.sink.erasures import EVENT_TIMES, Erasures
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
"""When a deletion returns, the parts with the rows have been rewritten: the rows are not just hidden."""


Deletion = tuple[str, str, dict[str, Any]]
"""Rows to delete: their table, a condition in SQL, and its parameters."""


def of_user(request: UserRequest, database: str) -> Iterator[Deletion]:
    """Yield the deletions for an ERASE, in order: records about the user's interactions before the interactions."""

    def theirs(record_type: type) -> str:
        event_time = f"toUnixTimestamp64Micro({EVENT_TIMES[record_type]})"
        return f"user_id = %(user)s AND least({event_time}, 1000 * toUnixTimestamp64Milli(_timestamp)) <= %(at)s"

    parameters = {"user": request.user_id, "at": request.at}
    served = tables()[Interaction].name
    served_to_user = f"SELECT interaction_id FROM `{database}`.`{served}` WHERE {theirs(Interaction)}"
    for record_type in (Feedback, Outcome):
        condition = f"({theirs(record_type)}) OR interaction_id IN ({served_to_user})"
        yield tables()[record_type].name, condition, parameters
    yield tables()[DeadLetter].name, f"splitByChar('/', _key)[1] IN ({served_to_user})", parameters
    yield served, theirs(Interaction), parameters


def of_tombstones(rows: Iterable[Row]) -> Iterator[Deletion]:
    """Yield the deletions for tombstones: older rows of the same key in the same partition."""
    newest: dict[tuple[Topic, Partition], dict[str, int]] = defaultdict(dict)
    for row in rows:
        if isinstance(row.record, DeletedKey):
            # Keys are arbitrary, untrusted bytes; hexadecimal digits are safe in SQL.
            newest[row.record.topic, (row.topic, row.partition)][row.key.hex().upper()] = row.offset
    for (topic, (full, partition)), ends in newest.items():
        yield (
            tables()[CATALOGUE[topic].values[0]].name,
            "_topic = %(topic)s AND _partition = %(partition)s"
            " AND _offset < transform(hex(_key), %(keys)s, %(ends)s, toInt64(-1))",
            {"topic": full, "partition": partition, "keys": list(ends), "ends": list(ends.values())},
        )


def arrow_table(columns: Sequence[Column], rows: Sequence[Row]) -> pa.Table:
    """Return rows as one Arrow table: position first, then the record's columns."""
    places, records = Gathered(rows), Gathered([row.record for row in rows])
    arrays = [*(c.build(places) for c in POSITION), *(c.build(records) for c in columns)]
    return pa.Table.from_arrays(arrays, names=[c.name for c in (*POSITION, *columns)])


def arrow_file(data: pa.Table, compression: str | None = None) -> memoryview:
    """Return a table as an Arrow file. Its size is computed first: a growing buffer would be copied at each growth."""
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
    """Prevent pyarrow from importing pandas at the first list that it converts: an unnecessary third of a second.

    It looks for pandas once per process, and again if a data frame is requested.
    """
    if "pandas" not in sys.modules:
        sys.modules["pandas"] = None  # type: ignore[assignment]  # as if it were not installed
        try:
            pa.array([None])
        except AttributeError:  # pyarrow takes the entry for the pandas module; it does not look again
            return
        finally:
            del sys.modules["pandas"]


class Writer:
    """The only writer of the tables.

    Args:
        erasures: the erasures known at the start; the rows add to them.
        insert_bytes: maximum bytes of record values in one insert; a longer record is inserted alone.
        merges: limits of a merge of a table's parts; tables with other settings are changed.
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
        self._highest: dict[tuple[str, Partition], int] = {}
        """Highest offset in a table, by table and partition."""
        for table in tables().values():
            found = client.query(
                f"SELECT _topic, _partition, max(_offset) FROM `{database}`.`{table.name}` GROUP BY ALL"
            ).result_rows
            self._highest.update({(table.name, (topic, p)): offset for topic, p, offset in found})
        marks = client.query(
            f"SELECT _topic, _partition, max(next_offset) FROM `{database}`.`{WATERMARKS}` GROUP BY ALL"
        ).result_rows
        self.next_offsets: dict[Partition, int] = {(topic, p): offset for topic, p, offset in marks}
        """The offset from which each partition is read; other partitions are read from their beginning."""

    def write(self, rows: Sequence[Row], next_offsets: Mapping[Partition, int]) -> int:
        """Insert the `rows` that the tables do not contain, apply the deletions that they cause, then move the offsets.

        Returns the number of rows inserted.
        """
        erased = self._erasures.observe_rows(rows)
        by_type: dict[type, list[Row]] = defaultdict(list)
        for row in rows:
            if not isinstance(row.record, DeletedKey) and not self._erasures.hides(row):
                by_type[type(row.record)].append(row)
        written = 0
        for record_type, some in by_type.items():
            table = tables()[record_type]
            missing = [r for r in some if r.offset > self._highest.get((table.name, (r.topic, r.partition)), -1)]
            missing.sort(key=lambda r: (r.topic, r.partition, r.offset))
            for part in cut(missing, self._insert_bytes):
                self._insert_arrow(table.name, arrow_table(table.columns, part))
                # The last row of a partition has the highest offset.
                self._highest.update({(table.name, (r.topic, r.partition)): r.offset for r in part})
            written += len(missing)
        for row in rows:
            # Each partition has a copy of a request; the first one that is read causes the deletions.
            request = row.record
            if not isinstance(request, UserRequest) or request.wish is not UserWish.ERASE:
                continue
            if self._carried_out.get(request.user_id, -1) < request.at:
                self._delete(of_user(request, self._database))
                self._carried_out[request.user_id] = request.at
        self._delete(of_tombstones(rows))
        if erased:
            about = "hex(splitByChar('/', _key)[1]) IN %(ids)s"
            ids = [name.hex().upper() for name in erased]
            self._delete([(tables()[DeadLetter].name, about, {"ids": ids})])
        moved = {p: o for p, o in next_offsets.items() if self.next_offsets.get(p) != o}
        if moved:
            topics, partitions = zip(*moved, strict=True)
            columns = [NAME.array(topics), PARTITION.array(partitions), INTEGER.array(list(moved.values()))]
            data = pa.Table.from_arrays(columns, names=["_topic", "_partition", "next_offset"])
            self._insert_arrow(WATERMARKS, data)
            self.next_offsets.update(moved)
        return written

    def held_interactions(self, ids: Collection[bytes]) -> set[bytes]:
        """Return those of the interactions `ids` that the tables hold."""
        if not ids:
            return set()
        found = self._client.query(
            f"SELECT DISTINCT hex(interaction_id) FROM `{self._database}`.`{tables()[Interaction].name}`"
            " WHERE hex(interaction_id) IN %(ids)s",
            parameters={"ids": [name.hex().upper() for name in ids]},
        ).result_rows
        return {bytes.fromhex(name) for (name,) in found}

    def enter_gap(self, gap: RetentionGap) -> None:
        """Store a gap: records that no table will contain. A repeated gap is stored once."""
        columns = [
            NAME.array([gap.topic]),
            PARTITION.array([gap.partition]),
            INTEGER.array([gap.wanted]),
            INTEGER.array([gap.first]),
        ]
        data = pa.Table.from_arrays(columns, names=["_topic", "_partition", "first_offset", "end_offset"])
        self._insert_arrow(GAPS, data)

    def _delete(self, deletions: Iterable[Deletion]) -> None:
        for name, where, parameters in deletions:
            table = f"`{self._database}`.`{name}`"
            found = self._client.query(f"SELECT count() FROM {table} WHERE {where}", parameters=parameters)
            # A mutation rewrites parts even if it deletes nothing from them.
            if found.result_rows[0][0]:
                statement = f"ALTER TABLE {table} DELETE WHERE {where} SETTINGS {DELETE_SETTINGS}"
                self._client.command(statement, parameters=parameters)

    def _insert_arrow(self, table: str, data: pa.Table) -> None:
        settings: dict[str, Any] = {**INSERT_SETTINGS, "max_insert_block_size": max(len(data), 1)}
        # Compression is for a server; the embedded engine uses none.
        compression = self._client.write_compression if self._client.write_compression in ("lz4", "zstd") else None
        file, full = arrow_file(data.combine_chunks(), compression), f"`{self._database}`.`{table}`"
        self._client.raw_insert(full, data.schema.names, file, settings, "Arrow")

    def _create(self, engine: TableEngine, merges: MergeSettings) -> None:
        """Create the tables; add the columns of a newer schema and the settings to those of an older release."""
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
        declared = {name: set(full.partition("SETTINGS ")[2].split(", ")) for name, full in listed}
        for table in tables().values():
            if not declared[table.name].issuperset(table_settings(merges)):
                command(f"ALTER TABLE `{database}`.`{table.name}` MODIFY SETTING {', '.join(table_settings(merges))}")
