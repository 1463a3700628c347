"""`tidemill trainer check`: a good trainer passes, each bad one is refused with its fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.compose import small_trainer
from tidemill.compose.cli.trainer_command import TrainerFinding, TrainerTrial, examine
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import RunSettings
from tidemill.schemas.log.producer import RecordProducer

PLACES = ("{bootstrap}", "{topic_prefix}", "{run_id}", "{store}")
IDLE = (sys.executable, "-c", "")
"""A trainer that does nothing: a test publishes beforehand what such a trainer would have published."""


@pytest.fixture(scope="module")
def topics(kafka):
    return kafka.fresh(1)


@pytest.fixture
def trials(topics, topic_prefix, tmp_path: Path) -> tuple[TrainerTrial, TrainerTrial]:
    """Two trials of an idle trainer."""
    one, two = (RunSettings(run_id=topic_prefix + name) for name in ("undisturbed", "killed"))
    undisturbed = TrainerTrial(topics, one, tmp_path / "undisturbed", IDLE, timeout_s=120, watch=lambda _pid: None)
    return undisturbed, replace(undisturbed, run=two, directory=tmp_path / "killed")


def examined(trials: tuple[TrainerTrial, TrainerTrial], **changes: object) -> list[TrainerFinding]:
    started: list[int] = []
    undisturbed, killed = (replace(trial, watch=started.append, **changes) for trial in trials)
    findings = examine(undisturbed, killed, 0, lambda _stage: None)
    assert started and not any(map(psutil.pid_exists, started)), "no trainer is left"
    return findings


def publish(trial: TrainerTrial, versions: int):
    return small_trainer.train(trial.kafka, trial.run, trial.directory / "store", versions)


def test_a_good_trainer_passes(broker, tmp_path: Path):
    command = [sys.executable, "-m", "tidemill", "trainer", "check", "--kills", "1", "--json", "--"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*command, sys.executable, small_trainer.__file__, *PLACES],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    said = {check["check"]: check["detail"] for check in found["checks"]}
    assert found["passed"] and said["first run"] == "5 versions, 0 to 4"
    assert said["second start"] == "0 further versions, none again"
    assert said["versions of the first run"].startswith("5 versions and ")
    before, after = (int(part.split()[0]) for part in said["kills"].split(", "))
    assert before + after > 0 and said["end after kills"] == "version 4; 5 of 5 versions as without kills"
    assert list(tmp_path.iterdir()) == [], "nothing is left on the disk"


@pytest.mark.parametrize(
    ("program", "timeout_s", "check", "detail"),
    [
        ("exit('no model was found')", 120, "first run", "it ended with status 1; it printed:\nno model was found"),
        ("import time; time.sleep(600)", 0.5, "time", "it did not end within 0.5 s; it printed:\n"),
    ],
)
def test_a_trainer_that_does_not_end_well_is_refused(trials, program: str, timeout_s: float, check: str, detail: str):
    (found,) = examined(trials, command=(sys.executable, "-c", program), timeout_s=timeout_s)
    assert (found.check, found.passed) == (check, False) and found.detail.startswith(detail), found


def test_too_few_versions_are_refused(trials):
    publish(trials[0], 2)
    (found,) = examined(trials)
    least = "at least 3 are needed: an anchor and two deltas"
    assert found == TrainerFinding("first run", False, f"it published versions [0, 1]; {least}")


def test_a_manifest_with_a_wrong_fingerprint_is_refused(trials):
    manifest = publish(trials[0], 5)
    with RecordProducer(trials[0].kafka, "test") as producer:
        producer.send_acked(Topic.MANIFESTS, [("main", replace(manifest, fingerprint="0" * 16))])
    *before, last = examined(trials)
    assert [(finding.check, finding.passed) for finding in before] == [("first run", True)]
    assert (last.check, last.passed) == ("versions of the first run", False)
    assert last.detail.startswith("the manifest of version 4: "), last


def test_a_trainer_that_does_not_continue_after_a_kill_is_refused(trials):
    publish(trials[0], 5)
    publish(trials[1], 2)
    *before, last = examined(trials)
    assert [finding.check for finding in before][-2:] == ["kills", "versions after kills"]
    assert all(finding.passed for finding in before)
    assert (last.check, last.passed) == ("end after kills", False) and last.detail == "version 1, and 4 without kills"
