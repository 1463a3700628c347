"""Holes in the log, in contrast to records that were dropped between a fetch and the stream; and what a fetch reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from aiokafka.consumer.fetcher import Fetcher
from faust.types import TP

from tidemill.streams.runner.faust_access import OffsetGaps, _ConsumerThread

HERE = TP("compacted", 0)


def holes(*fetches: list[int]) -> OffsetGaps:
    noted = OffsetGaps({HERE.topic})
    for offsets in fetches:
        noted.note(HERE, offsets)
    return noted


def test_a_hole_is_an_offset_that_the_fetcher_skips():
    noted = holes([3, 4, 9], [12])
    assert noted.take(HERE, 5, 9)
    assert noted.take(HERE, 10, 12)
    assert not noted.take(HERE, 5, 9), "each is asked for once"


def test_a_dropped_record_is_no_hole():
    assert not holes([3, 4, 5, 6]).take(HERE, 4, 6)
    assert not holes([3], [4], [5]).take(HERE, 4, 5)
    assert not holes([3, 7, 8]).take(HERE, 4, 8), "behind the hole a record was dropped"


def test_a_seek_is_no_hole():
    assert not holes([3, 4], [1, 2, 3, 4, 5]).take(HERE, 5, 1)
    noted = holes([3])
    noted.clear()
    noted.note(HERE, [9])
    assert not noted.take(HERE, 4, 9)


def test_deleted_records_are_distinguished_from_a_hole():
    noted = OffsetGaps({HERE.topic})
    noted.expect(HERE, 3)
    assert noted.note(HERE, [3, 6, 9]) == [4, 7]
    noted.note_first(HERE, [4, 7], 6)
    assert (noted.first_kept(HERE, 4), noted.first_kept(HERE, 4), noted.first_kept(HERE, 7)) == (6, None, None)
    plain = TP("plain", 0)
    noted.expect(plain, 3)
    assert noted.note(plain, [3, 4]) == []
    assert noted.note(plain, [8]) == [5]
    noted.note_first(plain, [5], 8)
    noted.clear()
    assert noted.first_kept(plain, 5) is None


def test_topics_without_compaction_have_no_holes():
    other = TP("plain", 0)
    noted = holes()
    noted.note(other, [1, 5])
    assert not noted.take(other, 2, 5)


class BufferedFetcher:
    """aiokafka's fetcher, with a result for one partition that is an error when it is read."""

    fetched_records = Fetcher.fetched_records
    _closed = False

    def __init__(self) -> None:
        def fail() -> None:
            raise AssertionError("read")

        self._records = {HERE: SimpleNamespace(check_raise=fail)}
        self._wait_consume_future = None
        self._subscriptions = SimpleNamespace(
            reassignment_in_progress=False, is_assigned=lambda _tp: True, fetch_context=lambda: memoryview(b"")
        )

    def _notify(self, _future: None) -> None: ...


@pytest.mark.anyio
async def test_a_fetch_returns_nothing_while_a_rebalance_has_emptied_the_active_partitions():
    thread = object.__new__(_ConsumerThread)
    thread.consumer = SimpleNamespace(flow_active=True)
    thread.transport = SimpleNamespace(holes=OffsetGaps(()), positions=dict)
    consumer, active = SimpleNamespace(_closed=False, _fetcher=BufferedFetcher()), set()
    assert await thread._fetch_records(consumer, active, timeout=0) == {}
    active.add(HERE)
    with pytest.raises(AssertionError, match="read"):
        await thread._fetch_records(consumer, active, timeout=0)
