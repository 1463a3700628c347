"""`make test-gpu` without a GPU: it reports that, and its checks run in a rehearsal."""

from __future__ import annotations

import json
import sys

import pytest

from tests.gpu import run
from tests.gpu.run import NO_GPU, GpuCheck, main, run_check


def document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str):
    monkeypatch.setattr(sys, "argv", ["run", *options])
    status = main()
    output = capsys.readouterr()
    return status, json.loads(output.out), output.err


def test_without_a_gpu_nothing_is_run_and_nothing_counts_as_passed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "device_name", lambda: None)
    status, found, told = document(monkeypatch, capsys, "--out", str(tmp_path / "gpu.json"))
    assert status == 0
    assert (found["gpu"], found["checks"], found["note"]) == (None, {}, NO_GPU)
    assert told.strip() == NO_GPU
    assert json.loads((tmp_path / "gpu.json").read_text("utf-8")) == found


def test_a_rehearsal_runs_every_check(monkeypatch, capsys):
    monkeypatch.setattr(run, "device_name", lambda: None)
    status, found, _ = document(monkeypatch, capsys, "--rehearse")
    assert status == 0, found
    assert set(found["checks"]) == {check.name for check in run.checks(rehearse=False)}
    cases = found["checks"]["kernels_equal_their_twins"]["figures"]
    assert cases.keys() == {"passed"} and cases["passed"] >= 95
    assert all(line["equal_to_cpu"] for line in found["checks"]["delta_speed"]["figures"])


def test_a_check_that_fails_or_hangs_is_reported_with_its_output():
    broken = GpuCheck("broken", ["-c", "import sys; sys.exit('it broke')"], 180, {}, str)
    assert run_check(broken)["passed"] is False and "it broke" in run_check(broken)["problem"]
    hung = GpuCheck("hung", ["-c", "import time; time.sleep(60)"], 0.5, {}, str)
    assert run_check(hung) == {"passed": False, "seconds": 0.5, "problem": "not done within 0.5 s"}


def test_a_failed_check_sets_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(run, "device_name", lambda: "a GPU")
    monkeypatch.setattr(run, "checks", lambda _: [GpuCheck("broken", ["-c", "raise SystemExit(3)"], 180, {}, str)])
    status, found, _ = document(monkeypatch, capsys)
    assert status == 1 and found["gpu"] == "a GPU"


def test_all_checks_together_stay_below_ten_minutes():
    assert sum(check.seconds for check in run.checks(rehearse=False)) < 590
