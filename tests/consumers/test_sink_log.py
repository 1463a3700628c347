"""The sink as a process on a real Kafka: if it is killed or stopped, it loses nothing and writes nothing twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.consumers.sink_support import START_US, group, rollout, small_run, step, topic_of
from tests.waiting import until
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.query import STATE_FILE, ask, read_state
from tidemill.schemas.catalogue import CATALOGUE, Names, Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.producer import RecordProducer, send_dead_letter
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Tick

DEADLINE_S = 180.0
KILLS = 2
ROLLOUTS = 2000
SINK = """
import json, logging, sys
from tidemill.consumers.sink.service import run
from tidemill.consumers.sink.config import SinkSettings
from tidemill.schemas.config import KafkaSettings, RunSettings
logging.basicConfig(level=logging.INFO)
kafka, sink = json.loads(sys.argv[1])
run(KafkaSettings(**kafka), RunSettings(), SinkSettings(**sink))
"""


@pytest.fixture
def settings(kafka) -> KafkaSettings:
    return kafka.fresh()


class Sink:
    """A sink process that can be killed and started again."""

    def __init__(self, kafka: KafkaSettings, options: dict[str, Any]) -> None:
        self.settings = SinkSettings(**options)
        self.options = options
        self._command = [sys.executable, "-c", SINK, json.dumps([kafka.model_dump(), options])]
        self._messages = Path(f"{options['path']}.stderr")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._messages.open("wb") as messages:
            self.process = subprocess.Popen(self._command, stderr=messages)
        until(self._announced)

    def check_running(self) -> None:
        assert self.process is not None
        assert self.process.poll() is None, self._messages.read_text()

    def refusal(self) -> str:
        """Return the error of a second process with these settings, which exits by itself."""
        ended = subprocess.run(self._command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert ended.returncode > 0
        return ended.stderr

    def _announced(self) -> bool:
        self.check_running()
        state = read_state(self.settings.directory)
        return state is not None and state.pid == self.process.pid

    def rows(self) -> int:
        state = read_state(self.settings.directory)
        assert state is not None
        return int(httpx.post(state.url, content="SELECT count() FROM rollouts", timeout=DEADLINE_S).text)

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=DEADLINE_S)


@pytest.fixture
def sink(settings: KafkaSettings, tmp_path: Path) -> Iterator[Sink]:
    options = {"path": str(tmp_path / "engine"), "http_port": 0, "flush_rows": 150, "flush_seconds": 0.2}
    sink = Sink(settings, options)
    yield sink
    if sink.process is not None and sink.process.poll() is None:
        sink.end(signal.SIGKILL)


def write_run(settings: KafkaSettings) -> None:
    """Write every record type of a small run, then many rollouts with ticks and invalid values between them."""
    names = Names(settings.topic_prefix)
    with RecordProducer(settings, "test-writer") as producer:
        for record in small_run():
            producer.send(topic_of(record), record, key="k")
        for n in range(ROLLOUTS):
            producer.send(Topic.ROLLOUTS, rollout(f"r{n}", f"g{n % 50}", versions=(1,) * 16), key=f"g{n % 50}")
            if n % 20 == 0:
                producer.send(Topic.ROLLOUTS, Tick("test", START_US + n), key="", partition=n // 20 % 2)
            if n % 100 == 0:
                producer.send_bytes(names.of(Topic.ROLLOUTS), b"garbage", key=f"g{n % 50}".encode())
            if n % 50 == 0:
                producer.send(Topic.GROUPS, group(f"g{n}", [rollout(f"r{n}", f"g{n}")]), key=f"g{n}")


def write_dead_letters(settings: KafkaSettings) -> None:
    """Write the invalid values as dead letters, as group assembly does."""
    names = Names(settings.topic_prefix)
    with LogReader(settings, [Topic.ROLLOUTS]) as reader, RecordProducer(settings, "test-letters") as producer:
        for located in reader.read_to_end(DEADLINE_S):
            if located.record is None:
                send_dead_letter(producer, names, located, located.error, "tidemill-stream")


def ends(settings: KafkaSettings) -> dict[tuple[str, int], int]:
    """Return end offsets of all partitions that the sink reads and that have records, by full topic name and number."""
    names = Names(settings.topic_prefix)
    with LogReader(settings, list(CATALOGUE)) as reader:
        found = {(names.of(topic), partition): end for (topic, partition), end in reader.end_offsets().items() if end}
    letters = sum(1 for n in range(ROLLOUTS) if n % 100 == 0)
    return {**found, ("dlq", 0): letters}


def stored(sink: SinkSettings) -> dict[tuple[str, int], int]:
    """Return rows by full topic name and partition, dead-letter topics together. Checks that no row is stored twice."""
    found: dict[tuple[str, int], int] = {}
    for topic, partition, n, distinct, _last in rows_by_place(sink):
        assert n == distinct, (topic, partition)
        place = ("dlq", 0) if topic.endswith(".dlq") else (topic, partition)
        found[place] = found.get(place, 0) + n
    return found


def rows_by_place(sink: SinkSettings) -> list[list[Any]]:
    tables = ask(sink, "SHOW TABLES").rows
    parts = [f"SELECT _topic, _partition, _offset FROM {name}" for (name,) in tables if not name.startswith("sink_")]
    inner = " UNION ALL ".join(parts)
    grouped = f"SELECT _topic, _partition, count(), uniqExact(_offset), max(_offset) FROM ({inner}) GROUP BY ALL"
    return ask(sink, grouped).rows


def test_a_repeatedly_killed_sink_loses_nothing_and_writes_nothing_twice(settings: KafkaSettings, sink: Sink):
    write_run(settings)
    write_dead_letters(settings)
    for kill in range(KILLS):
        sink.start()
        until(lambda floor=kill: sink.rows() > floor * ROLLOUTS // (KILLS + 1))
        assert sink.end(signal.SIGKILL) == -signal.SIGKILL
    sink.start()
    until(lambda: sink.rows() > KILLS * ROLLOUTS // (KILLS + 1))
    assert sink.end(signal.SIGINT) == 0
    # A stop writes the records that were read.
    by_place = {(topic, partition): last + 1 for topic, partition, _, _, last in rows_by_place(sink.settings)}
    marks = ask(sink.settings, "SELECT _topic, _partition, max(next_offset) FROM sink_watermarks GROUP BY ALL").rows
    assert by_place == {(topic, partition): next_offset for topic, partition, next_offset in marks}
    sink.start()
    wanted = ends(settings)

    def missing() -> dict[tuple[str, int], tuple[int, int]]:
        sink.check_running()
        found = stored(sink.settings)
        return {place: (found.get(place, 0), end) for place, end in wanted.items() if found.get(place, 0) != end}

    until(lambda: not missing(), missing)
    assert sink.end(signal.SIGTERM) == 0
    assert not (sink.settings.directory / STATE_FILE).exists()
    assert stored(sink.settings) == wanted
    letters = ask(sink.settings, "SELECT found_by, count(), any(value) FROM dead_letters GROUP BY 1 ORDER BY 1").rows
    assert letters == [["tidemill-sink", 20, "garbage"], ["tidemill-stream", 20, "garbage"]]
    failures = {row[2]: row[3] for row in ask(sink.settings, "failures").rows if row[0] == "dead letter"}
    assert list(failures.values()) == [20]


def test_missing_topics_are_a_clear_error(kafka, tmp_path: Path):
    absent = Sink(KafkaSettings(bootstrap=kafka.bootstrap, topic_prefix="absent."), {"path": str(tmp_path / "engine")})
    assert "create the topics with" in absent.refusal()


def delete(settings: KafkaSettings, full_topic: str, before: int) -> None:
    admin = AdminClient({"bootstrap.servers": settings.address()})
    for future in admin.delete_records([TopicPartition(full_topic, 0, before)]).values():
        future.result()


def send(settings: KafkaSettings, numbers: range) -> None:
    """Write rollouts and dead letters to partition 0 of their topics."""
    names = Names(settings.topic_prefix)
    with RecordProducer(settings, "test-writer") as producer:
        for n in numbers:
            producer.send(Topic.ROLLOUTS, rollout(f"r{n}", "g"), key="g", partition=0)
            producer.send_bytes(names.dead_letter(Topic.GROUPS), b"letter", key=b"k", partition=0)


def write_in_transactions(settings: KafkaSettings, full_topic: str) -> None:
    """Write three steps, each in a transaction: three records and three transaction markers."""
    writer = Producer({"bootstrap.servers": settings.address(), "transactional.id": full_topic})
    writer.init_transactions(DEADLINE_S)
    for number in range(1, 4):
        writer.begin_transaction()
        writer.produce(full_topic, Codec().encode(step(number, [], [])), key=b"run")
        writer.commit_transaction(DEADLINE_S)


def test_a_log_whose_beginning_was_deleted_is_read_and_the_gap_recorded(settings: KafkaSettings, sink: Sink):
    rollouts = Names(settings.topic_prefix).of(Topic.ROLLOUTS)
    send(settings, range(10))
    delete(settings, rollouts, 4)
    for _start in range(2):
        sink.start()
        until(lambda: sink.rows() == 6)
        gaps = ask(sink.settings, "SELECT _topic, _partition, first_offset, end_offset FROM sink_gaps").rows
        assert gaps == [[rollouts, 0, 0, 4]]
        assert sink.end(signal.SIGKILL) == -signal.SIGKILL


def test_a_retention_gap_ends_the_sink_or_is_recorded_in_a_table(settings: KafkaSettings, sink: Sink):
    """Before the gap, it reads transactions to their end."""
    names = Names(settings.topic_prefix)
    rollouts, letters, steps = names.of(Topic.ROLLOUTS), names.dead_letter(Topic.GROUPS), names.of(Topic.STEPS)
    send(settings, range(10))
    write_in_transactions(settings, steps)
    sink.start()
    until(lambda: ask(sink.settings, "SELECT step FROM train_steps ORDER BY 1").rows == [[1], [2], [3]])
    mark = f"SELECT max(next_offset) FROM sink_watermarks WHERE _topic = '{steps}'"
    until(lambda: ask(sink.settings, mark).rows == [[6]])
    assert "another process has them open" in sink.refusal()
    until(lambda: sink.rows() == 10)
    until(lambda: len(ask(sink.settings, "SELECT 1 FROM dead_letters").rows) == 10)
    assert sink.end(signal.SIGTERM) == 0
    send(settings, range(10, 20))
    delete(settings, rollouts, 13)
    delete(settings, letters, 15)
    assert f"{rollouts}[0]: the log no longer keeps offset 10, the log begins at 13" in sink.refusal()
    accepting = Sink(settings, {**sink.options, "accept_gaps": True})
    accepting.start()
    until(lambda: accepting.rows() == 17)
    until(lambda: len(ask(sink.settings, "SELECT 1 FROM dead_letters").rows) == 15)
    gaps = ask(sink.settings, "SELECT _topic, _partition, first_offset, end_offset FROM sink_gaps ORDER BY 1").rows
    assert sorted(gaps) == sorted([[rollouts, 0, 10, 13], [letters, 0, 10, 15]])
    assert accepting.end(signal.SIGTERM) == 0
    # A gap that is recorded in the table is not reported again.
    sink.start()
    until(lambda: sink.rows() == 17)
