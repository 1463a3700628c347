"""`tidemill audit` on a real Kafka: a sound log, a truncated log, and the command's output for each."""

from __future__ import annotations

import json
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from typer.testing import CliRunner

from tests.consumers.operate.audit_support import sound_log
from tidemill.compose.cli import app
from tidemill.consumers.operate.audit.audit import audit_log
from tidemill.consumers.operate.audit.endings import AuditRules
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.admin import admin_client

RULES = AuditRules(run_id="run")


@pytest.fixture(scope="module")
def sound(kafka: Any) -> KafkaSettings:
    settings = kafka.fresh(1)
    sound_log().write(settings)
    return settings


def run_audit(settings: KafkaSettings, *arguments: str) -> Any:
    common = ["--bootstrap", settings.bootstrap, "--topic-prefix", settings.topic_prefix]
    return CliRunner().invoke(app, ["audit", *common, *arguments])


def test_a_sound_log_passes_and_the_progress_is_reported(sound: KafkaSettings):
    told: list[str] = []
    report = audit_log(sound, RULES, lambda topic, _done, _of: told.append(topic))
    in_memory = sound_log().audit()
    assert report.passed
    assert (report.states, report.counts, report.repeated) == (
        in_memory.states,
        in_memory.counts,
        in_memory.repeated,
    )
    assert {"train.steps", "rollouts", "groups"} <= set(told)


def test_the_command_says_that_a_log_is_sound(sound: KafkaSettings):
    done = run_audit(sound)
    assert done.exit_code == 0, done.output
    assert "run run: sound" in done.output
    document = json.loads(run_audit(sound, "--json").stdout)
    assert document["passed"] is True
    assert all(check["passed"] for check in document["checks"])
    assert document["states"]["trained"] == 8


def test_the_command_names_open_rollouts_when_the_run_is_over(sound: KafkaSettings):
    done = run_audit(sound, "--complete")
    assert done.exit_code == 1
    assert "NOT SOUND" in done.output
    assert "First offender (endings): groups[0]@9: rollout waits/0 is still grouped" in done.output


def test_groups_left_over_after_the_last_step_are_not_a_fault(sound: KafkaSettings):
    document = json.loads(run_audit(sound, "--complete", "--set", "run.max_steps=3", "--json").stdout)
    assert document["states"]["unused"] == 2
    assert "grouped" not in document["states"]


def test_an_unknown_run_is_reported_with_the_runs_that_exist(sound: KafkaSettings):
    done = run_audit(sound, "--run-id", "tuesday")
    assert done.exit_code == 1
    assert isinstance(done.exception, LookupError)
    assert "no record of run tuesday; runs in it: run" in str(done.exception)


def test_a_topic_whose_beginning_was_deleted_is_reported_and_may_be_allowed(kafka: Any):
    settings = kafka.fresh(1)
    sound_log().write(settings)
    full = Names(settings.topic_prefix).of(Topic.ROLLOUTS)
    client = admin_client(settings)
    for future in client.delete_records([TopicPartition(full, 0, 1)]).values():
        assert future.result().low_watermark == 1
    refused = run_audit(settings, "--json")
    (failed,) = [check for check in json.loads(refused.stdout)["checks"] if not check["passed"]]
    assert (refused.exit_code, failed["name"]) == (1, "retention")
    assert failed["first"]["place"] == {"topic": "rollouts", "partition": 0, "offset": 1}
    allowed = run_audit(settings, "--allow-truncated", "--json")
    assert allowed.exit_code == 0, allowed.output
