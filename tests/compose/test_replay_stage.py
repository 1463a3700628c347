"""`tidemill replay stage` and `tidemill replay diff` as an operator types them, on logs that real workers wrote."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from typer.testing import CliRunner

from tidemill.compose.cli import app
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.clock import now_us, to_ms
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.admin import admin_client, create_topics
from tidemill.schemas.log.client_settings import consumer_settings
from tidemill.schemas.log.consumed import HEADER_REPLAY_SOURCE, ConsumedRecord
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Group, RewardComponent, Rollout
from tidemill.streams.config import BatchSettings, ProcessorName
from tidemill.streams.join.config import JoinSettings

sys.path.insert(0, str(Path(__file__).parent.parent / "streams"))
from join_log import JOIN, batch_oracle, emitted, join_oracle, write_traffic
from stream_support import RUN_ID, fresh_topics, read_records, rollout, stream_process

GROUPS = 12
SIZE = 3
SECOND_US = 1_000_000
INTERACTIONS = 80
BATCHES = {"max_tokens": 60, "min_members": 1, "max_wait_s": 3.0, "leftovers": "keep", "corrections": "next_batch"}


@dataclass(frozen=True, slots=True)
class Log:
    """Topics that workers have processed, and the workers' configuration."""

    kafka: KafkaSettings
    config: Path

    def ask(self, *arguments: object, prefix: str | None = None):
        """Run a replay command on it."""
        topic_prefix = self.kafka.topic_prefix if prefix is None else prefix
        common = ["--bootstrap", self.kafka.bootstrap, "--topic-prefix", topic_prefix, "--config", self.config]
        return CliRunner().invoke(app, ["replay", *map(str, [*arguments, *common])])

    def records(self, *topics: Topic) -> list[ConsumedRecord]:
        """Return every record of some topics."""
        with LogReader(self.kafka, topics) as reader:
            return list(reader.read_to_end())


@pytest.fixture(scope="module")
def log(kafka, tmp_path_factory: pytest.TempPathFactory) -> Log:
    """Rollouts, interactions and feedback, and the results of three workers."""
    directory = tmp_path_factory.mktemp("replay")
    settings = fresh_topics(kafka.bootstrap, f"t{uuid.uuid4().hex[:12]}.")
    send_rollouts(settings)
    write_traffic(settings, INTERACTIONS, seed=3)
    rules = {"run": {"run_id": RUN_ID}, "join": JOIN, "batches": BATCHES}
    config = directory / "settings.toml"
    config.write_text(tomli_w.dumps(rules), "utf-8")
    outcomes = emitted(join_oracle(settings, JoinSettings(**JOIN)))
    with ExitStack() as stack:
        for name in ProcessorName:
            worker = stream_process(settings, directory / name.value, processor=name, rules=rules, tick_interval_s=0.2)
            stack.enter_context(worker)
        await_distinct(settings, Topic.GROUPS, lambda seen: len(seen) == 2 * GROUPS - GROUPS // 3)
        await_distinct(settings, Topic.OUTCOMES, lambda seen: seen == outcomes)
        await_distinct(settings, Topic.ONLINE_BATCHES, lambda seen: all_batched(settings, seen))
    return Log(settings, config)


def all_batched(kafka: KafkaSettings, seen: set[bytes]) -> bool:
    """Whether these are the final batches of the outcomes, and no outcome still waits."""
    expected, waits = batch_oracle(kafka, BatchSettings(**BATCHES))
    return not waits and seen == emitted(expected)


def send_rollouts(kafka: KafkaSettings) -> None:
    """Send groups with old event times: each third one whole, the others closed by their deadline, with a straggler."""
    begun = now_us() - 3600 * SECOND_US
    with RecordProducer(kafka, "test") as producer:
        for number in range(GROUPS):
            at, name = begun + 100 * number * SECOND_US, f"g{number:02d}"
            late = 5 if number % 3 == 0 else 15
            for index, after in enumerate((0, 2, late)):
                record = scored(name, index, deadline_at=at + 10 * SECOND_US)
                moment = to_ms(at + after * SECOND_US)
                producer.send(Topic.ROLLOUTS, record, key=name, timestamp_ms=moment)


def scored(name: str, index: int, **changes: Any) -> Rollout:
    """Return a rollout with a reward of two components."""
    parts = [RewardComponent("answer", float(index == 1), 1.0), RewardComponent("tool_use", index / 2, 0.1)]
    total = sum(part.value * part.weight for part in parts)
    return rollout(name, index, group_size=SIZE, reward=total, rewards=parts, **changes)


def await_distinct(kafka: KafkaSettings, topic: Topic, enough: Callable[[set[bytes]], bool]) -> None:
    """Wait until a processor has written enough distinct records."""
    with LogReader(kafka, [topic]) as reader:
        read_records(reader, lambda found: enough({f.value or b"" for f in found if is_output(f)}), 240)


def is_output(located: ConsumedRecord) -> bool:
    return type(located.record).__name__ in {"Group", "Outcome", "OnlineBatch"}


def answer(result) -> dict[str, Any]:
    assert result.exit_code in (0, 1) and not isinstance(result.exception, Exception), (result.output, result.exception)
    return json.loads(result.stdout)


@pytest.fixture
def scratch_prefix() -> str:
    return f"w{uuid.uuid4().hex[:12]}."


@pytest.mark.parametrize("name", list(ProcessorName))
def test_with_the_original_rules_the_results_equal_the_recorded_ones_byte_for_byte(log, name):
    result = log.ask("stage", name.value, "--json")
    found = answer(result)
    assert found["identical"] == found["total"] == found["there"] == found["here"] > 5
    assert result.exit_code == 0 and found["first"] is None and found["cut"] == []


def places(kafka: KafkaSettings) -> dict[str, Any]:
    """Return the end of every live topic, and the committed offsets of every consumer group."""
    with LogReader(kafka, Topic) as reader:
        ends = {f"{topic}/{partition}": end for (topic, partition), end in reader.end_offsets().items()}
    client = admin_client(kafka)
    groups = [g.group_id for g in client.list_consumer_groups().result().valid if kafka.topic_prefix in g.group_id]
    committed = {}
    for group in groups:
        (asked,) = client.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]).values()
        committed[group] = {(place.topic, place.partition): place.offset for place in asked.result().topic_partitions}
    return {"ends": ends, "committed": committed}


def test_another_deadline_names_the_first_group_that_changes_and_touches_nothing_live(log, scratch_prefix):
    before = places(log.kafka)
    assert len(before["committed"]) == 3 and all(before["committed"].values())
    found = answer(log.ask("stage", "assembly", "--deadline", "10", "--json", "--into", scratch_prefix))
    assert places(log.kafka) == before
    changed = GROUPS - GROUPS // 3
    assert (found["identical"], found["changed"], found["only_there"], found["only_here"]) == (4, changed, changed, 0)
    first = found["first"]
    recorded = {(r.partition, r.offset): r.record for r in log.records(Topic.GROUPS)}
    there = recorded[first["there"]["partition"], first["there"]["offset"]]
    assert isinstance(there, Group) and there.group_id == first["name"] == "g01"
    assert first["there"]["topic"] == f"{log.kafka.topic_prefix}groups"
    fields = {field["path"]: (field["there"], field["here"]) for field in first["fields"]}
    assert fields["closed_by"] == ("deadline", "size") and fields["members[2]"][0] == "nothing"


def test_an_earlier_deadline_and_a_window_of_event_time(log):
    found = answer(log.ask("stage", "assembly", "--deadline", "-9", "--json"))
    assert found["first"]["name"] == "g00"
    ended = [r.record.closed_at for r in log.records(Topic.GROUPS) if isinstance(r.record, Group)]
    middle = sorted(ended)[len(ended) // 2] / 1e6
    moment = datetime.fromtimestamp(middle, UTC).isoformat()
    late = answer(log.ask("stage", "assembly", "--deadline", "-9", "--from", moment, "--json"))
    early = answer(log.ask("stage", "assembly", "--deadline", "-9", "--to", moment, "--json"))
    assert late["first"]["name"] > early["first"]["name"] == "g00"
    assert 0 < late["total"] < found["total"] and 0 < early["total"] < found["total"]


def test_another_formula_changes_rewards_and_advantages(log):
    found = answer(log.ask("stage", "assembly", "--reward", "tool_use=0.6", "--json", "--show", 1))
    assert found["identical"] == 0 and len(found["differences"]) == 1
    fields = {field["path"]: (field["there"], field["here"]) for field in found["first"]["fields"]}
    assert fields["members[1].reward"] == ("1.05", "1.3") and "members[0].advantage" in fields
    same = log.ask("stage", "assembly", "--reward", "tool_use=0.1", "--reward-version", "1")
    assert same.exit_code == 0 and "identical: 20 of 20" in same.output, (same.output, same.exception)


def test_other_settings_change_what_is_decided(log):
    for name, change, first in (
        ("assembly", "stream.min_completed=3", "mean_reward"),
        ("join", "join.map.name=other", "map_version"),
        ("batches", "batches.max_tokens=1000000", "closed_by"),
    ):
        found = answer(log.ask("stage", name, "--set", change, "--json"))
        paths = {field["path"] for difference in found["differences"] for field in difference["fields"]}
        assert found["changed"] and first in paths, (name, paths)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["join", "--deadline", 3], "which join does not read"),
        (["assembly", "--reward", "tool_use"], "expected NAME=WEIGHT"),
        (["assembly", "--reward", "tool_use=much"], "expected NAME=WEIGHT"),
        (["assembly", "--reward-version", "2"], "give --reward NAME=WEIGHT as well"),
        (["assembly", "--reward", "manners=1"], "no rollout has a reward component manners"),
        (["assembly", "--to", "soon"], "'soon' is not a time"),
    ],
)
def test_impossible_requests_are_reported(log, arguments, told):
    result = log.ask("stage", *arguments)
    assert isinstance(result.exception, ValueError) and told in str(result.exception)


def test_results_are_never_written_into_the_live_topics_or_over_others(log, scratch_prefix):
    live = log.ask("stage", "assembly", "--into", log.kafka.topic_prefix)
    assert isinstance(live.exception, ValueError) and "into the live topic" in str(live.exception)
    assert log.ask("stage", "assembly", "--into", scratch_prefix).exit_code == 0
    again = log.ask("stage", "assembly", "--into", scratch_prefix)
    assert isinstance(again.exception, ValueError) and "was written by replay" in str(again.exception)
    other = replace_prefix(log.kafka, f"other-{scratch_prefix}").model_copy(update={"partitions": 3})
    create_topics(other)
    uneven = log.ask("stage", "assembly", "--into", other.topic_prefix)
    assert isinstance(uneven.exception, ValueError) and "exists with 3 partitions" in str(uneven.exception)


def test_two_replays_write_the_same_bytes_and_a_third_rule_is_found(log):
    prefixes = [f"w{uuid.uuid4().hex[:12]}." for _ in range(3)]
    for prefix in prefixes[:2]:
        assert log.ask("stage", "assembly", "--into", prefix).exit_code == 0
    assert log.ask("stage", "assembly", "--deadline", "10", "--into", prefixes[2]).exit_code == 1
    same = log.ask("diff", *prefixes[:2], "--topic", "groups")
    assert same.exit_code == 0 and "identical: 20 of 20" in same.output
    live = log.ask("diff", log.kafka.topic_prefix, prefixes[0])
    assert live.exit_code == 0, live.output
    other = answer(log.ask("diff", prefixes[0], prefixes[2], "--json"))
    assert other["first"]["name"] == "g01" and other["first"]["here"]["topic"] == f"{prefixes[2]}groups"
    written = replace_prefix(log.kafka, prefixes[0])
    with LogReader(written, [Topic.GROUPS]) as reader:
        found = list(reader.read_to_end())
    assert {record.replay_id for record in found} != {""} and len({record.replay_id for record in found}) == 1
    assert headers_of(written)[HEADER_REPLAY_SOURCE].startswith(f"{log.kafka.topic_prefix}rollouts/".encode())


def replace_prefix(kafka: KafkaSettings, prefix: str) -> KafkaSettings:
    return kafka.model_copy(update={"topic_prefix": prefix})


def headers_of(kafka: KafkaSettings) -> dict[str, bytes]:
    """Return the headers of one group."""
    consumer = Consumer(consumer_settings(kafka, "test", "test"))
    consumer.assign([TopicPartition(Names(kafka.topic_prefix).of(Topic.GROUPS), p, 0) for p in range(2)])
    try:
        (message,) = consumer.consume(1, 240)
        return dict(message.headers() or [])
    finally:
        consumer.close()


def test_a_tampered_group_is_found_at_its_offset(log, scratch_prefix):
    """The same rollouts, and groups in which one member has another reward."""
    target = fresh_topics(log.kafka.bootstrap, scratch_prefix)
    forged = copy_with_forgery(log, target)
    found = answer(log.ask("stage", "assembly", "--json", prefix=scratch_prefix))
    assert (found["changed"], found["only_there"], found["only_here"]) == (1, 0, 0)
    first = found["first"]
    assert first["name"] == forged.record.group_id
    assert first["there"] == {
        "topic": f"{scratch_prefix}groups",
        "partition": forged.partition,
        "offset": forged.offset,
    }
    assert [field["path"] for field in first["fields"]] == ["members[0].reward"]


def copy_with_forgery(log: Log, target: KafkaSettings) -> ConsumedRecord:
    """Copy rollouts and groups, offset by offset, and change one group."""
    names, codec = Names(target.topic_prefix), Codec()
    records = sorted(log.records(Topic.ROLLOUTS, Topic.GROUPS), key=lambda r: (r.topic, r.partition, r.offset))
    forged = next(r for r in records if isinstance(r.record, Group) and r.record.group_id == "g05")
    assert isinstance(forged.record, Group)
    members = [replace(forged.record.members[0], reward=9.0), *forged.record.members[1:]]
    value = codec.encode(replace(forged.record, members=members))
    with RecordProducer(target, "test") as producer:
        for record in records:
            producer.send_bytes(
                names.of(record.topic),
                value if record is forged else record.value,
                key=record.key,
                partition=record.partition,
                timestamp_ms=record.timestamp_ms,
            )
    return forged


def test_missing_topics_are_reported(log):
    result = log.ask("stage", "assembly", prefix="nowhere.")
    assert isinstance(result.exception, LookupError) and "nowhere.groups does not exist" in str(result.exception)
