"""Erasure by the sink as a process on a real Kafka: a user's rows do not come back after a kill or in a rebuild."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.consumers.product_support import ProductLog, interaction, two_people
from tests.consumers.sink_support import START_US, rows_of
from tests.consumers.test_sink_log import DEADLINE_S, Sink
from tests.waiting import until
from tidemill.consumers.operate.rights.erase import erase
from tidemill.consumers.sink.erasures import erased_interactions, known_erasures
from tidemill.consumers.sink.query import read_state
from tidemill.schemas.catalogue import Names, Topic, tick_key
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import RecordProducer, send_dead_letter
from tidemill.schemas.records import Tick

USERS = """
SELECT groupUniqArrayArray([user_id]) FROM
(
    SELECT user_id FROM interactions UNION ALL SELECT user_id FROM feedback UNION ALL SELECT user_id FROM outcomes
)
"""
LETTERS_READ = "SELECT sum(next_offset) FROM sink_watermarks FINAL WHERE endsWith(_topic, 'feedback.dlq')"
LETTERS = "SELECT arraySort(groupArray(_key)) FROM dead_letters"


def value(sink: Sink, sql: str) -> Any:
    """Return the single value of a query to a running sink."""
    state = read_state(sink.settings.directory)
    assert state is not None
    reply = httpx.post(state.url, params={"default_format": "JSONCompact"}, content=sql, timeout=DEADLINE_S)
    return json.loads(reply.content)["data"][0][0]


def users(sink: Sink) -> set[str]:
    """Return the users that have a row."""
    return set(value(sink, USERS))


def bury(settings: KafkaSettings, *keys: bytes) -> None:
    """Write a dead letter about feedback for each key."""
    with RecordProducer(settings, "test-letters") as producer:
        for key in keys:
            letter = ConsumedRecord(Topic.FEEDBACK, 0, 7, START_US // 1000, key, b"broken", None, "unknown framing")
            send_dead_letter(producer, Names(settings.topic_prefix), letter, "unknown framing", "join")


@pytest.fixture
def sinks() -> Iterator[list[Sink]]:
    """The sinks of a test; a process that is still running at its end is killed."""
    started: list[Sink] = []
    yield started
    for sink in started:
        if sink.process is not None and sink.process.poll() is None:
            sink.end(signal.SIGKILL)


def test_an_erased_user_is_gone_after_a_kill_and_after_a_rebuild(kafka: Any, tmp_path: Path, sinks: list[Sink]):
    settings = kafka.fresh()
    log, (row,) = ProductLog(settings, 2), rows_of([interaction("i", "ann")])
    log.write(*two_people())
    assert not known_erasures(settings).hides(row)
    with RecordProducer(settings, "test-ticks") as producer:
        producer.send(Topic.INTERACTIONS, Tick("test", START_US), key=tick_key(0), partition=0)
    sink = Sink(settings, {"path": str(tmp_path / "first"), "http_port": 0, "flush_seconds": 0.1})
    sinks.append(sink)
    sink.start()
    bury(settings, b"i-ann/x", b"i-bob/x")
    until(lambda: users(sink) == {"ann", "bob", "judge"})
    until(lambda: value(sink, LETTERS) == ["i-ann/x", "i-bob/x"])
    erase(settings, StoreSettings(root=str(tmp_path)), "ann", "tester")
    assert known_erasures(settings).hides(row), "so that a rebuild knows the request before the first row"
    until(lambda: users(sink) == {"bob", "judge"})
    assert sink.end(signal.SIGKILL) == -signal.SIGKILL
    log.write(interaction("straggler", "ann"), interaction("new", "cleo"))
    rebuilt = Sink(settings, {"path": str(tmp_path / "second"), "http_port": 0, "flush_rows": 1, "flush_seconds": 0.1})
    sinks.append(rebuilt)
    shown = ["i-bob/x"]
    for again in (sink, rebuilt):
        again.start()
        until(lambda one=again: value(one, "SELECT count() FROM interactions WHERE user_id = 'cleo'") == 1)
        until(lambda one=again: value(one, "SELECT count() FROM online_batches") == 1)
        until(lambda one=again: value(one, "SELECT count() FROM feedback") == 2)
        assert users(again) == {"bob", "cleo", "judge"}
        until(lambda one=again: value(one, LETTERS) == sorted(shown))
        bury(settings, b"i-ann/late", b"i-bob/late")
        shown.append("i-bob/late")
        until(lambda one=again: value(one, LETTERS_READ) == 2 * len(shown))
        assert value(again, LETTERS) == sorted(shown)
        assert value(again, "SELECT count() FROM ticks") == 1
        assert again.end(signal.SIGTERM) == 0


def test_an_interaction_of_which_the_log_holds_nothing_may_have_been_erased(kafka: Any, tmp_path: Path):
    """A day after an erasure the broker may have removed its tombstones too."""
    settings = kafka.fresh()
    ProductLog(settings, 2).write(*two_people())
    began_ms = now_us() // 1_000
    letters = [(b"i-ann/x", 0), (b"i-bob", 0), (b"gone/x", began_ms), (b"", 0)]
    assert erased_interactions(settings, letters, known_erasures(settings)) == set()
    erase(settings, StoreSettings(root=str(tmp_path)), "ann", "tester")
    letters += [(b"never/x", now_us() // 1_000 + 1)]
    assert erased_interactions(settings, letters, known_erasures(settings)) == {b"i-ann", b"gone"}
