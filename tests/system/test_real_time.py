"""Learning from users, from one command: users, router, join, batches, gate and two pools, each in its own process.

One short second act starts from the model of a short first act. Its log is then opened again, as by an operator who
wants to know afterwards which thumb changed which version.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from demonstration import ABOUT_USERS, TIMEOUT_S, Finished, run_demonstration
from typer.testing import CliRunner

from tests.quick_loop import CALM, QUICK_SECOND_ACT
from tidemill.compose.cli import app
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import (
    AckStatus,
    Feedback,
    GateDecision,
    GateVerdict,
    Interaction,
    OnlineBatch,
    Outcome,
    Record,
    SignalKind,
    TrainStep,
    WeightAck,
)

pytestmark = pytest.mark.timeout(TIMEOUT_S)
BATCHES = 1
QUICK = [
    f"demo.online_batches={BATCHES}",
    "demo.online_limit_s=900",
    "demo.start_timeout_s=600",
    "demo.stall_timeout_s=600",
    "demo.endings_timeout_s=600",
    "demo.measured_answers=16",
    "users.interactions_per_second=16",
    "users.concurrency=16",
    *QUICK_SECOND_ACT,
    *CALM,
]


@pytest.fixture(scope="module")
def played(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    model = str(finished.newest_anchor())
    with run_demonstration(
        tmp_path_factory.mktemp("users"), QUICK, "--act", "two", "--model", model
    ).open_tables() as played:
        yield played


@pytest.fixture(scope="module")
def log(played: Finished) -> Iterator[KafkaSettings]:
    """The log of the demonstration, opened again after its end."""
    with played.open_log() as address:
        yield KafkaSettings(bootstrap=address)


@pytest.fixture(scope="module")
def records(log: KafkaSettings) -> dict[type, list[Record]]:
    topics = (
        Topic.INTERACTIONS,
        Topic.FEEDBACK,
        Topic.OUTCOMES,
        Topic.ONLINE_BATCHES,
        Topic.STEPS,
        Topic.GATE,
        Topic.ACKS,
    )
    found: dict[type, list[Record]] = {}
    with LogReader(log, topics) as reader:
        for located in reader.read_to_end():
            if located.record is not None:
                found.setdefault(type(located.record), []).append(located.record)
    return found


def test_the_summary_adds_up(played: Finished):
    summary = played.summary
    assert summary["online_batches"] >= BATCHES and summary["promotions"] >= 1
    assert summary["trials_decided"] >= 1 and summary["evidence_share"] == 1.0, summary["verdicts"]
    assert summary["interactions"] == summary["rewarded"] + sum(summary["exclusions"].values()) > 0
    assert summary["exclusions"]["no_consent"] > 0 and summary["exclusions"]["no_signal"] > 0
    assert 0 < summary["feedback_to_served_s"]["p50"] <= summary["feedback_to_served_s"]["p95"]
    assert 0.0 <= summary["satisfaction_before"] <= 1.0 and summary["satisfaction_answers"] > 0
    assert summary["online_fingerprints_equal"] is True and summary["thumbs_shuffled"] is False
    assert summary["audit_sound"] is True, summary["audit"]


@pytest.mark.parametrize("name", sorted(ABOUT_USERS))
def test_the_queries_about_users_answer(played: Finished, name: str):
    assert played.rows(name)


def test_every_interaction_has_exactly_one_end(records: dict[type, list[Record]]):
    served = Counter(r.interaction_id for r in records[Interaction])
    ends = Counter(r.interaction_id for r in records[Outcome] if r.revision == 0)
    assert set(served) == set(ends) and set(ends.values()) == {1}


def test_nothing_is_learnt_from_users_without_consent(records: dict[type, list[Record]]):
    refused = {r.interaction_id for r in records[Interaction] if not r.consent}
    learnt = {member.interaction_id for batch in records[OnlineBatch] for member in batch.members}
    assert refused and learnt and not refused & learnt


def test_each_batch_has_one_version_and_ends_once(records: dict[type, list[Record]]):
    versions = {r.interaction_id: (r.version_min, r.version_max) for r in records[Interaction]}
    for batch in records[OnlineBatch]:
        assert {versions[m.interaction_id] for m in batch.members if not m.correction} <= {(batch.version,) * 2}
    trained = Counter(
        place.group_id for step in records[TrainStep] for place in step.inputs if place.topic == Topic.ONLINE_BATCHES
    )
    assert len(trained) >= BATCHES and set(trained.values()) == {1}


def test_stable_serves_only_promoted_versions(records: dict[type, list[Record]]):
    promoted = {d.version for d in records[GateDecision] if d.verdict is GateVerdict.PROMOTE}
    served = {r.version_max for r in records[Interaction] if r.arm == "stable" and r.version_max >= 0}
    proved = {a.version for a in records[WeightAck] if a.replica_id == "stable-0" and a.status is AckStatus.PROVED}
    assert len(promoted) >= 2 and served <= promoted and proved <= promoted


def test_a_thumb_is_traced_to_the_replica_that_serves_the_trained_version(
    played: Finished, log: KafkaSettings, records: dict[type, list[Record]]
):
    promoted = [d.version for d in records[GateDecision] if d.verdict is GateVerdict.PROMOTE]
    event = a_thumb_that_taught(promoted[-1], records)
    where = ["--bootstrap", log.bootstrap, "--run-id", played.summary["run_id"]]
    done = CliRunner().invoke(app, ["trace", event.event_id, "--json", *where])
    assert done.exit_code == 0, done.output
    path = json.loads(done.stdout)
    assert path["interaction_id"] == event.interaction_id
    assert event.event_id in {found["event_id"] for found in path["feedback"]}
    assert path["outcomes"][0]["reward"] is not None and path["batches"]
    assert promoted[-1] in [made["version"] for made in path["versions"]]
    assert "stable-0" in done.stdout


def a_thumb_that_taught(newest: int, records: dict[type, list[Record]]) -> Feedback:
    """Return a vote in a batch from which a promoted version was trained."""
    steps = {step.version: step for step in records[TrainStep]}
    names = {place.group_id for place in steps[newest].inputs}
    members = {m.interaction_id for batch in records[OnlineBatch] if batch.batch_id in names for m in batch.members}
    votes = [r for r in records[Feedback] if r.kind is SignalKind.THUMB and r.interaction_id in members]
    assert votes, "the version that was promoted last was taught by no thumb"
    return votes[0]


def test_the_roles_are_separate_processes_and_connect_only_to_addresses_in_the_settings(played: Finished):
    assert {"train", "serve", "route", "stream", "gate", "rollout", "feed", "users"} <= played.commands
    seen, foreign = played.connected("serve", "route", "sink")
    assert seen and not foreign


def test_sampled_tokens_agree_with_the_trainer_at_the_same_version(played: Finished):
    """Tests versions with any bf16 values."""
    assert played.sampled_and_trained_alike()


def test_nothing_is_left_running(played: Finished):
    assert played.processes_left == []


def test_no_secret_is_written(played: Finished):
    texts = [path.read_text("utf-8", errors="replace") for path in Path(played.directory).rglob("settings*.toml")]
    assert texts and not [text for text in texts if "signing_keys" in text or "api_key" in text]
