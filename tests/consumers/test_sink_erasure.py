"""Erased rows are deleted when the request or tombstone is read, never written again; all others are written once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from tests.consumers.product_support import SECOND, interaction, request, two_people
from tests.consumers.sink_support import PREFIX, START_US, rows_of
from tidemill.consumers.sink.config import SinkSettings, TableEngine
from tidemill.consumers.sink.engine import connect
from tidemill.consumers.sink.erasures import Erasures
from tidemill.consumers.sink.rows import DeadLetter, DeletedKey, Row, row_of
from tidemill.consumers.sink.tables import WATERMARKS
from tidemill.consumers.sink.writer import Writer
from tidemill.schemas.catalogue import CATALOGUE, Names, Topic
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import UserWish

DATABASES = count()
LOG_US = 1000 * 1_700_000_000_123
"""Log time of every row that `rows_of` makes, in microseconds."""
ERASE = request("ann", UserWish.ERASE, START_US + 60 * SECOND)
TABLES = ("interactions", "outcomes", "feedback", "online_batches")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    client = connect(SinkSettings(path=str(tmp_path_factory.mktemp("engine"))))
    yield client
    client.close()


class Tables:
    """A separate set of tables, and their contents."""

    def __init__(self, client: Any) -> None:
        self.client, self.name = client, f"erasure{next(DATABASES)}"

    def writer(self, erasures: Erasures | None = None) -> Writer:
        return Writer(self.client, self.name, TableEngine.MERGE_TREE, erasures)

    def counts(self) -> dict[str, int]:
        found = {t: self.client.query(f"SELECT count() FROM {self.name}.{t}").result_rows[0][0] for t in TABLES}
        return {table: n for table, n in found.items() if n}

    def keys(self, table: str = "interactions") -> list[bytes]:
        rows = self.client.query(f"SELECT hex(_key) FROM {self.name}.{table} ORDER BY _partition, _offset").result_rows
        return [bytes.fromhex(key) for (key,) in rows]


@pytest.fixture
def tables(client: Any) -> Tables:
    return Tables(client)


def dead_letter(key: bytes) -> Row:
    letter = DeadLetter("tidemill.feedback", 0, 7, 0, "broken", "join", b"his words")
    return Row("tidemill.feedback.dlq", 0, len(key), 1_700_000_000_123, key, letter, 9)


def test_an_erasure_deletes_the_users_rows_and_keeps_the_batch(tables: Tables):
    writer = tables.writer()
    writer.write([*rows_of(two_people()), dead_letter(b"i-ann/x"), dead_letter(b"i-bobby/x")], {})
    assert tables.counts() == {"interactions": 2, "outcomes": 2, "feedback": 4, "online_batches": 1}
    writer.write(rows_of([ERASE], first=9), {})
    assert tables.counts() == {"interactions": 1, "outcomes": 1, "feedback": 2, "online_batches": 1}
    left = tables.client.query(f"SELECT DISTINCT user_id FROM {tables.name}.feedback ORDER BY 1").result_rows
    assert left == [("bob",), ("judge",)]
    assert tables.keys("dead_letters") == [b"i-bobby/x"]


def test_the_requests_of_one_flush_apply_to_the_rows_of_that_flush(tables: Tables):
    tables.writer().write([*rows_of([ERASE]), *rows_of(two_people())], {})
    assert tables.counts() == {"interactions": 1, "outcomes": 1, "feedback": 3, "online_batches": 1}


def test_rows_from_before_an_erasure_never_appear_and_later_ones_do(tables: Tables):
    writer = tables.writer()
    writer.write(rows_of([ERASE]), {})
    late = interaction("late", "ann", served_at=ERASE.at - 1)
    skewed = interaction("skewed", "ann", served_at=ERASE.at + 1)
    fresh = replace(skewed, interaction_id="fresh")
    before, ahead, after = rows_of([late, skewed, fresh])
    writer.write([before, ahead, replace(after, timestamp_ms=ERASE.at // 1000 + 1)], {})
    found = tables.client.query(f"SELECT interaction_id FROM {tables.name}.interactions").result_rows
    assert found == [("fresh",)]


def test_a_rebuild_that_knows_the_requests_never_shows_erased_rows(tables: Tables):
    erasures = Erasures()
    erasures.observe(ERASE)
    tables.writer(erasures).write(rows_of(two_people()[:2]), {})
    assert tables.counts() == {}


def test_dead_letters_about_an_erased_interaction_are_left_out_in_any_order(client: Any):
    letters = [dead_letter(b"i-ann/x"), dead_letter(b"i-bobby/x")]
    requested = [rows_of([ERASE]), rows_of(two_people())]
    buried = [[keyed(b"i-ann", 9, dead=True)]]
    for flushes in ([letters, *requested], [*requested, letters], [letters, *buried], [*buried, letters]):
        separate = Tables(client)
        writer = separate.writer()
        for flush in flushes:
            writer.write(flush, {})
        assert separate.keys("dead_letters") == [b"i-bobby/x"]


def test_a_tombstone_with_an_empty_key_hides_no_dead_letter(tables: Tables):
    writer = tables.writer()
    for letter in (dead_letter(b""), keyed(b"", 9, dead=True), replace(dead_letter(b""), offset=1)):
        writer.write([letter], {})
    assert tables.keys("dead_letters") == [b"", b""]


def test_an_opt_out_deletes_nothing_and_the_newest_erasure_applies():
    row = rows_of([interaction("i", "ann")])[0]
    erasures = Erasures()
    for record in (request("ann", UserWish.OPT_OUT, ERASE.at), request("bob", UserWish.ERASE, ERASE.at)):
        erasures.observe(record)
    assert not erasures.hides(row)
    erasures.observe(ERASE)
    erasures.observe(replace(ERASE, at=1))
    assert erasures.hides(row)
    assert not erasures.hides(replace(row, record=ERASE))


def test_a_hostile_user_id_deletes_only_its_own_rows(tables: Tables):
    hostile = ["x' OR 1=1 --", "\\", "%(at)s", "a\x00b", "ünïcode 🦆"]
    writer, left = tables.writer(), ["bob", *hostile]
    writer.write(rows_of([interaction(f"i{n}", user) for n, user in enumerate(left)]), {})
    for number, user in enumerate(hostile):
        writer.write(rows_of([request(user, UserWish.ERASE, ERASE.at)], first=number), {})
        left.remove(user)
        found = tables.client.query(f"SELECT user_id FROM {tables.name}.interactions ORDER BY _offset").result_rows
        assert [name for (name,) in found] == left


def keyed(key: bytes, offset: int, partition: int = 0, *, dead: bool = False) -> Row:
    record: Any = DeletedKey(Topic.INTERACTIONS) if dead else interaction(f"i{offset}", "ann")
    return Row(Names(PREFIX).of(Topic.INTERACTIONS), partition, offset, 1_700_000_000_123, key, record, 1)


def test_a_tombstone_deletes_the_older_rows_of_its_key_in_its_partition(tables: Tables):
    writer, keys = tables.writer(), [b"k", b"k' OR 1=1 --", b"\xff\x00\\"]
    writer.write([keyed(key, n, partition) for n, key in enumerate([*keys, b"other"]) for partition in (0, 1)], {})
    left = [*keys, b"other"]
    for offset, key in zip((10, 20, 30), keys, strict=True):
        writer.write([keyed(key, offset, dead=True), keyed(key, offset + 1)], {})
        left.remove(key)
        left.append(key)
        assert tables.keys() == [*left, *keys, b"other"]


def test_a_tombstone_is_no_dead_letter_if_the_topic_is_compacted():
    names = Names(PREFIX)
    nothing = ConsumedRecord(Topic.FEEDBACK, 0, 5, 9, b"i/e", None, None, "the record has no value (a tombstone)")
    assert row_of(nothing, names, CATALOGUE[Topic.FEEDBACK].values).record == DeletedKey(Topic.FEEDBACK)
    stray = replace(nothing, topic=Topic.ROLLOUTS)
    assert isinstance(row_of(stray, names, CATALOGUE[Topic.ROLLOUTS].values).record, DeadLetter)


class Crash(RuntimeError):
    """Simulates the death of the process."""


def test_a_crash_before_the_deletion_forgets_nothing_and_writes_nothing_twice(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
):
    rows = [*rows_of(two_people()), *rows_of([ERASE])]
    places = {("tidemill.interactions", 0): 2}
    insert = Writer._insert_arrow

    def delete_dies(_writer: Writer, _deletions: object) -> None:
        raise Crash

    def mark_dies(one: Writer, table: str, *rest: Any) -> None:
        if table == WATERMARKS:
            raise Crash
        insert(one, table, *rest)

    for method, dying in (("_delete", delete_dies), ("_insert_arrow", mark_dies)):
        with monkeypatch.context() as patch:
            patch.setattr(Writer, method, dying)
            with pytest.raises(Crash):
                tables.writer().write(rows, places)
        assert tables.writer().next_offsets == {}
    writer = tables.writer()
    writer.write(rows, places)
    writer.write(rows, places)
    # The judge's feedback on an interaction that was never written is deleted by its own tombstone.
    assert tables.counts() == {"interactions": 1, "outcomes": 1, "feedback": 3, "online_batches": 1}
    assert dict(tables.writer().next_offsets) == places


def test_the_time_of_a_row_is_the_earlier_of_its_two_times():
    row = rows_of([interaction("i", "ann", served_at=LOG_US + 5 * SECOND)])[0]
    erasures = Erasures()
    erasures.observe(request("ann", UserWish.ERASE, LOG_US))
    assert erasures.hides(row)
    assert not erasures.hides(replace(row, timestamp_ms=row.timestamp_ms + 1))
