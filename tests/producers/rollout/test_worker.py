"""The rollout worker: committed offsets, the end of every task, and the whole role on a real Kafka."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from aiohttp import web
from confluent_kafka import Consumer, TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from tests.records import build
from tests.waiting import until
from tidemill.producers.config import RolloutSettings
from tidemill.producers.outbox import Outbox, anchor_of_run
from tidemill.producers.rollout import worker
from tidemill.producers.rollout.intake import OffsetTracker
from tidemill.producers.rollout.player import EXPIRED
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import ChatSettings, KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import DeliveryError, RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Anchor, Dispatch, Manifest, Rollout, RolloutStatus, Task, Tick, Turn
from tidemill.schemas.stored_object import claimed

pytestmark = pytest.mark.anyio

RUN = RunSettings(run_id="run")
DEADLINE_S = 180.0
HOUR_US = 3_600_000_000
PARTITION = (Topic.TASKS, 0)


def task(index=0, group_size=4, payload='{"entries":[3,4]}', deadline_in_us=HOUR_US, **changes) -> Task:
    name = f"run/train/{index}"
    now = now_us()
    made = build(Task, task_id=name, payload=payload, group_size=group_size, max_turns=6, issued_at=now,
                 deadline_at=now + deadline_in_us)  # fmt: skip
    return replace(made, **changes)


# -- offsets --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 3), min_size=1, max_size=12), st.data())
def test_no_offset_is_committed_past_unfinished_work(gaps, data):
    tracker, offset, unfinished, begun = OffsetTracker(), 0, set(), []
    for gap in gaps:
        offset += gap
        assert tracker.begin(PARTITION, offset)
        unfinished.add(offset)
        begun.append(offset)
        for done in data.draw(st.lists(st.sampled_from(begun), max_size=3)):
            tracker.finish(PARTITION, done)
            unfinished.discard(done)
        offsets = tracker.committable()
        if PARTITION in offsets:
            assert offsets[PARTITION] <= min(unfinished, default=offset + 1)
            tracker.committed.update(offsets)
            assert tracker.committable() == {}
    for done in unfinished:
        tracker.finish(PARTITION, done)
    tracker.committed.update(tracker.committable())
    assert not any(tracker.begin(PARTITION, again) for again in begun), "delivered again, begun once"


def test_a_partition_that_is_assigned_again_starts_without_old_offsets():
    tracker = OffsetTracker()
    tracker.begin(PARTITION, 5)
    tracker.drop(PARTITION)
    tracker.finish(PARTITION, 5)
    assert tracker.committable() == {} and tracker.partitions() == set()
    assert tracker.begin(PARTITION, 5)


# -- refused tasks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (None, "no schema"),
        (Tick("t", 0), "a Tick is not a task"),
        (task(group_size=0), "group_size is 0"),
        (task(group_size=2**40), "group_size is 1099511627776"),
        (task(max_turns=0), "max_turns is 0"),
    ],
)
def test_a_task_that_cannot_be_played_is_refused(record, reason):
    located = ConsumedRecord(Topic.TASKS, 0, 0, 0, b"", b"", record, "no schema" if record is None else "")
    assert reason in worker.refusal(located, RolloutSettings())
    assert worker.refusal(replace(located, record=task()), RolloutSettings()) is None


def settings_for(*replicas, **changes) -> RolloutSettings:
    addresses = [replica.address for replica in replicas]
    return RolloutSettings(
        **{"replicas": addresses, "worker_id": "w", "backoff_s": 0.01, "backoff_limit_s": 0.05, **changes}
    )


# -- the outbox -----------------------------------------------------------------------------------------------------


async def test_a_refused_batch_raises_in_its_writers():
    class Full:
        def __init__(self):
            self.sent = []

        def send(self, _topic, record, *, key):
            self.sent.append(record.at)

        def flush(self):
            sent, self.sent = self.sent, []
            if 1 in sent:
                raise DeliveryError("the log is full")

    outbox = Outbox(Full(), Topic.ROLLOUTS, lambda record: record)
    with pytest.raises(DeliveryError):
        await outbox.write("k", Tick("t", 1))
    await outbox.write("k", Tick("t", 2))
    outbox.post("k", Tick("t", 1))
    with pytest.raises(DeliveryError):
        await outbox.drain()
    outbox.post("k", Tick("t", 3))  # its rollout has not failed
    with pytest.raises(DeliveryError):
        await outbox.write("k", Tick("t", 4))
    await outbox.write("k", Tick("t", 5))
    await outbox.drain()
    outbox.close()


async def test_what_waits_behind_a_refused_batch_is_not_written():
    class Slow:
        def send(self, _topic, record, *, key):
            sent.append(record.at)

        def flush(self):
            begun.set()
            if sent == [1]:
                assert go.wait(DEADLINE_S)
                raise DeliveryError("the log does not answer")

    sent, begun, go = [], threading.Event(), threading.Event()
    outbox = Outbox(Slow(), Topic.ROLLOUTS, lambda record: record)
    first = asyncio.create_task(outbox.write("k", Tick("t", 1)))
    assert await asyncio.to_thread(begun.wait, DEADLINE_S)
    second = asyncio.create_task(outbox.write("k", Tick("t", 2)))
    await asyncio.sleep(0)
    go.set()
    ended = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(each) for each in ended] == [DeliveryError, DeliveryError] and sent == [1]
    await outbox.write("k", Tick("t", 3))
    outbox.close()
    assert sent == [1, 3]


async def test_a_record_that_the_store_refuses_fails_alone():
    class Log:
        def send(self, _topic, record, *, key):
            written.append(record.at)

        def flush(self):
            pass

    def prepare(record):
        if record.at == 1:
            raise OSError("the store is down")
        return record

    written, outbox = [], Outbox(Log(), Topic.ROLLOUTS, prepare)
    ended = await asyncio.gather(*(outbox.write("k", Tick("t", at)) for at in (0, 1, 2)), return_exceptions=True)
    assert [str(each) for each in ended] == ["None", "the store is down", "None"] and written == [0, 2]
    outbox.post("k", Tick("t", 1))
    await outbox.write("k", Tick("t", 3))
    with pytest.raises(OSError, match="the store is down"):
        await outbox.drain()
    outbox.close()


# -- the role on a real Kafka ---------------------------------------------------------------------------------------


@pytest.fixture
def log(kafka) -> KafkaSettings:
    return kafka.fresh(topics=[Topic.TASKS, Topic.ROLLOUTS, Topic.PROGRESS, Topic.MANIFESTS])


class Bench:
    """Starts workers and reads their records."""

    def __init__(self, log: KafkaSettings, store: StoreSettings, tokenizer_dir):
        self.log, self.store, self.tokenizer = log, store, str(tokenizer_dir)
        self.codec = Codec()

    def issue(self, *tasks: Task) -> None:
        with RecordProducer(self.log, "test-feeder") as producer:
            producer.send_acked(Topic.TASKS, [(task.task_id, task) for task in tasks])

    @contextmanager
    def worker(self, settings: RolloutSettings):
        """Run a worker; raise its error at the end."""
        stop, raised = threading.Event(), []
        settings = settings.model_copy(update={"tokenizer": self.tokenizer})

        def body():
            try:
                worker.run(self.log, RUN, self.store, settings, ChatSettings(), stop)
            except Exception as error:  # raised again in the test's own thread
                logging.getLogger(__name__).exception("the worker ended")
                raised.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        assert raised == []

    def rollouts(self, wanted: Callable[[list[Rollout]], bool]) -> list[Rollout]:
        """Return all of `rollouts` as soon as `wanted` is true for it."""
        found: list[Rollout] = []
        with LogReader(self.log, [Topic.ROLLOUTS]) as reader:

            def enough() -> bool:
                found.extend(located.record for located in reader.poll(0.1))
                return wanted(found)

            until(enough, lambda: Counter(rollout.group_id for rollout in found))
        return found

    def progress(self) -> list[Dispatch | Turn]:
        with LogReader(self.log, [Topic.PROGRESS]) as reader:
            return [located.record for located in reader.read_to_end()]

    def dead_letters(self) -> list[tuple[bytes | None, dict[str, bytes]]]:
        consumer = Consumer({"bootstrap.servers": self.log.bootstrap, "group.id": self.log.topic_prefix})
        topic = Names(self.log.topic_prefix).dead_letter(Topic.TASKS)
        partitions = [TopicPartition(topic, p, 0) for p in consumer.list_topics(topic).topics[topic].partitions]
        total = sum(consumer.get_watermark_offsets(partition)[1] for partition in partitions)
        consumer.assign(partitions)
        letters = consumer.consume(total, DEADLINE_S) if total else []
        consumer.close()
        return [(letter.value(), dict(letter.headers())) for letter in letters]

    def uncommitted(self) -> int:
        """Return the number of tasks after the workers' committed offsets."""
        group = f"{self.log.topic_prefix}rollout.{RUN.run_id}"
        consumer = Consumer({"bootstrap.servers": self.log.bootstrap, "group.id": group})
        topic = Names(self.log.topic_prefix).of(Topic.TASKS)
        places = consumer.committed([TopicPartition(topic, partition) for partition in range(2)])
        left = sum(consumer.get_watermark_offsets(place)[1] - max(place.offset, 0) for place in places)
        consumer.close()
        return left


@pytest.fixture
def bench(log, tmp_path, tokenizer_dir) -> Bench:
    return Bench(log, StoreSettings(root=str(tmp_path / "store")), tokenizer_dir)


def whole(count: int, size: int = 4) -> Callable[[list[Rollout]], bool]:
    """Return a condition: all rollouts of `count` groups of `size` are there."""
    return lambda found: len({rollout.rollout_id for rollout in found}) >= count * size


def test_every_task_ends_as_rollouts_or_as_a_dead_letter(bench, new_replica):
    replica = new_replica()
    names = Names(bench.log.topic_prefix)
    bench.issue(task(0), task(1, payload="?"), task(2, group_size=0), task(3, environment="chess"), task(4, run_id="o"))
    with RecordProducer(bench.log, "poisoner") as producer:
        for value in (b"\xc3\x01nothing", b"", None):
            producer.send_bytes(names.of(Topic.TASKS), value, key=b"x")
    bench.issue(task(5), task(6, deadline_in_us=-1), task(7, run_id="o", group_size=2000))
    with bench.worker(settings_for(replica)):
        found = bench.rollouts(whole(5))
    by_group = Counter((rollout.group_id, rollout.status) for rollout in found)
    assert by_group == {
        ("run/train/0", RolloutStatus.COMPLETED): 4,
        ("run/train/1", RolloutStatus.FAILED): 4,
        ("run/train/3", RolloutStatus.FAILED): 4,
        ("run/train/5", RolloutStatus.COMPLETED): 4,
        ("run/train/6", RolloutStatus.FAILED): 4,
    }
    reasons = {rollout.group_id: rollout.failure for rollout in found if rollout.failure}
    assert reasons["run/train/6"] == EXPIRED
    letters = bench.dead_letters()
    refused = [headers["tidemill-reason"] for value, headers in letters if value and b"run/train/2" in value]
    assert len(letters) == 4 and refused == [b"group_size is 0, allowed are 1 to 1024"]
    assert bench.uncommitted() == 0


def test_rollouts_interrupted_by_shutdown_are_played_again_with_the_same_ids(bench, new_replica):
    replica = new_replica()
    stuck = threading.Event()

    async def answer(request, number):
        while stuck.is_set() and number > 9:
            await asyncio.sleep(0.01)
        return await replica.solve(request, number)

    replica.answer = answer
    stuck.set()
    bench.issue(*[task(index) for index in range(4)])
    with bench.worker(settings_for(replica, grace_s=0.1, record_turns=False)):
        until(lambda: len(replica.requests) >= 12)
    assert bench.uncommitted() > 0, "unfinished tasks are not committed"
    assert {type(record) for record in bench.progress()} == {Dispatch}
    stuck.clear()
    with bench.worker(settings_for(replica)):
        found = bench.rollouts(whole(4))
    assert {rollout.rollout_id for rollout in found} == {f"run/train/{i}/{j}" for i in range(4) for j in range(4)}
    assert all(rollout.success for rollout in found)
    assert bench.uncommitted() == 0


def test_a_replica_that_is_killed_and_restarted_loses_nothing(bench, new_replica):
    replica = new_replica()
    bench.issue(*[task(index) for index in range(20)])
    with bench.worker(settings_for(replica, max_concurrent_episodes=8)):
        bench.rollouts(lambda found: len(found) > 8)
        replica.stop()
        replica.start()
        found = bench.rollouts(whole(20))
    assert all(rollout.status is RolloutStatus.COMPLETED for rollout in found)


def test_a_second_worker_takes_its_share(bench, new_replica):
    replicas = [new_replica("r1"), new_replica("r2")]
    found, issued = [], 0
    with bench.worker(settings_for(replicas[0])), bench.worker(settings_for(replicas[1], worker_id="v")):
        deadline = time.monotonic() + 180
        while {rollout.replica_id for rollout in found} != {"r1", "r2"}:
            assert time.monotonic() < deadline
            bench.issue(*[task(index, group_size=1) for index in range(issued, issued + 8)])
            issued += 8
            found = bench.rollouts(whole(issued, size=1))
    assert all(rollout.success for rollout in found)
    assert bench.uncommitted() == 0


def test_the_tasks_of_a_partition_that_moves_are_played_by_its_new_owner(bench, new_replica):
    stuck, sound = new_replica("stuck"), new_replica("sound")

    async def never(_request, _number):
        return web.Response(status=503)

    stuck.answer = never
    bench.issue(*[task(index) for index in range(6)])
    with bench.worker(settings_for(stuck, grace_s=0.0)):
        until(lambda: stuck.requests)
        with bench.worker(settings_for(sound, worker_id="v")):
            bench.rollouts(lambda found: any(rollout.replica_id == "sound" for rollout in found))
    with bench.worker(settings_for(sound)):
        found = bench.rollouts(whole(6))
    assert {rollout.replica_id for rollout in found if rollout.success} == {"sound"}
    assert bench.uncommitted() == 0


def test_the_first_of_two_workers_with_one_name_ends_with_an_error(bench, new_replica):
    settings = settings_for(new_replica())
    with pytest.raises(AssertionError, match=r"give every worker its own rollout\.worker_id"), bench.worker(settings):
        bench.issue(task(0))
        bench.rollouts(whole(1))
        with bench.worker(settings):
            bench.issue(task(1))
            bench.rollouts(whole(2))


def test_a_worker_restarted_with_its_name_gets_its_tasks_at_once(bench, new_replica):
    bench.log = bench.log.model_copy(update={"client_options": {"session.timeout.ms": "280000"}})
    settings = settings_for(new_replica())
    with bench.worker(settings):
        bench.issue(task(0))
        bench.rollouts(whole(1))
    bench.issue(*[task(index) for index in range(1, 9)])
    with bench.worker(settings):
        began = time.monotonic()
        bench.rollouts(whole(9))
    assert time.monotonic() - began < 180.0, "a session of 280 s is not waited for"


def test_a_large_rollout_has_its_segments_in_the_store(bench, new_replica):
    settings = settings_for(new_replica(), claim_check_bytes=1)
    bench.issue(task(0))
    with bench.worker(settings):
        found = bench.rollouts(whole(1))
    for rollout in found:
        assert rollout.segments == [] and rollout.claim is not None
        restored = claimed(rollout, bench.codec)
        assert restored.segments[0].n_tokens > 0
        assert replace(restored, segments=[], claim=rollout.claim) == rollout


def test_the_checkpoint_is_the_first_anchor(log, tokenizer_dir):
    manifest = build(Manifest, learning_rate=0.1, anchor=Anchor(str(tokenizer_dir), 1))
    with RecordProducer(log, "test-trainer") as producer:
        producer.send_acked(Topic.MANIFESTS, [("main", replace(manifest, run_id="other")), ("main", manifest)])
    assert anchor_of_run(log, RUN, threading.Event()) == str(tokenizer_dir)
    stopped = threading.Event()
    stopped.set()
    assert anchor_of_run(log, RUN, stopped) is None


# -- killed workers -------------------------------------------------------------------------------------------------

KILLS, PLAYED = 2, 6
ENTRIES = '{"entries":[3,4,5,6,7,8]}'
PROCESS = """
import json, sys
from tidemill.producers.config import RolloutSettings
from tidemill.producers.rollout import worker
from tidemill.schemas.config import ChatSettings, KafkaSettings, RunSettings, StoreSettings
sections = zip((KafkaSettings, RunSettings, StoreSettings, RolloutSettings, ChatSettings), json.loads(sys.argv[1]))
worker.run(*[section(**values) for section, values in sections])
"""


@contextmanager
def process(bench: Bench, settings: RolloutSettings) -> Iterator[subprocess.Popen]:
    """Run a worker in its own process; kill it at the end."""
    rollout = settings.model_copy(update={"tokenizer": bench.tokenizer})
    sections = [each.model_dump(mode="json") for each in (bench.log, RUN, bench.store, rollout, ChatSettings())]
    running = subprocess.Popen([sys.executable, "-c", PROCESS, json.dumps(sections)])
    try:
        yield running
    finally:
        running.kill()
        running.wait(60)


def test_the_rollouts_of_a_killed_worker_are_finished_once_and_go_on_from_their_turns(bench, new_replica):
    replica, rng, sampled = new_replica(), random.Random(5), []

    async def slow(request, number):
        await asyncio.sleep(0.05)
        response = await replica.solve(request, number)
        sampled.append(len(json.loads(response.body)["choices"][0]["token_ids"]))
        return response

    replica.answer = slow
    settings = settings_for(replica, max_concurrent_episodes=8)
    bench.issue(*[task(index, payload=ENTRIES, max_turns=9) for index in range(PLAYED)])
    with LogReader(bench.log, [Topic.PROGRESS]) as reader:
        turns = 0

        def sampled_and_recorded(requests: int, in_hand: int) -> bool:
            nonlocal turns
            turns += sum(isinstance(located.record, Turn) for located in reader.poll(0.005))
            return len(replica.requests) >= requests and len(sampled) - turns <= in_hand

        for kill in range(1, KILLS + 1):
            wanted = len(replica.requests) + rng.randrange(20, 45)
            with process(bench, settings):
                # A broker that is slow at the kill would not have the turns of the last seconds yet.
                until(lambda wanted=wanted, kill=kill: sampled_and_recorded(wanted, 10 * kill), pause_s=0)
    with process(bench, settings):
        found = bench.rollouts(whole(PLAYED))
    ids = Counter(rollout.rollout_id for rollout in found)
    assert set(ids) == {f"run/train/{i}/{j}" for i in range(PLAYED) for j in range(4)}
    assert max(ids.values()) == 1, "a rollout that the log had was not played again"
    assert all(rollout.success and rollout.turns == 7 for rollout in found)
    dispatches = [record for record in bench.progress() if isinstance(record, Dispatch)]
    assert sum(sum(dispatch.resumed_turns) for dispatch in dispatches) > 0
    assert sum(isinstance(record, Turn) for record in bench.progress()) >= 4 * 7 * PLAYED
    assert all(dispatch.at < dispatch.lease_until for dispatch in dispatches)
    repeated = sum(sampled) / sum(rollout.sampled_tokens for rollout in found) - 1
    assert repeated < 2.5 * 8 * KILLS / (4 * 7 * PLAYED), "some two turns of each episode in hand at each kill"
