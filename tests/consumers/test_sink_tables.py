"""The tables and the schemas: every field has a column, values are read as they were written, each row once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.consumers.sink_support import PREFIX, rollout, rows_of, small_run, topic_of
from tests.generated import KEY, VALUE, records_of
from tidemill.consumers.sink.columns import Column, list_array, packed_lists, record_columns, schema_columns
from tidemill.consumers.sink.config import MergeSettings, SinkSettings, TableEngine
from tidemill.consumers.sink.engine import ALLOCATOR, connect, engine_options
from tidemill.consumers.sink.erasures import Erasures
from tidemill.consumers.sink.rows import DeadLetter, cut, row_of
from tidemill.consumers.sink.service import release_unused_memory
from tidemill.consumers.sink.tables import tables
from tidemill.consumers.sink.writer import Writer
from tidemill.schemas.catalogue import CATALOGUE, Names, Topic
from tidemill.schemas.codec import RECORD_TYPES, current_schema
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Document, Rollout, Segment, VersionSpan

PLACES = count()
"""A separate partition for every example."""
PACKED = {"token_ids": "<u4", "loss_mask": "u1", "logprobs": "<f4"}
STORABLE: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**62), 2**62),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(st.characters(codec="utf-8"), max_size=12),
}
OF_MAPS = {
    (KEY, str): st.text(st.characters(codec="ascii"), max_size=12),
    (VALUE, float): st.floats(-(2.0**62), 2.0**62),
}


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    n = draw(st.integers(0, 40))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = generator.integers(0, 2**32, n, dtype=np.uint32).astype("<u4").tobytes()
    mask = generator.integers(0, 2, n, dtype=np.uint8).tobytes()
    logprobs = generator.normal(size=n).astype("<f4").tobytes()
    return Segment(n, ids, mask, logprobs, draw(st.lists(records_of(VersionSpan, storable), max_size=3)))


def storable(name: str, hint: Any) -> st.SearchStrategy[Any] | None:
    """Return a strategy for values that a table can hold, where not all values of the type are."""
    if name in PACKED and hint is bytes:
        # Arbitrary bytes would sometimes be a NaN, which is not equal to itself.
        return st.lists(st.integers(0, 2**20), max_size=20).map(lambda n: np.array(n, PACKED[name]).tobytes())
    if name == "at" or name.endswith("_at"):
        return st.integers(0, 4_000_000_000_000_000)
    return segments() if hint is Segment else OF_MAPS.get((name, hint), STORABLE.get(hint))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    client = connect(SinkSettings(path=str(tmp_path_factory.mktemp("engine"))))
    yield client
    client.close()


@pytest.fixture(scope="module")
def roundtrip(client: Any) -> Writer:
    return Writer(client, "roundtrip", TableEngine.MERGE_TREE, WithoutErasures())


class WithoutErasures(Erasures):
    """No erasure: a generated request would hide the generated records of its user, in this test and in later ones."""

    def observe(self, record: object) -> None:
        pass


def writer(client: Any, database: str) -> Writer:
    return Writer(client, database, TableEngine.MERGE_TREE)


def leaves(kind: Any, path: tuple[str, ...], named: dict[str, Any] | None = None) -> Iterator[str]:
    """Yield dotted paths of every scalar, bytes and map of an Avro type; `named` holds the record types seen before."""
    named = {} if named is None else named
    if isinstance(kind, str):
        kind = named.get(kind, kind)
    if isinstance(kind, list):
        for branch in kind:
            if branch != "null":
                yield from leaves(branch, path, named)
    elif isinstance(kind, dict) and kind["type"] == "array":
        yield from leaves(kind["items"], path, named)
    elif isinstance(kind, dict) and kind["type"] == "record":
        named[f"tidemill.{kind['name']}"] = kind
        for field in kind["fields"]:
            yield from leaves(field["type"], (*path, field["name"]), named)
    else:
        yield ".".join(path)


@pytest.mark.parametrize("record_type", RECORD_TYPES.values(), ids=lambda t: t.__name__)
def test_every_field_of_every_schema_has_a_column(record_type: type):
    columns = record_columns(record_type)
    assert set(leaves(current_schema(record_type), ())) <= {column.source for column in columns}
    assert len({column.name for column in columns}) == len(columns)
    assert record_type in tables()


def test_a_type_without_a_rule_is_an_error_and_not_a_missing_column():
    document = {"type": "record", "name": "X", "fields": [{"name": "a", "type": {"type": "map", "values": "string"}}]}
    with pytest.raises(TypeError, match="no column rule"):
        schema_columns(document)


def expected(record: Any, column: Column) -> Any:
    """Return a column's value by plain attribute access, token by token."""
    first, *rest = column.source.split(".")
    value = getattr(record, first)
    if column.name == f"{first}_bytes":
        return len(value)
    if not rest:
        return np.frombuffer(value, PACKED[first]).tolist() if first in PACKED else value
    if not isinstance(value, list):
        return None if value is None else getattr(value, rest[0])
    if column.name in PACKED:
        return [x for item in value for x in np.frombuffer(getattr(item, rest[0]), PACKED[column.name]).tolist()]
    if column.name == "spans.segment":
        return [place for place, item in enumerate(value) for _ in item.spans]
    inner = [getattr(item, rest[0]) for item in value]
    return inner if len(rest) == 1 else [getattr(x, rest[1]) for items in inner for x in items]


def selected(column: Column) -> str:
    name = f"`{column.name}`"
    if "DateTime64(6" not in column.type:
        return name
    if column.type.startswith("Array"):
        return f"arrayMap(at -> toUnixTimestamp64Micro(at), {name})"
    return f"toUnixTimestamp64Micro({name})"


@pytest.mark.parametrize("record_type", RECORD_TYPES.values(), ids=lambda t: t.__name__)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_records_are_read_as_they_were_written(client: Any, roundtrip: Writer, record_type: type, data: st.DataObject):
    records = data.draw(st.lists(records_of(record_type, storable), min_size=1, max_size=6))
    table, topic = tables()[record_type], topic_of(records[0])
    place = next(PLACES)
    rows = rows_of(records, partition=place)
    assert roundtrip.write(rows, {}) == len(records)
    names = ", ".join(selected(column) for column in table.columns)
    found = client.query(
        f"SELECT {names} FROM roundtrip.{table.name} WHERE _partition = {place} ORDER BY _offset"
    ).result_rows
    wanted = [tuple(expected(record, column) for column in table.columns) for record in records]
    assert [tuple(row) for row in found] == wanted
    assert rows[0].topic == Names(PREFIX).of(topic)


def test_packed_tokens_become_lists_without_python_objects():
    chunks = [np.arange(3, dtype="<u4").tobytes(), np.arange(2, dtype="<u4").tobytes()]
    lists = packed_lists(np.array([0, 12, 12, 20]), chunks, np.dtype("<u4"))
    assert lists.to_pylist() == [[0, 1, 2], [], [0, 1]]
    with pytest.raises(ValueError, match="cannot be cut"):
        list_array([0, 3, 6], lists.values)


@pytest.mark.parametrize("engine", TableEngine)
def test_rows_that_a_table_has_are_not_written_again(client: Any, engine: TableEngine):
    records = small_run()
    rows, places = rows_of(records), {("tidemill.rollouts", 0): 6}
    first = Writer(client, f"once_{engine.name}", engine)
    assert first.write(rows, places) == len(records)
    assert first.write(rows, places) == 0
    again = Writer(client, f"once_{engine.name}", engine)
    assert dict(again.next_offsets) == places
    more = rows_of([*records, Document("d", "s", "t")])
    assert again.write(more, places) == 1


def test_a_crash_between_two_tables_of_a_flush_loses_nothing(client: Any):
    rows = rows_of(small_run())
    rollouts = [row for row in rows if isinstance(row.record, Rollout)]
    writer(client, "crash").write(rollouts, {})
    restarted = writer(client, "crash")
    assert restarted.next_offsets == {}
    assert restarted.write(rows, {}) == len(rows) - len(rollouts)


def test_a_block_is_written_if_a_kill_left_only_its_deduplication_token(client: Any):
    """A table of an older release has a deduplication window; ClickHouse stores a token before its block."""
    rows = rows_of([Document("d", "s", "t")])
    older = writer(client, "tokens")
    client.command("ALTER TABLE tokens.documents MODIFY SETTING non_replicated_deduplication_window = 1000")
    older.write(rows, {})
    listed = "SELECT path FROM system.parts WHERE database = 'tokens' AND table = 'documents' AND active"
    ((part,),) = client.query(listed).result_rows
    client.command("DETACH TABLE tokens.documents")
    shutil.rmtree(part)
    client.command("ATTACH TABLE tokens.documents")
    assert writer(client, "tokens").write(rows, {}) == 1
    assert client.query("SELECT count() FROM tokens.documents").result_rows == [(1,)]


def test_an_insert_holds_no_more_than_its_bound_and_a_crash_between_two_writes_nothing_twice(
    client: Any, monkeypatch: pytest.MonkeyPatch
):
    rows = [replace(row, n_bytes=size) for row, size in zip(
        rows_of([Document(str(i), "s", "t") for i in range(6)]), (40, 40, 40, 150, 10, 10), strict=True
    )]  # fmt: skip
    assert [[row.n_bytes for row in run] for run in cut(rows, 100)] == [[40, 40], [40], [150], [10, 10]]
    assert list(cut([], 100)) == []
    inserted: list[int] = []
    raw_insert = type(client).raw_insert

    def crashing(self: Any, table: str, names: list[str], data: memoryview, *more: Any) -> Any:
        if table == "`bounded`.`documents`":
            inserted.append(pa.ipc.open_file(data).read_all().num_rows)
            if len(inserted) == 3:
                raise ConnectionError
        return raw_insert(self, table, names, data, *more)

    monkeypatch.setattr(type(client), "raw_insert", crashing)
    with pytest.raises(ConnectionError):
        Writer(client, "bounded", TableEngine.MERGE_TREE, insert_bytes=100).write(rows, {})
    assert Writer(client, "bounded", TableEngine.MERGE_TREE, insert_bytes=100).write(rows, {}) == 3
    assert inserted == [2, 1, 1, 1, 2]
    assert client.query("SELECT count() FROM bounded.documents").result_rows == [(6,)]


def test_an_insert_is_compressed_as_the_client_is_configured(client: Any, monkeypatch: pytest.MonkeyPatch):
    """A client of a server has compression on, the client of the embedded engine has it off."""
    sizes, raw_insert = list[int](), type(client).raw_insert

    def noted(self: Any, table: str, names: list[str], data: memoryview, *more: Any) -> Any:
        if table.endswith("`documents`"):
            sizes.append(len(data))
        return raw_insert(self, table, names, data, *more)

    monkeypatch.setattr(type(client), "raw_insert", noted)
    sent = writer(client, "sent")
    for number, compression in enumerate((client.write_compression, "lz4", "gzip")):
        monkeypatch.setattr(client, "write_compression", compression)
        sent.write(rows_of([Document("d", "s", "t" * 2**16)], first=number), {})
    assert client.query("SELECT length(text) FROM sent.documents").result_rows == [(2**16,)] * 3
    plain, packed, unknown = sizes
    assert packed < plain / 8 and plain == unknown > 2**16


def test_tables_of_other_merges_are_changed_and_keep_their_rows(client: Any):
    writer(client, "merged").write(rows_of([Document("d", "s", "t")]), {})
    Writer(client, "merged", TableEngine.MERGE_TREE, merges=MergeSettings(parts=3, block_bytes=2**17))
    found = client.query("SELECT name, engine_full FROM system.tables WHERE database = 'merged'").result_rows
    said = {name: full for name, full in found if not name.startswith("sink_")}
    assert len(said) == len(tables())
    assert all("max_parts_to_merge_at_once = 3" in full for full in said.values())
    assert all("merge_max_block_size_bytes = 131072" in full for full in said.values())
    assert client.query("SELECT count() FROM merged.documents").result_rows == [(1,)]


def test_wide_rows_are_merged_one_column_at_a_time(client: Any):
    """With ClickHouse's default bound, a merge of few rows holds every column in memory at once."""
    tokens = 500_000
    ids = np.random.default_rng(0).integers(0, 2**32, tokens, dtype=np.uint32).astype("<u4").tobytes()
    long = Segment(tokens, ids, b"\x01" * tokens, ids, [VersionSpan(1, 0, tokens)])
    gathered = {}
    client.command("SYSTEM STOP MERGES")  # of the tables so far, whose merges would be counted too
    for name, merges in {"ours": MergeSettings(), "theirs": MergeSettings(vertical_rows=131_072)}.items():
        one = Writer(client, name, TableEngine.MERGE_TREE, merges=merges)
        before = gathered_columns(client)
        for number in range(3):
            made = replace(rollout(f"r{number}", "g"), segments=[long])
            one.write(rows_of([made], first=number), {})
        client.command(f"OPTIMIZE TABLE {name}.rollouts FINAL")
        gathered[name] = gathered_columns(client) - before
    client.command("SYSTEM START MERGES")
    assert gathered["ours"] > 10
    assert gathered["theirs"] == 0


def gathered_columns(client: Any) -> int:
    """Return the number of columns that merges of the process merged one at a time."""
    found = client.query("SELECT value FROM system.events WHERE event = 'GatheredColumns'").result_rows
    return int(found[0][0]) if found else 0


def test_the_embedded_engine_takes_its_bounds(client: Any):
    said = dict(client.query("SELECT name, value FROM system.server_settings").result_rows)
    wanted = engine_options(SinkSettings())
    assert {name: said[name] for name in wanted} == {name: str(value) for name, value in wanted.items()}


def test_progress_keeps_tables_and_partitions_apart(client: Any):
    rows = rows_of([Document(str(i), "s", "t") for i in range(4)])
    tables = writer(client, "apart")
    assert tables.write(rows[:2], {}) == 2
    assert tables.write(rows[::-1], {}) == 2
    other = [replace(row, partition=row.partition + 1) for row in rows]
    letters = [replace(row, record=DeadLetter(row.topic, 0, row.offset, 0, "why", "test", b"")) for row in rows]
    assert tables.write(other, {}) == tables.write(letters, {}) == len(rows)
    assert tables.write([*rows, *other, *letters], {}) == 0
    counted = client.query("SELECT _partition, _offset FROM apart.documents ORDER BY ALL").result_rows
    assert counted == [(row.partition, row.offset) for row in [*rows, *other]]


def test_a_table_of_an_older_schema_gains_the_new_columns(client: Any):
    writer(client, "older").write(rows_of([Document("d0", "s", "t")]), {})
    client.command("ALTER TABLE older.documents DROP COLUMN source")
    newer = writer(client, "older")
    newer.write(rows_of([Document("d0", "s", "t"), Document("d1", "s", "t")]), {})
    assert client.query("SELECT source FROM older.documents ORDER BY _offset").result_rows == [("",), ("s",)]


def test_a_table_with_another_type_is_refused(client: Any):
    writer(client, "mismatch")
    client.command("ALTER TABLE mismatch.documents MODIFY COLUMN source Nullable(String)")
    with pytest.raises(RuntimeError, match="source is Nullable"):
        writer(client, "mismatch")


@pytest.mark.parametrize("record", [None, Document("d", "s", "t")], ids=["undecodable", "misplaced"])
def test_a_record_that_does_not_belong_in_its_topic_becomes_a_dead_letter(record: Document | None):
    error = "unknown framing" if record is None else ""
    located = ConsumedRecord(Topic.TASKS, 1, 5, 9, None, b"\xff", record, error)
    row = row_of(located, Names(PREFIX), CATALOGUE[Topic.TASKS].values)
    assert isinstance(row.record, DeadLetter)
    assert (row.record.source_topic, row.record.source_offset, row.record.value) == ("tidemill.tasks", 5, b"\xff")
    assert row.record.reason == (error or "a Document has no place in tidemill.tasks")


@pytest.mark.parametrize("field", ["token_ids", "loss_mask", "logprobs"])
def test_a_record_that_no_column_can_hold_is_a_dead_letter(field: str):
    whole = next(record for record in small_run() if isinstance(record, Rollout) and record.segments)
    names, expected_types = Names(PREFIX), CATALOGUE[Topic.ROLLOUTS].values

    def row(record: Rollout) -> Any:
        return row_of(ConsumedRecord(Topic.ROLLOUTS, 0, 0, 0, b"k", b"v", record), names, expected_types).record

    assert row(whole) == whole
    torn = replace(whole, segments=[replace(whole.segments[0], **{field: b"\x00\x00\x00"})])
    if field == "loss_mask":
        assert row(torn) == torn
    else:
        assert isinstance(row(torn), DeadLetter)
        assert row(torn).reason == f"segments.{field} has 3 bytes, which is no whole number of elements of 4"


CHILD = """
import sys
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
client = connect(SinkSettings(path=sys.argv[1], keep_freed_ms=int(sys.argv[2])))
said = client.raw_query("SELECT * FROM system.jemalloc_stats FORMAT TSVRaw").decode()
print(next(line for line in said.splitlines() if "opt.dirty_decay_ms" in line))
"""


@pytest.mark.parametrize("keep_ms", [0, 700])
def test_the_embedded_engine_returns_freed_memory(keep_ms: int, tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != ALLOCATOR}
    command = [sys.executable, "-c", CHILD, str(tmp_path / "engine"), str(keep_ms)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    assert f"opt.dirty_decay_ms: {keep_ms} " in said


def test_memory_that_python_and_arrow_freed_returns_to_the_system():
    """The C library alone would not return these blocks, because a smaller block follows them."""
    blocks = [bytes(2**16) for _ in range(800)]
    held = blocks[::100]
    before = resident()
    del blocks
    release_unused_memory()
    assert resident() < before - 20 * 2**20
    assert len(held) == 8


def resident() -> int:
    """Return the resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
