"""The SDK against a real log: one delivery, in the interaction's partition, and no call waits beyond its deadline."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import httpx
import pytest

from tests.producers.feedback_support import (
    DEADLINE_S,
    FORGER,
    NOWHERE,
    PRODUCT,
    StallingLog,
    printed_blocks,
    pseudonym,
    token,
    written,
)
from tests.producers.test_gateway import FREE, event, problem, serving
from tests.waiting import until
from tidemill.producers import AsyncFeedbackProducer, FeedbackProducer
from tidemill.producers import feedback as feedback_module
from tidemill.producers.feedback import (
    BadFeedback,
    FailedEvent,
    FeedbackNotDelivered,
    FeedbackQueueFull,
    LogUnreachable,
    NotServed,
    queue,
)
from tidemill.producers.product.settings import KeysMissing, ProductSettings
from tidemill.schemas.catalogue import Names, Topic, feedback_key
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import Codec, RegistryError
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.producer import partition_of
from tidemill.schemas.records import SignalKind

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("patient")]


@pytest.fixture
def settings(kafka) -> KafkaSettings:
    return kafka.fresh(topics=[Topic.FEEDBACK])


def test_a_sent_signal_is_written_unchanged(settings: KafkaSettings):
    with FeedbackProducer(settings, PRODUCT, source="shop") as feedback:
        up = feedback.thumbs_up(token(), user="ann")
        down = feedback.thumbs_down(token(), user="ann", corrects=up, observed_at=now_us())
        back = feedback.withdraw(token(), down, user="ann", event_id="back-1")
        kept = feedback.send(token(), "edit_kept_soon", 0.25, user="ann")
    found = {located.record.event_id: located for located in written(settings)}
    assert list(found) == [up, down, back, kept] and back == "back-1"
    records = [located.record for located in found.values()]
    assert [(r.kind, r.value, r.corrects) for r in records] == [
        (SignalKind.THUMB, 1.0, None),
        (SignalKind.THUMB, -1.0, up),
        (SignalKind.THUMB, None, down),
        (SignalKind.EDIT_KEPT_SOON, 0.25, None),
    ]
    assert {(r.interaction_id, r.user_id, r.source) for r in records} == {("i-1", pseudonym(), "shop")}


def test_each_signal_has_its_own_key_and_is_in_its_interactions_partition(settings: KafkaSettings):
    with FeedbackProducer(settings, PRODUCT) as feedback:
        for number in range(40):
            feedback.thumbs_up(token(f"i-{number}"), user="ann")
            feedback.send(token(f"i-{number}"), "retry", 1, user="ann")
    found = written(settings)
    assert len(found) == 80
    assert [f.partition for f in found] == [partition_of(f.record.interaction_id, 2) for f in found]
    assert {f.partition for f in found} == {0, 1}
    assert [f.key for f in found] == [feedback_key(f.record.interaction_id, f.record.event_id).encode() for f in found]


def test_the_partition_count_is_the_logs_own(kafka):
    other = kafka.fresh(3, [Topic.FEEDBACK])
    with FeedbackProducer(other.model_copy(update={"partitions": None}), PRODUCT) as feedback:
        for number in range(20):
            feedback.thumbs_up(token(f"i-{number}"), user="ann")
    found = written(other)
    assert [f.partition for f in found] == [partition_of(f.record.interaction_id, 3) for f in found]


def test_bad_signals_are_refused_at_once_and_not_written(settings: KafkaSettings):
    with FeedbackProducer(settings, PRODUCT) as feedback:
        with pytest.raises(BadFeedback, match="1 or -1"):
            feedback.send(token(), "thumb", 3, user="ann")
        with pytest.raises(NotServed):
            feedback.thumbs_up(token(), user="bob")
        with pytest.raises(NotServed):
            feedback.thumbs_up(token(product=FORGER), user="ann")
        assert feedback.counts.accepted == 0
    assert written(settings) == []


def test_threads_share_a_producer_and_nothing_is_lost_or_doubled(settings: KafkaSettings):
    def votes(thread: int) -> None:
        for number in range(100):
            feedback.thumbs_up(token(f"i-{number}"), user="ann", event_id=f"t{thread}-{number}")

    with FeedbackProducer(settings, PRODUCT) as feedback:
        threads = [threading.Thread(target=votes, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        feedback.flush()
        counts = feedback.counts
        assert (counts.accepted, counts.delivered, counts.failed, counts.pending) == (800, 800, 0, 0)
    seen = Counter(located.record.event_id for located in written(settings))
    assert seen == Counter({f"t{thread}-{number}": 1 for thread in range(8) for number in range(100)})


def test_a_log_that_does_not_answer_costs_no_more_than_the_deadline():
    with FeedbackProducer(NOWHERE, PRODUCT, deadline_s=0.3) as feedback:
        begun = time.monotonic()
        with pytest.raises(LogUnreachable, match="within the deadline"):
            feedback.thumbs_up(token(), user="ann")
        assert time.monotonic() - begun < 30
        assert feedback.counts.accepted == 0


def test_the_error_for_a_missing_topic_says_how_to_create_it(kafka, topic_prefix):
    absent = KafkaSettings(bootstrap=kafka.bootstrap, topic_prefix=topic_prefix)
    with (
        FeedbackProducer(absent, PRODUCT) as feedback,
        pytest.raises(LookupError, match="tidemill topics --create"),
    ):
        feedback.thumbs_up(token(), user="ann")


def answer_of_a_broker(monkeypatch, partitions: dict[int, None]) -> None:
    class Answered(queue.Producer):  # type: ignore[misc]  # the client's class is not typed
        def list_topics(self, **_):
            named = SimpleNamespace(partitions=partitions, error="no leader")
            return SimpleNamespace(topics={Names(KafkaSettings().topic_prefix).of(Topic.FEEDBACK): named})

    monkeypatch.setattr(queue, "Producer", Answered)


def test_a_topic_whose_partitions_no_broker_names_is_an_unreachable_log(monkeypatch):
    answer_of_a_broker(monkeypatch, {})
    with FeedbackProducer(NOWHERE, PRODUCT) as feedback, pytest.raises(LogUnreachable, match="no leader"):
        feedback.thumbs_up(token(), user="ann")


async def test_a_schema_registry_that_fails_is_an_unreachable_log_and_blocks_no_event_loop(monkeypatch):
    asked_in = []

    def fail(_codec: Codec, _record: object) -> bytes:
        asked_in.append(threading.current_thread())
        raise RegistryError("the schema registry failed")

    answer_of_a_broker(monkeypatch, {0: None})
    monkeypatch.setattr(Codec, "encode", fail)
    with FeedbackProducer(NOWHERE, PRODUCT) as feedback:
        with pytest.raises(LogUnreachable, match="schema registry"):
            feedback.thumbs_up(token(), user="ann")
        assert feedback.counts.accepted == 0
    asked_in.clear()
    async with AsyncFeedbackProducer(NOWHERE, PRODUCT) as feedback:
        for _ in range(2):
            with pytest.raises(LogUnreachable, match="schema registry"):
                await feedback.thumbs_up(token(), user="ann")
    assert len(asked_in) == 2 and threading.current_thread() not in asked_in


def test_a_failure_is_reported_also_if_the_schema_registry_has_failed_by_then(monkeypatch):
    kafka = KafkaSettings(bootstrap=NOWHERE, registry_url="mock://feedback")
    answer_of_a_broker(monkeypatch, {0: None})
    with FeedbackProducer(kafka, PRODUCT, delivery_timeout_s=0.1) as feedback:
        monkeypatch.setattr(type(feedback._queue._codec._registry._client), "get_schema", None)
        for count, name in enumerate(("first", "second"), 1):  # the thread of the callbacks lives on
            feedback.thumbs_up(token(), user="ann", event_id=name)
            until(lambda count=count: feedback.counts.failed == count, "the failure")
        with pytest.raises(FeedbackNotDelivered) as lost:
            feedback.flush(DEADLINE_S)
        assert [failed.event.event_id for failed in lost.value.failed] == ["first", "second"]


def deliver(feedback: FeedbackProducer, name: str, event_id: str) -> int:
    """Send a signal until the log has it, since a slow machine may need several deadlines. Return the failed tries."""
    for tries in range(60):
        try:
            feedback.thumbs_up(token(name), user="ann", event_id=event_id)
            feedback.flush(DEADLINE_S)
            return tries
        except (LogUnreachable, FeedbackNotDelivered):
            continue
    pytest.fail("no signal was delivered")


def test_a_full_queue_is_an_error_within_the_deadline_and_no_accepted_signal_is_lost(stalling: StallingLog):
    with FeedbackProducer(stalling.settings, PRODUCT, deadline_s=0.4, max_queued=10) as feedback:
        deliver(feedback, "full", "before")
        with stalling.stalled():
            taken = {feedback.thumbs_up(token("full"), user="ann", event_id=f"e{number}") for number in range(10)}
            begun = time.monotonic()
            with pytest.raises(FeedbackQueueFull):
                feedback.thumbs_up(token("full"), user="ann", event_id="too-many")
            assert 0.35 < time.monotonic() - begun < 60
            assert feedback.counts.pending == 10
        feedback.flush(DEADLINE_S)
    found = [f.record.event_id for f in written(stalling.settings) if f.record.interaction_id == "full"]
    assert sorted(found) == sorted({"before", *taken})


def test_a_retry_of_the_client_writes_nothing_twice(stalling: StallingLog):
    impatient = {"socket.timeout.ms": "1000", "request.timeout.ms": "1000", "reconnect.backoff.max.ms": "200"}
    settings = stalling.settings.model_copy(update={"client_options": impatient})
    with FeedbackProducer(settings, PRODUCT) as feedback:
        deliver(feedback, "retried", "first")
        for round_number in range(2):
            with stalling.stalled():
                for number in range(20):
                    feedback.thumbs_up(token("retried"), user="ann", event_id=f"{round_number}-{number}")
                # Longer than the request's timeout: the client assumes a lost broker and sends the batch again.
                with pytest.raises(FeedbackNotDelivered, match="not acknowledged within"):
                    feedback.flush(2.5)
            feedback.flush(DEADLINE_S)
        assert feedback.counts.delivered == 41
    seen = Counter(f.record.event_id for f in written(settings) if f.record.interaction_id == "retried")
    assert len(seen) == 41 and set(seen.values()) == {1}


def test_a_signal_that_was_not_written_is_reported_and_raised(stalling: StallingLog):
    failures: list[FailedEvent] = []
    told = threading.Event()

    def on_failure(failure: FailedEvent) -> None:
        if failure.event.event_id == "lost-1":
            failures.append(failure)
            told.set()
        raise RuntimeError("a callback that fails")

    feedback = FeedbackProducer(stalling.settings, PRODUCT, delivery_timeout_s=1.0, on_failure=on_failure)
    failed = deliver(feedback, "lost", "before")
    with stalling.stalled():
        lost = feedback.thumbs_up(token("lost"), user="ann", event_id="lost-1")
        assert told.wait(DEADLINE_S)
    assert [failure.event.event_id for failure in failures] == [lost]
    with pytest.raises(FeedbackNotDelivered, match="1 signals not delivered") as raised:
        feedback.flush()
    assert [failure.event.event_id for failure in raised.value.failed] == [lost]
    failed += deliver(feedback, "lost", "lost-1")
    assert feedback.counts.failed == failed + 1 and feedback.counts.delivered == 2
    feedback.close()
    with pytest.raises(RuntimeError, match="closed"):
        feedback.thumbs_up(token("lost"), user="ann")
    feedback.close()


def test_a_signal_not_acknowledged_at_close_has_failed(stalling: StallingLog):
    feedback = FeedbackProducer(stalling.settings, PRODUCT)
    deliver(feedback, "closing", "first")
    with stalling.stalled():
        feedback.thumbs_up(token("closing"), user="ann", event_id="late")
        with pytest.raises(FeedbackNotDelivered, match="before the producer was closed"):
            feedback.close(0.2)
    assert feedback.counts.pending == 0 and feedback.counts.failed == 1


def send_until_taken(client: httpx.Client, body: dict) -> None:
    """Send the event again after each 503, as a client does."""

    def taken() -> bool:
        status = client.post("/v1/feedback", json=body).status_code
        assert status in (202, 503)
        return status == 202

    until(taken, "the event accepted", 2 * DEADLINE_S)


def test_a_stalled_log_is_503_of_the_gateway_and_the_retry_counts_once(stalling: StallingLog):
    settings = FREE.model_copy(update={"acknowledge_timeout_s": 1.0, "max_queued": 5})
    with serving(stalling.settings, settings) as client:
        send_until_taken(client, event("stalled"))
        events = [event("stalled", event_id=f"s{n}") for n in range(8)]
        with stalling.stalled():
            refused = client.post("/v1/feedback", json=event("stalled", event_id="s9"))
            assert "send it again with the same event_id" in problem(refused, 503)
            assert int(refused.headers["retry-after"]) >= 1
            whole = client.post("/v1/feedback/batch", json={"events": events})
            assert whole.status_code == 503 and whole.headers["retry-after"]
            assert {result["event_id"] for result in whole.json()["results"]} == {f"s{n}" for n in range(8)}
            assert {result["status"] for result in whole.json()["results"]} == {503}
            assert client.get("/healthz").status_code == 503
        for late in [*events, event("stalled", event_id="s9")]:
            send_until_taken(client, late)
    keys = {f.key for f in written(stalling.settings) if f.record.interaction_id == "stalled"}
    assert keys == {f"stalled/{name}".encode() for name in ["e-1", "s9", *(f"s{n}" for n in range(8))]}


QUICK_EXIT = """
import json, sys
from tidemill.producers import FeedbackProducer
from tidemill.producers.product.settings import ProductSettings
from tidemill.schemas.config import KafkaSettings

kafka = KafkaSettings(bootstrap=sys.argv[1], topic_prefix=sys.argv[2])
# The end of the process does not wait for `linger_ms`.
feedback = FeedbackProducer(kafka, ProductSettings.from_environment(), linger_ms=100_000, deadline_s=90)
for token in json.loads(sys.argv[3]):
    feedback.thumbs_up(token, user="ann")
assert feedback.counts.delivered == 0
"""


def test_the_end_of_a_process_flushes(settings: KafkaSettings):
    tokens = json.dumps([token(f"i-{number}") for number in range(50)])
    arguments = [sys.executable, "-c", QUICK_EXIT, settings.bootstrap, settings.topic_prefix, tokens]
    environment = {**os.environ, **PRODUCT.environment()}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert len(written(settings)) == 50


def test_a_producer_made_before_a_fork_raises_an_error(settings: KafkaSettings):
    with FeedbackProducer(settings, PRODUCT) as feedback:
        child = os.fork()
        if child == 0:
            try:
                feedback.thumbs_up(token(), user="ann")
            except RuntimeError as error:
                feedback.close()
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_producer_needs_keys_brokers_and_a_name():
    with pytest.raises(KeysMissing, match="openssl rand"):
        FeedbackProducer(NOWHERE, ProductSettings())
    with pytest.raises(ValueError, match="no Kafka address"):
        FeedbackProducer("", PRODUCT)
    with pytest.raises(ValueError, match="source"):
        FeedbackProducer(NOWHERE, PRODUCT, source="a b")
    for wrong in ({"deadline_s": math.inf}, {"deadline_s": math.nan}, {"delivery_timeout_s": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*: give seconds above 0"):
            FeedbackProducer(NOWHERE, PRODUCT, **wrong)


async def test_an_awaited_signal_is_in_the_log(settings: KafkaSettings):
    async with AsyncFeedbackProducer(settings, PRODUCT) as feedback:
        up = await feedback.thumbs_up(token(), user="ann")
        assert [f.record.event_id for f in await asyncio.to_thread(written, settings)] == [up]
        await feedback.withdraw(token(), up, user="ann")
        sends = [feedback.send(token(f"i-{n}"), "undo", 1, user="ann") for n in range(200)]
        assert len(set(await asyncio.gather(*sends))) == 200
        with pytest.raises(BadFeedback):
            await feedback.send(token(), "undo", 2, user="ann")
        assert feedback.counts.delivered == 202
    assert len(written(settings)) == 202


async def test_awaiting_does_not_block_other_tasks_and_ends_by_the_deadline(stalling: StallingLog):
    async def ticks(over: asyncio.Event) -> int:
        count = 0
        while not over.is_set():
            await asyncio.sleep(0.001)
            count += 1
        return count

    async def connect(feedback: AsyncFeedbackProducer) -> None:
        for attempt in range(60):
            try:
                await feedback.thumbs_up(token("awaited"), user="ann", event_id=f"up{attempt}")
                return
            except (LogUnreachable, FeedbackNotDelivered):  # a slow machine may need several deadlines
                continue
        pytest.fail("no signal was acknowledged before the stall")

    async with AsyncFeedbackProducer(stalling.settings, PRODUCT, deadline_s=1.0, max_queued=3) as feedback:
        await connect(feedback)
        over = asyncio.Event()
        ticking = asyncio.create_task(ticks(over))
        with stalling.stalled():
            sends = [feedback.send(token("awaited"), "undo", 1, user="ann", event_id=f"a{n}") for n in range(5)]
            ended = await asyncio.gather(*sends, return_exceptions=True)
        over.set()
        assert await ticking > 20, "if each send blocked the loop, it would turn once or twice between two of them"
        assert Counter(type(error) for error in ended) == {FeedbackNotDelivered: 3, FeedbackQueueFull: 2}
    found = {f.record.event_id for f in written(stalling.settings) if f.record.interaction_id == "awaited"}
    assert {"a0", "a1", "a2"} < found and not {"a3", "a4"} & found


async def test_awaiting_a_log_that_does_not_answer_ends_by_the_deadline():
    begun = time.monotonic()
    async with AsyncFeedbackProducer(NOWHERE, PRODUCT, deadline_s=0.3) as feedback:
        sends = [feedback.thumbs_up(token(f"i-{n}"), user="ann") for n in range(200)]
        ended = await asyncio.gather(*sends, return_exceptions=True)
        assert {type(error) for error in ended} == {LogUnreachable}
    assert time.monotonic() - begun < 30  # sequentially they would take a minute


def test_the_sdk_installs_without_the_rest():
    absent = ("torch", "transformers", "vllm", "faust", "aiokafka", "fastapi", "starlette", "uvicorn", "numba", "chdb")
    blocked = f"import sys\nfor name in {absent}: sys.modules[name] = None\n"
    code = f"{blocked}from tidemill.producers import FeedbackProducer, AsyncFeedbackProducer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_quickstart_runs_as_it_is_printed(settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch):
    for name, value in PRODUCT.environment().items():
        monkeypatch.setenv(name, value)
    found = printed_blocks(feedback_module)
    assert len(found) == 2 and all(len(code.splitlines()) <= 11 for code in found)
    for code in found:
        # Replace the placeholder address with the test's broker and topics.
        assert '"kafka:9092"' in code
        exec(code.replace('"kafka:9092"', "kafka"), {"token": token(user="ann@example.com"), "kafka": settings})
    kinds = Counter((f.record.kind.value, f.record.value) for f in written(settings))
    assert kinds == {("thumb", 1.0): 1, ("edit_kept_soon", 0.8): 1, ("thumb", None): 2, ("thumb", -1.0): 1}
