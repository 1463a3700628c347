"""`tidemill trace` on a real Kafka: the offsets that it prints are those of the records."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.consumers.product_support import (
    ProductLog,
    decision,
    feedback,
    interaction,
    member,
    online_batch,
    outcome,
    use,
)
from tests.consumers.sink_support import START_US, ack, group, manifest, rollout, step
from tidemill.compose.cli import app
from tidemill.producers.product.settings import ProductSettings
from tidemill.producers.product.signing import Pseudonyms, Signer
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import RecordProducer, send_dead_letter
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import AckStatus, GateVerdict, StepInput

PARTITIONS = 2
PRODUCT = ProductSettings.with_random_keys()
USER = Pseudonyms(PRODUCT).of("4711")


@pytest.fixture(scope="module")
def settings(kafka: Any) -> KafkaSettings:
    """A log with one trained interaction among others, and one rollout."""
    settings = kafka.fresh(PARTITIONS)
    served = [interaction(f"i{n}", USER if n == 7 else "bob") for n in range(12)]
    rewarded = [outcome(one, 1.0, signals=[use(f"e-{one.interaction_id}")]) for one in served]
    batch = online_batch(0, [member(one) for one in rewarded])
    log = ProductLog(settings, PARTITIONS)
    log.write(*served, *(feedback(f"e-{one.interaction_id}", one.interaction_id, one.user_id) for one in served))
    log.write(*rewarded, batch)
    log.write(feedback("twice", "i1", "bob"), feedback("twice", "i2", "bob"))
    with RecordProducer(settings, "test-model") as producer:
        trained = step(2, [StepInput(batch.batch_id, Topic.ONLINE_BATCHES.value, 0, 0)], [])
        producer.send(Topic.STEPS, trained, key="run")
        producer.send(Topic.MANIFESTS, manifest(2), key="main")
        producer.send(Topic.GATE, decision(GateVerdict.PROMOTE, 2), key="main")
        producer.send(Topic.ACKS, ack(2, AckStatus.PROVED), key="replica-0")
        producer.send(Topic.ROLLOUTS, rollout("r0", "g0"), key="g0")
        producer.send(Topic.GROUPS, group("g0", [rollout("r0", "g0")]), key="g0")
        letter = ConsumedRecord(Topic.FEEDBACK, 1, 5, START_US // 1000, b"i7/bad", b"broken", None, "unknown framing")
        send_dead_letter(producer, Names(settings.topic_prefix), letter, "unknown framing", "join")
    return settings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, settings: KafkaSettings) -> None:
    for name, value in PRODUCT.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TIDEMILL_KAFKA__BOOTSTRAP", settings.bootstrap)
    monkeypatch.setenv("TIDEMILL_KAFKA__TOPIC_PREFIX", settings.topic_prefix)


def trace(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["trace", *arguments])


def lies_at(settings: KafkaSettings, topic: Topic, key: str) -> dict[str, Any]:
    with LogReader(settings, [topic]) as reader:
        (found,) = (one for one in reader.read_to_end() if one.key == key.encode())
    return {"topic": topic.value, "partition": found.partition, "offset": found.offset}


@pytest.mark.parametrize("name", ["i7", "e-i7", Signer(PRODUCT).sign("i7", USER)], ids=["id", "event", "token"])
def test_an_interaction_is_traced_by_id_by_event_and_by_token(settings: KafkaSettings, name: str):
    answer = trace(name, "--json")
    assert answer.exit_code == 0, answer.output
    path = json.loads(answer.stdout)
    assert path["served"]["place"] == lies_at(settings, Topic.INTERACTIONS, "i7")
    assert [event["place"] for event in path["feedback"]] == [lies_at(settings, Topic.FEEDBACK, "i7/e-i7")]
    assert [end["place"] for end in path["outcomes"]] == [lies_at(settings, Topic.OUTCOMES, "i7")]
    assert path["batches"][0]["ended"]["step"] == {"topic": "train.steps", "partition": 0, "offset": 0}
    assert [letter["reason"] for letter in path["letters"]] == ["unknown framing"]
    assert path["end"] == "trained into version 2, and served now by replica-0 (version 2)"


def test_the_text_output_shows_every_stage(settings: KafkaSettings):
    shown = trace("i7").stdout
    for stage in ("served", "feedback", "outcome", "batch", "version", "end"):
        assert any(line.startswith(stage) for line in shown.splitlines()), stage
    place = lies_at(settings, Topic.INTERACTIONS, "i7")
    assert f"interactions[{place['partition']}]@{place['offset']}" in shown
    assert "promote by gate: better · gate.decisions[0]@0" in shown


def test_a_user_is_traced_to_their_versions():
    path = json.loads(trace("--user", "4711", "--json").stdout)
    assert [made["version"] for made in path["runs"][0]["trained"]] == [2]
    assert "trained into version 2" in trace("--user", USER, "--pseudonym").stdout


def test_a_rollout_is_traced_to_its_group():
    assert json.loads(trace("r0", "--json").stdout)["groups"][0]["group_id"] == "g0"
    assert "waits for the trainer" in trace("r0").stdout


def test_an_untraceable_name_is_a_clear_error():
    assert isinstance(trace("never-served").exception, LookupError)
    assert isinstance(trace("--user", "never-seen").exception, LookupError)
    assert "i1, i2" in str(trace("twice").exception)
    assert trace().exit_code == 2
    assert trace("i7", "--user", "4711").exit_code == 2
    assert isinstance(trace("x" * 5000).exception, ValueError)
