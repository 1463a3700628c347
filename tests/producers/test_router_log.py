"""The router as a process on a real Kafka: its answers are in the log, the gate's decisions reach the users."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from aiohttp import web

from tests.producers.feedback_support import DEADLINE_S, url_in
from tests.producers.router_support import KEY, PRODUCT, RUN, FakeReplica, chunks, decision, interaction_of
from tests.records import build
from tests.waiting import until
from tidemill.producers.config import RouterSettings
from tidemill.producers.edge.request_handler import open_recorder
from tidemill.producers.edge.router import run
from tidemill.producers.product.settings import key_hash
from tidemill.producers.product.signing import Pseudonyms, Signer
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import ChatSettings, KafkaSettings, StoreSettings
from tidemill.schemas.http_connections import bind
from tidemill.schemas.log.producer import DeliveryError, RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Anchor, Interaction, Manifest

pytestmark = pytest.mark.anyio

ASK = {"prompt": "hello", "user": "ada"}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "user": "ada"}


async def answer(body: dict, _number: int) -> web.StreamResponse:
    """Answer as the replicas of `rig`."""
    if not body["stream"]:
        return FakeReplica().whole(body)
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks(body))
    return web.Response(text=text + "data: [DONE]\n\n", content_type="text/event-stream")


@pytest.fixture
def replicas(new_replica):
    made = new_replica("s0"), new_replica("c1")
    for replica in made:
        replica.answer = answer
    return made


@pytest.fixture
def settings(kafka) -> KafkaSettings:
    return kafka.fresh(topics=[Topic.INTERACTIONS, Topic.GATE, Topic.MANIFESTS])


def process(settings: KafkaSettings, replicas, root) -> subprocess.Popen:
    """Start a router; its output is in `root`/log."""
    keys = {**PRODUCT.environment(), "TIDEMILL_ROUTER__API_KEYS": json.dumps({"web": key_hash(KEY)})}
    flags = ["--bootstrap", settings.bootstrap, "--topic-prefix", settings.topic_prefix, "--run-id", RUN.run_id,
             "--port", "0", "--stable", replicas[0].address, "--canary", replicas[1].address,
             "--set", f"router.log_timeout_s={DEADLINE_S}"]  # fmt: skip
    command = [sys.executable, "-m", "tidemill", "route", *flags]
    with (root / "log").open("w") as said:
        return subprocess.Popen(command, env={**os.environ, **keys}, cwd=root, stderr=said)


def health(http: httpx.Client):
    try:
        return http.get("/healthz").json()
    except httpx.TransportError:
        return None


def test_answers_are_in_the_log_decisions_reach_the_users_and_a_signal_ends_it(
    settings, replicas, tmp_path, tokenizer_dir
):
    running = process(settings, replicas, tmp_path)
    http = httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=DEADLINE_S)
    try:
        http.base_url = url_in(tmp_path / "log", lambda: running.poll() is None)
        assert until(lambda: health(http)) == {"log": "ok", "canary": {"version": None, "share": 0.0}}
        tokens = [http.post("/v1/completions", json=ASK).json()["tidemill"]["interaction"] for _ in range(2)]
        early = http.post("/v1/chat/completions", json=CHAT)
        assert early.status_code == 503 and "chat template" in early.json()["error"]["message"]
        anchored = build(Manifest, run_id="r", learning_rate=0.1, anchor=Anchor(str(tokenizer_dir), 1))
        with RecordProducer(settings, "trainer") as trainer:
            trainer.send_acked(Topic.MANIFESTS, [("main", anchored)])
        answers: list[httpx.Response] = []
        until(lambda: answers.append(http.post("/v1/chat/completions", json=CHAT)) or answers[-1].status_code == 200)
        assert answers[-1].json()["choices"][0]["message"] == {"role": "assistant", "content": "abc"}
        tokens.append(answers[-1].json()["tidemill"]["interaction"])
        with RecordProducer(settings, "gate") as gate:
            gate.send_acked(Topic.GATE, [("main", decision("canary", 7, 1.0))])
        until(lambda: health(http)["canary"] == {"version": 7, "share": 1.0})
        with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response:
            tokens.append(response.headers["x-tidemill-interaction"])
            assert response.read().endswith(b"data: [DONE]\n\n")
        assert "tidemill_router_interactions_total" in http.get("/metrics").text
        running.send_signal(signal.SIGTERM)
        assert running.wait(DEADLINE_S) == 0
    finally:
        running.kill()
        running.wait()
        http.close()
    check_log(settings, tokens)


def check_log(settings, tokens):
    ada = Pseudonyms(PRODUCT).of("ada")
    with LogReader(settings, [Topic.INTERACTIONS]) as reader:
        found = {located.record.interaction_id: located for located in reader.read_to_end()}
    ids = [Signer(PRODUCT).verify(token, ada) for token in tokens]
    assert found.keys() == set(ids) and all(located.key == key.encode() for key, located in found.items())
    records: list[Interaction] = [found[one].record for one in ids]
    assert [made.arm for made in records] == ["stable"] * 3 + ["canary"]
    assert [made.replica_id for made in records] == ["s0"] * 3 + ["c1"]


async def test_a_log_that_does_not_answer_is_reported_in_time_and_the_process_can_end():
    began = time.monotonic()
    kafka, router = KafkaSettings(bootstrap="127.0.0.1:1"), RouterSettings(log_timeout_s=0.5, log_rest_s=600)
    async with open_recorder(kafka, RUN, StoreSettings(root="unused"), router) as recorder:
        assert recorder.may_try()
        with pytest.raises(DeliveryError):
            await recorder.write(interaction_of())
        assert recorder.failing and not recorder.may_try()
    assert time.monotonic() - began < 60


def start(kafka: KafkaSettings, stopped: bool = True, **router) -> None:
    stop = threading.Event()
    if stopped:
        stop.set()
    chosen = RouterSettings(**{"api_keys": {"web": key_hash(KEY)}, "port": 0, **router})
    run(kafka, RUN, StoreSettings(root="unused"), PRODUCT, chosen, ChatSettings(), stop)


def test_the_router_does_not_start_without_keys_topics_or_its_port(settings):
    start(settings)
    with pytest.raises(ValueError, match="api_keys is empty"):
        start(settings, api_keys={})
    with pytest.raises(LookupError, match="tidemill topics --create"):
        start(settings.model_copy(update={"topic_prefix": "absent."}))
    with bind("127.0.0.1", 0, "router.port") as taken:
        taken.listen()
        with pytest.raises(OSError, match=r"router\.port"):
            start(settings, port=taken.getsockname()[1])


def test_a_damaged_tokenizer_ends_the_router_when_it_reads_the_log_no_more(settings, tmp_path, monkeypatch):
    closing, closed_first, close = threading.Event(), [], LogReader.close

    def poll(_reader: LogReader, _timeout_s: float) -> list:
        closed_first.append(closing.wait(2.0))
        return []

    def closes(reader: LogReader) -> None:
        closing.set()
        close(reader)

    monkeypatch.setattr(LogReader, "poll", poll)
    monkeypatch.setattr(LogReader, "close", closes)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        start(settings, stopped=False, tokenizer=str(tmp_path))
    assert closed_first and not any(closed_first), "a client that is closed while a thread uses it ends the process"
