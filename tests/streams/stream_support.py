"""Rollouts for the stream tests, workers as processes, and readers of their output."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from tests.conftest import Kafka
from tests.records import build
from tests.streams import plain_worker
from tests.waiting import until
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.client_settings import consumer_settings, producer_settings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import HEADER_OFFSET, HEADER_PARTITION
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Group, Record, Rollout, RolloutStatus
from tidemill.streams.config import ProcessorName, RunnerName

RUN_ID = "run"
runner = RunnerName.FAUST
"""The runner of workers started without an explicit one; the fixture `runner` sets it."""
CODEC = Codec()
FAR_AWAY_US = 4_000_000_000_000_000
ASSEMBLY = (Topic.ROLLOUTS, Topic.GROUPS)
"""The topics of group assembly."""


PLAYED = build(
    Rollout, run_id=RUN_ID, turns=1, prompt_tokens=3, sampled_tokens=7, version_min=1, version_max=2, started_at=1,
    finished_at=2,
)  # fmt: skip


def rollout(
    group_id: str,
    index: int,
    *,
    group_size: int = 4,
    reward: float | None = 0.5,
    deadline_at: int = FAR_AWAY_US,
    **changes: Any,
) -> Rollout:
    """Return a rollout without tokens, since group assembly reads none. A reward of None makes a failed rollout."""
    failed = reward is None
    made = replace(
        PLAYED, rollout_id=f"{group_id}/{index:03d}", group_id=group_id, task_id=f"task-{group_id}", index=index,
        group_size=group_size, deadline_at=deadline_at, reward=reward, success=None if failed else reward > 0.5,
        status=RolloutStatus.FAILED if failed else RolloutStatus.COMPLETED, failure="replica gone" if failed else "",
    )  # fmt: skip
    return replace(made, **changes)


def located(record: Record | None, offset: int, *, at_ms: int = 1_000, **changes: Any) -> ConsumedRecord:
    """Return a record of the rollouts topic at an offset in partition 0."""
    key = record.group_id.encode() if isinstance(record, Rollout) else None
    fields: dict[str, Any] = {
        "topic": Topic.ROLLOUTS,
        "partition": 0,
        "offset": offset,
        "timestamp_ms": at_ms,
        "key": key,
        "value": b"",
        "record": record,
        "error": "" if record else "cannot be read",
    }
    return ConsumedRecord(**{**fields, **changes})


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([f"tests.streams.{name}_worker" for name in ("plain", "killed", "naive")])
"""Workers are forked from a process that has loaded the libraries, which takes longer than most of them run."""


@dataclass
class StreamProcess:
    """A stream worker in a separate process."""

    command: list[str]
    """The name of a module in this folder and its arguments."""
    log: Path
    process: multiprocessing.Process | None = field(default=None)

    def start(self) -> None:
        """Start the worker; its output is appended to `log`."""
        made = FORKS.Process(target=plain_worker.work_as, args=(self.command, str(self.log)), daemon=True)
        made.start()
        self.process = made

    def running(self) -> bool:
        """Whether the process is running."""
        return self.process is not None and self.process.is_alive()

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.join(60)

    def stop(self, timeout_s: float = 180.0) -> int:
        """Send SIGTERM and return the exit status."""
        assert self.process is not None
        if self.running():
            self.process.terminate()
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.kill()
            raise TimeoutError(f"the worker did not stop in {timeout_s:g} s")
        return self.process.exitcode


@contextmanager
def stream_process(
    kafka: KafkaSettings,
    directory: Path,
    *,
    command: list[str] | None = None,
    processor: ProcessorName = ProcessorName.ASSEMBLY,
    rules: Mapping[str, Any] | None = None,
    **stream: Any,
) -> Iterator[StreamProcess]:
    """Run a worker on `kafka`, and kill it at the end if it is still running; `rules` are its other sections."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = directory / "settings.json"
    sections = {"kafka": kafka.model_dump(), "run": {"run_id": RUN_ID}, "stream": stream, **(rules or {})}
    sections["stream"].setdefault("data_dir", str(directory / "faust"))
    sections["stream"].setdefault("runner", runner.value)
    settings.write_text(json.dumps(sections), "utf-8")
    program = [*command, str(settings)] if command else ["plain_worker", str(settings), processor.value]
    worker = StreamProcess(program, directory / "log")
    worker.start()
    try:
        yield worker
    finally:
        if worker.running():
            worker.kill()


def fresh_topics(bootstrap: str, prefix: str, partitions: int = 2, topics: Iterable[Topic] = Topic) -> KafkaSettings:
    """Create topics under a separate prefix."""
    kafka = Kafka(bootstrap).fresh(partitions, topics, prefix)

    def led() -> bool:
        # A partition appears in the metadata before its leader accepts requests.
        try:
            LogReader(kafka, topics).close()
        except KafkaException:
            return False
        return True

    until(led, "leaders of the new topics", 240)
    return kafka


def read_records(
    reader: LogReader,
    wanted: Callable[[list[ConsumedRecord]], bool],
    deadline_s: float,
    worker: StreamProcess | None = None,
) -> list[ConsumedRecord]:
    """Read records of a topic until `wanted` is true for all records read so far."""
    found: list[ConsumedRecord] = []

    def enough() -> bool:
        found.extend(reader.poll(0.1))
        if worker and not worker.running():
            raise AssertionError(f"the worker ended: {worker.log.read_text()[-2000:]}")
        return wanted(found)

    until(enough, f"enough records; read {len(found)} so far", deadline_s)
    return found


def kill_through(
    reader: LogReader, worker: StreamProcess, kill_at: Sequence[int], last: int = 0
) -> list[ConsumedRecord]:
    """Kill and restart the worker at each count of distinct values in a topic. Returns all records read until
    there are `last` distinct values."""
    found: list[ConsumedRecord] = []
    values: set[bytes | None] = set()

    def read_to(count: int) -> None:
        def there(new: list[ConsumedRecord]) -> bool:
            values.update(located.value for located in new)
            return len(values) >= count

        found.extend(read_records(reader, there, 240, worker))

    for count in kill_at:
        read_to(count)
        worker.kill()
        worker.start()
    read_to(last)
    return found


def dead_letters(kafka: KafkaSettings, topic: Topic, count: int) -> list[tuple[bytes | None, dict[str, bytes]]]:
    """Return value and headers of the dead letters of a topic, when `count` different records have some."""
    full = Names(kafka.topic_prefix).dead_letter(topic)
    consumer = Consumer(consumer_settings(kafka, "test", "test"))
    partitions = consumer.list_topics(full, 20).topics[full].partitions
    consumer.assign([TopicPartition(full, partition, 0) for partition in partitions])
    found: list[tuple[bytes | None, dict[str, bytes]]] = []

    def enough() -> bool:
        found.extend((m.value(), dict(m.headers() or [])) for m in consumer.consume(100, 0.1))
        return len({(headers[HEADER_PARTITION], headers[HEADER_OFFSET]) for _, headers in found}) >= count

    try:
        until(enough, f"{count} dead letters", 240)
    finally:
        consumer.close()
    return found


def commit_in_transaction(kafka: KafkaSettings, topic: Topic, key: str, record: Record, partition: int) -> None:
    """Write a record in a transaction. The end marker uses an offset that no reader receives: a hole in the log."""
    full = Names(kafka.topic_prefix).of(topic)
    mine = {"transactional.id": f"{kafka.topic_prefix}test", "transaction.timeout.ms": 600_000}
    producer = Producer(producer_settings(kafka, "test") | mine)
    consumer = Consumer(consumer_settings(kafka, "test", "test"))

    def end() -> int:
        return int(consumer.get_watermark_offsets(TopicPartition(full, partition), timeout=60)[1])

    before = end()
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(full, CODEC.encode(record), key.encode(), partition=partition)
    producer.commit_transaction(60)
    # The coordinator writes the marker after its answer.
    until(lambda: end() >= before + 2, "the end marker of a transaction", 240)
    consumer.close()


def group_of(found: ConsumedRecord) -> Group:
    """Return the group that a record contains."""
    assert isinstance(found.record, Group), found.error
    return found.record
