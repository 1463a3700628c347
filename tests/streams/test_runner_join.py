"""The join and online batches by each runner on a real Kafka: the pure machines' outputs, with any kills."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from join_log import JOIN, JoinLog, batch_oracle, emitted, join_oracle, write_traffic
from join_support import CODEC, SECOND_US, feedback, interaction
from stream_support import commit_in_transaction, dead_letters, fresh_topics, kill_through, read_records, stream_process

from tests.conftest import a_prefix
from tests.waiting import until
from tidemill.schemas.catalogue import Topic, tick_key
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import HEADER_OFFSET, HEADER_PARTITION, partition_of
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Outcome, Tick
from tidemill.streams.config import BatchSettings, ProcessorName, RunnerName
from tidemill.streams.join.config import JoinSettings
from tidemill.streams.machine import Output, Rejected

INTERACTIONS = 400
KILL_AT = (80, 240)
"""Kill the worker when this many distinct outcomes were read from the log."""
CRASHING = {"max_batch": 20, "transaction_records": 20, "instance": "one", "stall_timeout_s": 0}
LIVE = {
    "map": {"rules": {"thumb": {"horizon_s": 1.0, "weight": 1.0}}},
    "grace_s": 0.2,
    "settle_s": 0.1,
    "early_wait_s": 1.0,
}
"""Horizons that a test can wait for."""
BATCHES = {"max_tokens": 60, "min_members": 1, "max_wait_s": 3.0, "leftovers": "keep", "corrections": "next_batch"}
BATCH_KILL_AT = 6
JOIN_TOPICS = (Topic.INTERACTIONS, Topic.FEEDBACK, Topic.OUTCOMES, Topic.ONLINE_BATCHES)

pytestmark = pytest.mark.usefixtures("runner")


def outcome_of(located: ConsumedRecord) -> Outcome:
    assert isinstance(located.record, Outcome), located.error
    return located.record


@dataclass(frozen=True, slots=True)
class Joined:
    """A log of traffic, joined by a worker that was killed several times."""

    kafka: KafkaSettings
    names: list[str]
    expected: list[Output]
    """The outputs of the pure machine."""
    found: set[bytes]
    """The distinct values of `outcomes`."""
    written: int
    """The number of outcomes, with repeated ones."""


@pytest.fixture(scope="module")
def joined(kafka, runner, tmp_path_factory: pytest.TempPathFactory) -> Joined:
    settings = fresh_topics(kafka.bootstrap, a_prefix(), topics=JOIN_TOPICS)
    names = write_traffic(settings, INTERACTIONS, seed=11)
    expected = join_oracle(settings, JoinSettings(**JOIN))
    directory, rules = tmp_path_factory.mktemp("join"), {"join": JOIN}
    with (
        LogReader(settings, [Topic.OUTCOMES]) as reader,
        stream_process(settings, directory, processor=ProcessorName.JOIN, rules=rules, **CRASHING) as worker,
    ):
        read = kill_through(reader, worker, KILL_AT, len(emitted(expected)))
        assert worker.stop() == 0
        read += reader.read_to_end()
    found = [located.value or b"" for located in read]
    return Joined(settings, names, expected, set(found), len(found))


@pytest.mark.timeout(1200)
def test_killed_join_gives_the_outcomes_of_the_pure_machine(joined, runner):
    assert joined.found == emitted(joined.expected)
    assert joined.written == len(joined.found) or runner is RunnerName.FAUST, "each once"
    outcomes = [CODEC.decode(value) for value in joined.found]
    assert Counter(o.interaction_id for o in outcomes if o.revision == 0) == Counter(joined.names)
    assert {o.exclusion for o in outcomes} >= {"", "no_signal", "no_consent", "no_tokens", "erased"}
    assert any(o.revision > 0 for o in outcomes)


def test_killed_join_keeps_every_dead_letter(joined, runner):
    rejected = [output.located for output in joined.expected if isinstance(output, Rejected)]
    for topic in (Topic.INTERACTIONS, Topic.FEEDBACK):
        wanted = {(located.partition, located.offset) for located in rejected if located.topic is topic}
        letters = [headers for _, headers in dead_letters(joined.kafka, topic, len(wanted))]
        assert {(int(h[HEADER_PARTITION]), int(h[HEADER_OFFSET])) for h in letters} == wanted
        assert len(letters) == len(wanted) or runner is RunnerName.FAUST, "each once"


@pytest.mark.timeout(1200)
def test_killed_batcher_gives_the_batches_of_the_pure_machine(joined, tmp_path: Path):
    """The input is the killed join's outcomes, with repeated ones."""
    settings = BatchSettings(**BATCHES)
    with (
        LogReader(joined.kafka, [Topic.ONLINE_BATCHES]) as reader,
        stream_process(
            joined.kafka, tmp_path, processor=ProcessorName.BATCHES, rules={"batches": BATCHES}, **CRASHING
        ) as worker,
    ):
        seen = {located.value or b"" for located in kill_through(reader, worker, [BATCH_KILL_AT])}

        def nothing_waits() -> bool:
            seen.update(located.value or b"" for located in reader.poll(0.1))
            expected, waits = batch_oracle(joined.kafka, settings)
            return not waits and seen == emitted(expected)

        until(nothing_waits, "the batches of the pure machine, the last of them closed by ticks", 240)
        assert worker.stop() == 0
        assert not list(reader.read_to_end())
    batches = sorted((CODEC.decode(value) for value in seen), key=lambda batch: batch.sequence)
    assert [batch.sequence for batch in batches] == list(range(len(batches)))
    assert len(batches) > BATCH_KILL_AT, "the kill came while batches were made"
    first = [m.interaction_id for batch in batches for m in batch.members if not m.correction]
    rewarded = {o.interaction_id for o in map(CODEC.decode, joined.found) if o.reward is not None}
    assert len(first) == len(set(first))
    assert set(first) <= rewarded


def test_deadlines_in_an_idle_partition_are_decided_by_ticks_in_both_topics(kafka, topic_prefix, tmp_path: Path):
    """Good records after hostile ones are decided, and so are those after a hole in the log."""
    settings = fresh_topics(kafka.bootstrap, topic_prefix, topics=JOIN_TOPICS)
    log = JoinLog(settings)
    for topic in (Topic.INTERACTIONS, Topic.FEEDBACK):
        log.junk(topic, now_us())
    log.bury(Topic.INTERACTIONS, "never-there", now_us())
    # All of it is in the log before the worker starts, which could write ticks between two of these records.
    served_at = now_us()
    for name in ("silent", "liked"):
        log.serve(interaction(name, served_at=served_at), served_at)
    liked_at = served_at + SECOND_US // 2
    log.say(feedback("liked", "vote", observed_at=liked_at), liked_at)
    log.producer.flush()
    with (
        LogReader(settings, [Topic.OUTCOMES]) as reader,
        stream_process(
            settings, tmp_path, processor=ProcessorName.JOIN, rules={"join": LIVE}, tick_interval_s=0.2
        ) as worker,
    ):
        found = read_records(reader, lambda read: len(read) >= 2, 240, worker)
        ends = {outcome_of(f).interaction_id: outcome_of(f) for f in found}
        assert ends["silent"].exclusion == "no_signal"
        assert (ends["liked"].reward, ends["liked"].exclusion) == (1.0, "")
        hole_in = partition_of("before-a-hole", 2)
        made = interaction("before-a-hole", served_at=now_us())
        commit_in_transaction(settings, Topic.INTERACTIONS, made.interaction_id, made, hole_in)
        read_records(reader, lambda read: len(read) >= 1, 240, worker)
        behind = next(f"behind-{n}" for n in range(99) if partition_of(f"behind-{n}", 2) == hole_in)
        log.serve(interaction(behind, served_at=now_us()), now_us())
        log.producer.flush()
        (after,) = read_records(reader, lambda read: len(read) >= 1, 240, worker)
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
