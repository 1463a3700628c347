"""The feedback join by Faust against a real Kafka: the outcomes of the pure machine, whatever happens to the worker."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka import Producer
from join_log import JOIN, JoinLog, emitted, join_oracle, write_traffic
from join_support import CODEC, SECOND_US, feedback, interaction
from stream_support import dead_letters, fresh_topics, read_records, stream_process

from tidemill.schemas.catalogue import Topic, tick_key
from tidemill.schemas.client_settings import producer_settings
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.dead_letter import HEADER_OFFSET, HEADER_PARTITION
from tidemill.schemas.located import Located
from tidemill.schemas.partitioner import partition_of
from tidemill.schemas.reader import LogReader
from tidemill.schemas.records import Outcome, Tick
from tidemill.streams.config import ProcessorName
from tidemill.streams.join.config import JoinSettings
from tidemill.streams.machine import Rejected

INTERACTIONS = 400
KILL_AT = (80, 180, 300)
"""A kill once so many distinct outcomes were read from the log."""
CRASHING = {"max_batch": 20, "instance": "one", "stall_timeout_s": 0}
LIVE = {
    "map": {"rules": {"thumb": {"horizon_s": 1.0, "weight": 1.0}}},
    "grace_s": 0.2,
    "settle_s": 0.1,
    "early_wait_s": 1.0,
}
"""Horizons short enough to wait for."""


@pytest.fixture
def settings(kafka, topic_prefix: str) -> KafkaSettings:
    return fresh_topics(kafka.bootstrap, topic_prefix)


def outcome_of(located: Located) -> Outcome:
    assert isinstance(located.record, Outcome), located.error
    return located.record


@pytest.mark.timeout(300)
def test_killed_worker_gives_the_outcomes_of_the_pure_machine(settings, tmp_path: Path):
    names = write_traffic(settings, INTERACTIONS, seed=11)
    expected = join_oracle(settings, JoinSettings(**JOIN))
    wanted, seen = emitted(expected), set()

    def read(reader: LogReader, worker, count: int) -> None:
        def there(found: list[Located]) -> bool:
            seen.update(located.value for located in found)
            return len(seen) >= count

        read_records(reader, there, 90, worker)

    with (
        LogReader(settings, [Topic.OUTCOMES]) as reader,
        stream_process(settings, tmp_path, processor=ProcessorName.JOIN, rules={"join": JOIN}, **CRASHING) as worker,
    ):
        for threshold in KILL_AT:
            read(reader, worker, threshold)
            worker.kill()
            worker.start()
        read(reader, worker, len(wanted))
        rejected = [output.located for output in expected if isinstance(output, Rejected)]
        letters = [
            letter for topic in (Topic.INTERACTIONS, Topic.FEEDBACK) for letter in _letters(settings, topic, rejected)
        ]
        assert worker.stop() == 0
        seen.update(located.value for located in reader.read_to_end())
    assert seen == wanted
    outcomes = [CODEC.decode(value) for value in seen]
    assert Counter(o.interaction_id for o in outcomes if o.revision == 0) == Counter(names)
    assert {o.exclusion for o in outcomes} >= {"", "no_signal", "no_consent", "no_tokens", "erased"}
    assert any(o.revision > 0 for o in outcomes)
    assert {place for place, _ in letters} == {(r.topic, r.partition, r.offset) for r in rejected}


def _letters(settings: KafkaSettings, topic: Topic, rejected: list[Located]):
    wanted = [located for located in rejected if located.topic is topic]
    for value, headers in dead_letters(settings, topic, len(wanted)):
        yield (topic, int(headers[HEADER_PARTITION]), int(headers[HEADER_OFFSET])), value


def test_what_is_due_in_an_idle_partition_is_decided_by_ticks_in_both_topics(settings, tmp_path: Path):
    """Hostile records come first, and the good ones after them are decided; so are those behind a hole in the log."""
    log = JoinLog(settings)
    for topic in (Topic.INTERACTIONS, Topic.FEEDBACK):
        log.junk(topic, now_us())
    log.bury(Topic.INTERACTIONS, "never-there", now_us())
    silent, liked = (interaction(name, served_at=now_us()) for name in ("silent", "liked"))
    with (
        LogReader(settings, [Topic.OUTCOMES]) as reader,
        stream_process(
            settings, tmp_path, processor=ProcessorName.JOIN, rules={"join": LIVE}, tick_interval_s=0.2
        ) as worker,
    ):
        for made in (silent, liked):
            log.serve(made, now_us())
        log.say(feedback("liked", "vote", observed_at=liked.served_at + SECOND_US // 2), now_us())
        log.producer.flush()
        found = read_records(reader, lambda read: len(read) >= 2, 60, worker)
        ends = {outcome_of(f).interaction_id: outcome_of(f) for f in found}
        assert ends["silent"].exclusion == "no_signal"
        assert (ends["liked"].reward, ends["liked"].exclusion) == (1.0, "")
        hole_in = write_transaction(settings, "before-a-hole")
        read_records(reader, lambda read: len(read) >= 1, 60, worker)
        behind = next(f"behind-{n}" for n in range(99) if partition_of(f"behind-{n}", 2) == hole_in)
        log.serve(interaction(behind, served_at=now_us()), now_us())
        log.producer.flush()
        (after,) = read_records(reader, lambda read: len(read) >= 1, 60, worker)
        assert outcome_of(after).interaction_id == behind
        assert len(dead_letters(settings, Topic.INTERACTIONS, 1) + dead_letters(settings, Topic.FEEDBACK, 1)) == 2
        assert worker.stop() == 0
    partition = partition_of("silent", 2)
    with LogReader(settings, [Topic.INTERACTIONS, Topic.FEEDBACK]) as reader:
        records = list(reader.read_to_end())
    ticks = [r for r in records if isinstance(r.record, Tick)]
    assert {r.topic for r in ticks if r.partition == partition} == {Topic.INTERACTIONS, Topic.FEEDBACK}
    assert all(r.key == tick_key(r.partition).encode() for r in ticks)
    offsets = {r.offset for r in records if (r.topic, r.partition) == (Topic.INTERACTIONS, hole_in)}
    assert set(range(max(offsets))) - offsets, "there was a hole to go over"


def write_transaction(settings: KafkaSettings, name: str) -> int:
    """Write an interaction in a transaction, whose end marker takes an offset; the partition."""
    mine = {"transactional.id": f"{settings.topic_prefix}test", "transaction.timeout.ms": 600_000}
    options = producer_settings(settings, "test") | mine
    producer = Producer(options)
    producer.init_transactions(30)
    producer.begin_transaction()
    made = interaction(name, served_at=now_us())
    topic = JoinLog(settings).names.of(Topic.INTERACTIONS)
    producer.produce(topic, CODEC.encode(made), name.encode())
    producer.commit_transaction(30)
    return partition_of(name, 2)
