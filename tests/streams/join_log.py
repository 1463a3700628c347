"""Traffic for the tests of the feedback join and of online batches over a real log: ninety minutes, hours ago."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from join_support import CODEC, RUN_ID, SECOND_US, feedback, interaction

from tidemill.schemas.catalogue import Names, Topic, feedback_key, user_request_key
from tidemill.schemas.clock import now_us, to_ms
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import RecordProducer, partition_of
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Feedback, Interaction, SignalKind, Tick, UserRequest, UserWish
from tidemill.streams.config import BatchSettings
from tidemill.streams.join.config import JoinSettings
from tidemill.streams.join.feedback_join import INPUTS, FeedbackJoin
from tidemill.streams.machine import Output, OutputRecord
from tidemill.streams.online.batcher import OnlineBatcher

JOIN: dict[str, Any] = {
    "map": {
        "rules": {
            "thumb": {"horizon_s": 60, "weight": 1.0},
            "retry": {"horizon_s": 120, "weight": -0.5},
            "edit_made": {"horizon_s": 120},
        }
    },
    "grace_s": 10,
    "early_wait_s": 60,
    "late_s": 300,
    "done_ttl_s": 7200,
}


class JoinLog:
    """Writes interactions, feedback, user requests, tombstones and junk to the partitions that the product uses."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self.partitions = kafka.partitions or 1
        self.names = Names(kafka.topic_prefix)
        self.producer = RecordProducer(kafka, "test")

    def serve(self, record: Interaction, at_us: int) -> None:
        """Write an interaction at an event time."""
        self.producer.send(Topic.INTERACTIONS, record, key=record.interaction_id, timestamp_ms=to_ms(at_us))

    def say(self, record: Feedback, at_us: int) -> None:
        """Write feedback at an event time."""
        key = feedback_key(record.interaction_id, record.event_id)
        partition = partition_of(record.interaction_id, self.partitions)
        self.producer.send(Topic.FEEDBACK, record, key=key, partition=partition, timestamp_ms=to_ms(at_us))

    def demand(self, user_id: str, wish: UserWish, at_us: int) -> None:
        """Write a user request into every partition."""
        request = UserRequest(f"{user_id}/{wish.value}", user_id, wish, "test", at_us)
        for partition in range(self.partitions):
            key = user_request_key(user_id, partition)
            at_ms = to_ms(at_us)
            self.producer.send(Topic.INTERACTIONS, request, key=key, partition=partition, timestamp_ms=at_ms)

    def bury(self, topic: Topic, key: str, at_us: int) -> None:
        partition = partition_of(key.split("/")[0], self.partitions)
        full, at_ms = self.names.of(topic), to_ms(at_us)
        self.producer.send_bytes(full, None, key=key.encode(), partition=partition, timestamp_ms=at_ms)

    def junk(self, topic: Topic, at_us: int) -> None:
        """Write bytes that are not a record."""
        self.producer.send_bytes(self.names.of(topic), b"junk", key=b"junk", partition=0, timestamp_ms=to_ms(at_us))


def write_traffic(kafka: KafkaSettings, count: int, seed: int) -> list[str]:
    """Write `count` interactions and return their ids. All event times are hours ago. The log has duplicates, records
    out of order, late, corrected and withdrawn votes, votes of other users, erasures, user requests, and junk."""
    chance, log = random.Random(seed), JoinLog(kafka)
    begun = now_us() - 3 * 3600 * SECOND_US
    events: list[tuple[int, Any]] = []
    names = [f"i{number}" for number in range(count)]
    for number, name in enumerate(names):
        served_at = begun + number * 5400 * SECOND_US // count
        user_id = f"u-{number % 20}"
        version = 3 + 3 * number // count
        made = interaction(
            name,
            served_at=served_at,
            user_id=user_id,
            consent=number % 17 != 0,
            sampled_tokens=number % 23,
            version_min=version - (number % 31 == 0),
            version_max=version,
        )
        for _ in range(1 + (chance.random() < 0.1)):
            events.append((served_at + chance.randrange(20 * SECOND_US), made))
        for event in _reactions(chance, made):
            for _ in range(1 + (chance.random() < 0.15)):
                events.append((event.observed_at + chance.randrange(30 * SECOND_US), event))
    events += [(begun + 1800 * SECOND_US * k, (f"u-{k}", wish)) for k, wish in enumerate(UserWish, 1)]
    events += [(begun + 60 * SECOND_US * k, topic) for k in range(1, 4) for topic in INPUTS]
    for at_us, event in sorted(events, key=lambda item: item[0]):
        # A record may precede one with an earlier time in the log.
        stamped = at_us - chance.randrange(SECOND_US)
        match event:
            case Interaction():
                log.serve(event, stamped)
                if chance.random() < 0.02:
                    log.bury(Topic.INTERACTIONS, event.interaction_id, at_us + SECOND_US)
            case Feedback():
                log.say(event, stamped)
                if chance.random() < 0.02:
                    key = feedback_key(event.interaction_id, event.event_id)
                    log.bury(Topic.FEEDBACK, key, at_us + SECOND_US)
            case Topic():
                log.junk(event, stamped)
            case (user_id, wish):
                log.demand(user_id, wish, stamped)
    log.producer.flush()
    return names


def _reactions(chance: random.Random, made: Interaction) -> Iterable[Feedback]:
    """Yield 0 to 5 signals; some too late, replaced, withdrawn, of another user, or of an unknown interaction."""
    name = made.interaction_id
    if chance.random() < 0.3:
        return
    observed = made.served_at + chance.randrange(75 * SECOND_US)
    vote = _thumb(made, f"{name}-vote", observed, chance.choice((-1.0, 1.0)))
    yield vote
    if chance.random() < 0.3:
        value = chance.choice((None, -1.0, 1.0))
        later = observed + chance.randrange(60 * SECOND_US)
        yield _thumb(made, f"{name}-again", min(later, made.served_at + 59 * SECOND_US), value, corrects=vote.event_id)
    if chance.random() < 0.3:
        yield _thumb(made, f"{name}-retry", observed, 1.0, kind=SignalKind.RETRY)
    if chance.random() < 0.05:
        yield _thumb(made, f"{name}-stranger", observed, user_id="u-stranger")
    if chance.random() < 0.05:
        yield _thumb(made, f"{name}-ghost", observed, interaction_id=f"ghost-{name}")


def _thumb(made: Interaction, event: str, observed_at: int, value: float | None = 1.0, **changes: Any) -> Feedback:
    fields = {"user_id": made.user_id, "observed_at": observed_at, "value": value, **changes}
    return feedback(fields.pop("interaction_id", made.interaction_id), event, **fields)


def join_oracle(kafka: KafkaSettings, settings: JoinSettings) -> list[Output]:
    """Return the pure machine's outputs for the topics' present content, read one after the other, and a late tick."""
    with LogReader(kafka, list(INPUTS)) as reader:
        read = list(reader.read_to_end())
    outputs: list[Output] = []
    for partition in range(kafka.partitions or 1):
        machine = FeedbackJoin(partition, RUN_ID, settings)
        for topic in INPUTS:
            records = [located for located in read if (located.topic, located.partition) == (topic, partition)]
            for located in [*records, _tick(topic, partition, records[-1].offset + 1 if records else 0)]:
                outputs += machine.observe(located)
    return outputs


def batch_oracle(kafka: KafkaSettings, settings: BatchSettings) -> tuple[list[Output], bool]:
    """Return the pure machine's outputs for the present `outcomes`, and whether a batch still has a deadline."""
    machine = OnlineBatcher(RUN_ID, "main", settings)
    with LogReader(kafka, [Topic.OUTCOMES]) as reader:
        outputs = [output for located in reader.read_to_end() for output in machine.observe(located)]
    return outputs, machine.next_deadline_us() is not None


def _tick(topic: Topic, partition: int, offset: int) -> ConsumedRecord:
    at_us = now_us()
    return ConsumedRecord(topic, partition, offset, to_ms(at_us), b"", b"", Tick("oracle", at_us))


def emitted(outputs: Iterable[Output]) -> set[bytes]:
    """Return the encoded records of the outputs."""
    return {CODEC.encode(output.record) for output in outputs if isinstance(output, OutputRecord)}
