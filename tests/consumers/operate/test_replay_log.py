"""`tidemill replay copy` on a real Kafka: copies, refusals, and an unchanged live log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import closing, contextmanager

import pytest
from confluent_kafka import Consumer, TopicPartition
from typer.testing import CliRunner

from tests.consumers.operate.replay_support import group, rollout, step
from tests.waiting import until
from tidemill.compose.cli import app
from tidemill.consumers.operate.replay.copy import Replay
from tidemill.consumers.operate.replay.plan import LogOrigin
from tidemill.consumers.operate.replay.records import LogSource
from tidemill.consumers.operate.replay.selection import NumberRange, OffsetRange, Selection
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.log.admin import admin_client, create_topics
from tidemill.schemas.log.client_settings import consumer_settings
from tidemill.schemas.log.consumed import HEADER_REPLAY_ID, HEADER_REPLAY_SOURCE
from tidemill.schemas.log.producer import RecordProducer, partition_of
from tidemill.schemas.records import Group, StepInput
from tidemill.trainer.log_input import RolloutLog, trainable
from tidemill.trainer.trainable import Reference

PARTITIONS = 2
GROUPS = 12
START_MS = int(time.time() - 3_600) * 1_000
"""Within the retention of every topic."""
GAP_MS = 1_000


@pytest.fixture(scope="module")
def live(kafka):
    """A live log that every test reads and no test changes."""
    return written_log(kafka)


def written_log(kafka):
    """Write a log: groups of two rollouts each, a second apart, and two steps that read some of them."""
    settings = kafka.fresh(PARTITIONS)
    names, reached, places = Names(settings.topic_prefix), dict.fromkeys(range(PARTITIONS), 0), []
    with RecordProducer(settings, "test") as producer:
        for n in range(GROUPS):
            name, at = f"g{n}", START_MS + n * GAP_MS
            partition = partition_of(name, PARTITIONS)
            for i in range(2):
                made = rollout(f"{name}-{i}", name, index=i, reward=float(i), finished_at=at * 1_000)
                headers = {"made-by": b"test"}
                producer.send(Topic.ROLLOUTS, made, key=name, timestamp_ms=at + i, headers=headers)
            members = [("rollouts", partition, reached[partition] + i) for i in range(2)]
            reached[partition] += 2
            assembled = group(name, members, ids=[f"{name}-0", f"{name}-1"])
            producer.send(Topic.GROUPS, assembled, key=name, timestamp_ms=at + 1)
            places.append(("groups", partition, reached[partition] // 2 - 1))
        producer.send(Topic.STEPS, step(1, places[:4], []), key="run", timestamp_ms=START_MS + 5_000)
        producer.send(Topic.STEPS, step(2, places[5:8], places[4:5]), key="run", timestamp_ms=START_MS + 9_000)
        producer.send_bytes(names.of(Topic.ROLLOUTS), b"no record", key=b"g0", timestamp_ms=START_MS + 20_000)
    return settings


@pytest.fixture
def into():
    return f"replay{uuid.uuid4().hex[:8]}."


def under(settings, prefix):
    return settings.model_copy(update={"topic_prefix": prefix})


def records_of(settings, topic):
    """Return every record of a topic, by partition."""
    with closing(LogSource(settings)) as source:
        ranges = source.whole([topic])
        found = {partition: [] for _, partition in ranges}
        for record in source.scan(ranges):
            found[record.partition].append(record)
        return found


def replay(settings, into, *, resume=None, **chosen):
    with closing(LogOrigin(settings, Selection(run_id="run", **chosen))) as origin:
        made = Replay(settings, origin, into, resume=resume)
        report = made.prepare()
        return report, made.run()


def without_marks(record):
    return [(name, value) for name, value in record.headers if not name.startswith("tidemill-replay")]


def test_a_copy_is_the_original_with_marks(live, into):
    report, copied = replay(live, into, topics=("rollouts", "groups"))
    assert report["records"] == copied["written"] == GROUPS * 3 + 1
    assert copied["relocated"] == 0, "a whole topic lies as its original does"
    for topic in ("rollouts", "groups"):
        originals, copies = records_of(live, topic), records_of(under(live, into), topic)
        for partition in range(PARTITIONS):
            assert len(copies[partition]) == len(originals[partition]) > 0
            for original, copy in zip(originals[partition], copies[partition], strict=True):
                assert (copy.key, copy.value, copy.timestamp_ms) == (
                    original.key, original.value, original.timestamp_ms,
                )  # fmt: skip
                assert without_marks(copy) == list(original.headers)
                marks = dict(copy.headers)
                assert marks[HEADER_REPLAY_ID] == report["replay_id"].encode()
                place = f"{live.topic_prefix}{topic}/{partition}/{original.offset}"
                assert marks[HEADER_REPLAY_SOURCE] == place.encode()
    again, _ = replay(live, f"again-{into}", topics=("rollouts", "groups"))
    assert again["sha256"] == report["sha256"], "a repeated replay reports the same records"


def test_live_topics_and_groups_do_not_change(live, into):
    rollouts = Names(live.topic_prefix).of(Topic.ROLLOUTS)
    with group_reader(live, rollouts, f"{live.topic_prefix}trainer") as consumer:
        consumer.commit(offsets=[TopicPartition(rollouts, p, 3 + p) for p in range(PARTITIONS)], asynchronous=False)
        before = standing(live, consumer, rollouts)
        groups_before = groups_of(live, into)
        replay(live, into, topics=("rollouts", "groups", "train.steps"))
        for refused in (live.topic_prefix, "tidemill."):
            with pytest.raises(ValueError, match="live topic"):
                replay(live, refused, topics=("rollouts",))
        assert standing(live, consumer, rollouts) == before
        assert groups_of(live, into) == groups_before, "a replay is in no consumer group"


@contextmanager
def group_reader(settings, topic, group_id):
    """A reader in a consumer group, with its partitions assigned."""
    with closing(Consumer(consumer_settings(settings, "reader", group_id))) as consumer:
        consumer.subscribe([topic])
        until(lambda: (consumer.poll(0.2), consumer.assignment())[1], "partitions of the group")
        yield consumer


def standing(settings, consumer, rollouts):
    """Return the committed offsets of the live group, and both ends of every live partition."""
    committed = consumer.committed([TopicPartition(rollouts, p) for p in range(PARTITIONS)], timeout=60)
    with closing(LogSource(settings)) as source:
        ends = {
            (topic.value, p): source.bounds((topic.value, p))
            for topic in Topic
            for p in range(source.partitions(topic.value))
        }
    return [tp.offset for tp in committed], ends


def groups_of(settings, into):
    """Return the consumer groups that are named by a prefix. Other tests make and delete groups meanwhile."""
    admin = admin_client(settings)
    listed = admin.list_consumer_groups(request_timeout=60).result(60)
    return {found.group_id for found in listed.valid if found.group_id.startswith((settings.topic_prefix, into))}


def test_a_prefix_with_a_reader_is_refused(live, into):
    replay(live, into, topics=("groups",))
    refusal = rf"consumer group {into}reader reads {into}groups"
    with group_reader(live, f"{into}groups", f"{into}reader"), pytest.raises(ValueError, match=refusal):
        replay(live, into, topics=("rollouts",))


def test_a_prefix_in_use_is_refused(live, into):
    own = under(live, into)
    create_topics(own)
    with RecordProducer(own, "test") as producer:
        producer.send(Topic.GROUPS, group("x", []), key="x")
    with pytest.raises(ValueError, match=f"{into}groups.* was not written by a replay"):
        replay(live, into, topics=("rollouts",))
    another = f"another-{into}"
    report, _ = replay(live, another, topics=("groups",))
    assert report["references_outside"] == 2 * GROUPS, "the rollouts are not copied, and that is said"
    with pytest.raises(ValueError, match=f"--resume {report['replay_id']}"):
        replay(live, another, topics=("rollouts",))
    with pytest.raises(ValueError, match="another selection"):
        replay(live, another, topics=("rollouts",), resume=report["replay_id"])


def test_a_prefix_with_other_partitions_is_refused(live, into):
    create_topics(under(live, into).model_copy(update={"partitions": PARTITIONS + 1}))
    with pytest.raises(ValueError, match="exists with 3 partitions"):
        replay(live, into, topics=("rollouts",))


def test_ranges_of_offsets_and_times(live, into):
    report, _ = replay(live, into, offsets=(OffsetRange("rollouts", 1, 1, 4), OffsetRange("groups", None, 0, 1)))
    assert {(lane["topic"], lane["partition"]): lane["records"] for lane in report["lanes"]} == {
        (f"{live.topic_prefix}rollouts", 1): 3,
        (f"{live.topic_prefix}groups", 0): 1,
        (f"{live.topic_prefix}groups", 1): 1,
    }
    times = {"from_ms": START_MS + 2 * GAP_MS, "to_ms": START_MS + 4 * GAP_MS}
    replay(live, f"times-{into}", topics=("rollouts",), **times)
    copies = records_of(under(live, f"times-{into}"), "rollouts")
    keys = sorted(record.key for records in copies.values() for record in records)
    assert keys == [b"g2", b"g2", b"g3", b"g3"]


def test_a_filter_and_a_group(live, into):
    report, _ = replay(live, into, topics=("rollouts",), where="record.reward > 0.5 and record.index == 1")
    assert report["records"] == GROUPS
    assert report["undecodable"] == 1
    report, copied = replay(live, f"group-{into}", groups=("g7",))
    assert report["records"] == 3
    assert copied["relocated"] == 1
    assert report["references_outside"] == 0


def test_a_trainer_resolves_the_groups_of_a_copied_step(live, into):
    report, copied = replay(live, into, steps=(NumberRange(2, 2),))
    assert report["records"] == 4 * 3, "three groups that it trained on, one that it left out, and their rollouts"
    assert copied["relocated"] > 0
    copy, codec, seen = under(live, into), Codec(), []
    log = RolloutLog(copy, 1 << 20)
    try:
        for partition, records in records_of(copy, "groups").items():
            for record in records:
                made = codec.decode(record.value)
                assert isinstance(made, Group)
                place = StepInput(made.group_id, "groups", partition, record.offset)
                found = trainable(Reference(place, made), log, 100)
                seen.append(made.group_id)
                assert {one.rollout_id for one in found.rollouts} == {member.rollout_id for member in made.members}
    finally:
        log.close()
    assert sorted(seen) == ["g4", "g5", "g6", "g7"]


def test_records_past_retention_are_reported_with_the_available_range(live, into):
    old = under(live, f"old-{into}")
    create_topics(old)
    with RecordProducer(old, "test") as producer:
        for n in range(6):
            made = rollout(f"r{n}", "g0")
            producer.send(Topic.ROLLOUTS, made, key="g0", partition=0, timestamp_ms=START_MS + n * GAP_MS)
    name = Names(old.topic_prefix).of(Topic.ROLLOUTS)
    admin = admin_client(old)
    for future in admin.delete_records([TopicPartition(name, 0, 4)]).values():
        future.result(60)
    with pytest.raises(LookupError, match=r"offset 2 is no longer kept; the log begins at offset 4, written 2"):
        replay(old, into, offsets=(OffsetRange("rollouts", 0, 2, None),))
    with pytest.raises(LookupError, match=r"not all kept; the log begins at offset 4"):
        replay(old, into, topics=("rollouts",), from_ms=START_MS + GAP_MS)
    report, _ = replay(old, into, topics=("rollouts",), from_ms=START_MS + 4 * GAP_MS)
    assert report["records"] == 2


def test_missing_topics_are_reported(live, into):
    with pytest.raises(LookupError, match="topic rollouts does not exist"):
        replay(under(live, "nobody."), into, topics=("rollouts",))


def command(live, into, *options):
    where = ["--bootstrap", live.bootstrap, "--topic-prefix", live.topic_prefix, "--run-id", "run"]
    return ["replay", "copy", *where, "--into", into, *options]


def test_the_command_first_prints_its_plan(live, into):
    result = CliRunner().invoke(app, command(live, into, "--step", "1", "--json"))
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["dry_run"], said["records"]) == (True, 12)
    existing = admin_client(live).list_topics(timeout=60).topics
    assert not [name for name in existing if name.startswith(into)], "a dry run makes nothing"
    text = CliRunner().invoke(app, command(live, into, "--step", "1", "--yes", "--dry-run"))
    assert "nothing was written: --yes copies 12 records" in text.stdout


def test_the_command_writes_a_manifest(live, into, tmp_path):
    file = tmp_path / "manifest.json"
    result = CliRunner().invoke(app, command(live, into, "--version", "1..2", "--yes", "--manifest", str(file)))
    assert result.exit_code == 0, result.output
    made = json.loads(file.read_text())
    assert made["written"] == made["records"] == 24
    assert len(made["sha256"]) == 64


def test_a_killed_replay_continues_without_gaps_or_duplicates(kafka, into):
    live = written_log(kafka)
    replay_id = f"killed-{into}"
    # At this speed the first group is copied at once, and the next one after almost a minute.
    options = ["--topic", "rollouts", "--topic", "groups", "--speed", "0.02", "--yes", "--resume", replay_id]
    whole = GROUPS * 3 + 1
    process = subprocess.Popen(
        [sys.executable, "-m", "tidemill", *command(live, into, *options)], stdout=subprocess.DEVNULL
    )
    try:
        until(lambda: process.poll() is not None or count(live, into) >= 3, "three copies")
        assert process.poll() is None
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    there = count(live, into)
    with RecordProducer(live, "test") as producer:
        producer.send(Topic.ROLLOUTS, rollout("later", "g0"), key="g0", timestamp_ms=START_MS + 60_000)
    _, copied = replay(live, into, topics=("rollouts", "groups"), resume=replay_id)
    assert copied["there"] == there < whole
    assert copied["there"] + copied["written"] == whole
    for topic in ("rollouts", "groups"):
        originals, copied_records = records_of(live, topic), records_of(under(live, into), topic)
        for partition in range(PARTITIONS):
            kept = [r.value for r in originals[partition] if r.timestamp_ms < START_MS + 60_000]
            assert [r.value for r in copied_records[partition]] == kept, "what came after it began is not copied"


def count(live, into):
    """Count the copies that are in the target now."""
    with closing(LogSource(under(live, into))) as source:
        return sum(held.end for held in source.whole(["rollouts", "groups"]).values())
