"""`tidemill trainer check`: a good trainer passes, each bad one is refused with its fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tidemill.compose.cli.trainer_command import TrainerFinding, TrainerTrial, examine
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.admin import create_topics

TRAINER = str(Path(__file__).with_name("small_trainer.py"))
PLACES = ("{bootstrap}", "{topic_prefix}", "{run_id}", "{store}")


def examined(
    kafka, topic_prefix, tmp_path: Path, kind: str, kills: int = 0, timeout_s: float = 120.0
) -> list[TrainerFinding]:
    settings = KafkaSettings(bootstrap=kafka.bootstrap, topic_prefix=topic_prefix)
    create_topics(settings)
    command, started = (sys.executable, TRAINER, kind, *PLACES), []
    undisturbed, killed = (
        TrainerTrial(settings, RunSettings(run_id=name), tmp_path / name, command, timeout_s, started.append)
        for name in ("undisturbed", "killed")
    )
    findings = examine(undisturbed, killed, kills, lambda _stage: None)
    assert started and not any(map(psutil.pid_exists, started)), "no trainer is left"
    return findings


def test_a_good_trainer_passes(broker, tmp_path: Path):
    command = [sys.executable, "-m", "tidemill.compose.cli", "trainer", "check", "--kills", "2", "--json", "--"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*command, sys.executable, TRAINER, "good", *PLACES],
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
    ("kind", "check", "detail"),
    [
        ("fails", "first run", "it ended with status 1; it printed:\nno model was found"),
        ("short", "first run", "it published versions [0, 1]; at least 3 are needed: an anchor and two deltas"),
        ("lies", "versions of the first run", "the manifest of version 4: "),
        ("hangs", "time", "it did not end within 3 s; it printed:\n"),
    ],
)
def test_a_bad_trainer_is_refused(kafka, topic_prefix, tmp_path: Path, kind: str, check: str, detail: str):
    *before, last = examined(kafka, topic_prefix, tmp_path, kind, timeout_s=3 if kind == "hangs" else 120)
    assert all(finding.passed for finding in before)
    assert (last.check, last.passed) == (check, False) and last.detail.startswith(detail), last


def test_a_trainer_that_does_not_continue_after_a_kill_is_refused(kafka, topic_prefix, tmp_path: Path):
    *before, last = examined(kafka, topic_prefix, tmp_path, "stops early", kills=1)
    assert [finding.check for finding in before][-2:] == ["kills", "versions after kills"]
    assert (last.check, last.passed) == ("end after kills", False) and last.detail.endswith("and 4 without kills")
