"""`tidemill weights` as an operator types it, on a real Kafka and on checkpoints on disk."""

from __future__ import annotations

import csv
import io
import json
import threading
import uuid
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.consumers.weight_log import TOPICS, WeightLog, nudged, write_checkpoint
from tidemill.compose.cli import app, main
from tidemill.compose.cli.weights_command import operand
from tidemill.compose.options import version_number
from tidemill.consumers.weights.chain import read_chain
from tidemill.kernels.weights.checkpoint import WeightFilesError
from tidemill.kernels.weights.graph import VersionError
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import RunSettings
from tidemill.schemas.records import AckStatus, GateVerdict

DEADLINE_S = 180.0


@pytest.fixture(scope="module")
def topics(kafka):
    return kafka.fresh(1, TOPICS)


@pytest.fixture
def log(topics, tmp_path):
    return WeightLog(topics, RunSettings(run_id=uuid.uuid4().hex), tmp_path / "store")


def run(*arguments: object):
    return CliRunner().invoke(app, ["weights", *map(str, arguments)])


def ask(log: WeightLog, *arguments: object):
    kafka = log.kafka
    common = ["--bootstrap", kafka.bootstrap, "--topic-prefix", kafka.topic_prefix, "--run-id", log.run.run_id]
    return run(*arguments, *common)


def answer(result):
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def test_the_chain_is_listed(log):
    log.grow(6, anchors=(0, 3))
    log.skip(1, 5)
    log.acknowledge("replica-a", 5, at=now_us())
    found = answer(ask(log, "log", "--json"))
    assert (found["head"], found["limit"], len(found["versions"])) == (5, None, 6)
    last = found["versions"][-1]
    assert (last["parent"], last["skips"], last["proved_by"], last["learning_rate"]) == (4, [1], ["replica-a"], 1e-5)
    assert last["bytes_per_changed"] == pytest.approx(last["delta_bytes"] / last["n_changed"])
    assert last["density"] == pytest.approx(last["n_changed"] / last["n_elements"])
    piped = ask(log, "log", "--last", 2)
    header, *rows = [line.split("\t") for line in piped.stdout.splitlines()]
    assert [dict(zip(header, row, strict=True))["version"] for row in rows] == ["4", "5"]
    assert rows[-1][-3:] == ["[1]", '["replica-a"]', "head"] and piped.stderr == "serving: the newest version\n"
    listed = list(csv.DictReader(io.StringIO(ask(log, "log", "--csv").stdout)))
    assert [float(row["lr"]) for row in listed] == [version["learning_rate"] for version in found["versions"]]
    assert [row["anchor"] for row in listed] == ["true", "false", "false", "true", "false", "false"]


def test_a_format_of_few_bits_is_listed(log):
    log.grow(1)
    log.publish(1, nudged(log.views[0], 1), 0, lies={"serving_format": "mxfp8", "serving_activations": "nvfp4"})
    versions = answer(ask(log, "log", "--json"))["versions"]
    assert [row["serving_format"] for row in versions] == ["", "mxfp8"]
    assert [row["serving_activations"] for row in versions] == ["", "nvfp4"]
    assert ask(log, "log").stdout.splitlines()[-1].endswith("head; mxfp8; activations nvfp4")


def test_an_empty_branch_is_reported(log):
    result = ask(log, "log", "--branch", "nobody")
    assert isinstance(result.exception, VersionError)
    assert "no version on branch nobody" in str(result.exception)


def test_a_sound_chain_passes_and_an_unsound_one_does_not(log):
    log.grow(3)
    sound = answer(ask(log, "verify", "--json"))
    assert (sound["sound"], sound["versions"]) == (True, 3)
    log.publish(2, nudged(log.views[1], 9), parent=1)
    result = ask(log, "verify", "--from", 0)
    assert result.exit_code == 1
    assert "not sound: the manifest of version 2: fork" in result.output


def test_a_version_is_written_out_and_compared_with_its_parent(log, tmp_path):
    log.grow(4)
    made = answer(ask(log, "checkout", "v3", tmp_path / "v3", "--json"))
    assert made["fingerprint"] == log.manifests[3].fingerprint
    same = answer(ask(log, "diff", "v3", tmp_path / "v3", "--json"))
    assert (same["total"]["changed"], same["round_trip_equal"], same["learning_rate"]) == (0, True, None)
    step = answer(ask(log, "diff", "v2", "main@v3", "--json", "--against"))
    assert step["total"]["changed"] == log.manifests[3].n_changed
    assert step["total"]["elements"] == log.manifests[3].n_elements
    assert step["learning_rate"] == 1e-5 and step["round_trip_equal"]
    assert all(other["round_trip_equal"] and other["wire_bytes"] > 0 for other in step["against"])
    refused = ask(log, "checkout", "v3", tmp_path / "v3")
    assert "not an empty directory" in str(refused.exception)


def test_checkpoints_are_compared_without_a_log(tmp_path):
    view = {"w": torch.arange(4096, dtype=torch.int16).view(64, 64).numpy().view("u2")}
    base, target = write_checkpoint(tmp_path / "a", view), write_checkpoint(tmp_path / "b", nudged(view, 1))
    result = run("diff", base, target / "model.safetensors", "--against")
    assert result.exit_code == 0, result.output
    assert "density" in result.stderr and "bit-equal" in result.stderr
    formats = [line.split("\t") for line in result.stdout.splitlines()]
    assert [row[0] for row in formats[:2]] == ["format", "tidemill"] and len(formats) > 3
    assert all(row[-1] == "true" for row in formats[1:])
    (ours,) = csv.DictReader(io.StringIO(run("diff", base, target, "--csv", "--coder", "zstd").stdout))
    found = answer(run("diff", base, target, "--json", "--coder", "zstd"))
    total = found["total"]
    assert (ours["format"], int(ours["bytes"])) == ("tidemill", total["wire_bytes"])
    assert total["wire_bytes"] >= total["changed"] > 0
    assert total["bytes_per_changed"] == pytest.approx(total["wire_bytes"] / total["changed"])
    assert {"iid_bound_bytes", "exponent_class_bound_bytes"} <= total.keys()
    assert {"encode_gb_per_second", "apply_gb_per_second"} <= found.keys()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"v": torch.zeros(4)}, "'v' in the second"),
        ({"w": torch.zeros(5)}, r"float32 \(4,\) became float32 \(5,\)"),
        ({"w": torch.zeros(4, dtype=torch.float16)}, "became float16"),
        ({"w": torch.zeros(4, dtype=torch.int64)}, "has dtype I64, which a delta does not support"),
    ],
)
def test_checkpoints_that_cannot_be_compared_are_explained(tmp_path, tensors, message):
    save_file({"w": torch.zeros(4)}, tmp_path / "a.safetensors")
    save_file(tensors, tmp_path / "b.safetensors")
    result = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(WeightFilesError, match=message):
        raise result.exception


def test_a_directory_without_a_checkpoint_is_explained(tmp_path):
    save_file({"w": torch.zeros(4)}, tmp_path / "a.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-3])
    (tmp_path / "empty").mkdir()
    for other in ("cut.safetensors", "empty"):
        with pytest.raises(WeightFilesError, match="not a safetensors file"):
            raise run("diff", tmp_path / "a.safetensors", tmp_path / other).exception
    with pytest.raises(ValueError, match="neither a version"):
        raise run("diff", tmp_path / "a.safetensors", tmp_path / "none").exception


def test_operands_are_versions_unless_such_a_path_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert operand("v12") == operand("12") == (12, None)
    assert operand("fine.tune@v3") == (3, "fine.tune")
    (tmp_path / "12").mkdir()
    assert operand("12") == Path("12")
    for text in ("v", "-1", "v1.5", "1e3", "main@", "9" * 13):
        with pytest.raises(ValueError, match="is no version"):
            version_number(text)


def test_decisions_are_written_for_replicas_to_follow(log):
    log.grow(5)
    shown = answer(ask(log, "pin", "v3", "--dry-run", "--json"))
    assert not shown["written"] and read_chain(log.kafka, log.run).decisions == []
    nameless = answer(ask(log, "pin", "v3", "--by", "", "--dry-run", "--json"))
    assert nameless["decision"]["decided_by"] == shown["decision"]["decided_by"] != ""
    made = answer(ask(log, "pin", "v3", "--reason", "demo today", "--by", "ada", "--json"))["decision"]
    assert (made["verdict"], made["version"], made["reason"], made["decided_by"]) == ("hold", 3, "demo today", "ada")
    answer(ask(log, "rollback", 2, "--json"))
    assert answer(ask(log, "log", "--json"))["limit"]["verdict"] == "roll_back"
    answer(ask(log, "release", "--json"))
    verdicts = [decision.verdict for decision in read_chain(log.kafka, log.run).decisions]
    assert verdicts == [GateVerdict.HOLD, GateVerdict.ROLL_BACK, GateVerdict.RELEASE]
    assert answer(ask(log, "log", "--json"))["limit"] is None


def test_only_a_command_that_waits_reads_acknowledgements(log, monkeypatch):
    def open_reader(*_arguments, **_options):
        raise ConnectionError("a reader of acknowledgements")

    monkeypatch.setattr("tidemill.compose.cli.gate_command.LogReader", open_reader)
    log.grow(2)
    for arguments in (["--dry-run", "--wait", 9], ["--dry-run"], []):
        answer(ask(log, "pin", "v1", "--json", *arguments))
    with pytest.raises(ConnectionError):
        raise ask(log, "pin", "v1", "--wait", 9).exception


def test_a_version_that_cannot_be_served_is_not_decided_on(log):
    log.grow(3)
    log.acknowledge("a", 2, at=now_us(), status=AckStatus.REFUSED)
    for version, message in ((7, "version 7 is not on branch main"), (2, "refused by a and proved by none")):
        with pytest.raises(VersionError, match=message):
            raise ask(log, "rollback", version).exception
    assert read_chain(log.kafka, log.run).decisions == []


def test_an_operator_waits_for_the_replicas(log):
    log.grow(4)
    for replica in ("a", "b"):
        log.acknowledge(replica, 3, at=now_us())
    late = ask(log, "rollback", 1, "--wait", 0.5)
    assert late.exit_code == 1
    assert "a still serves 3" in late.output and "b still serves 3" in late.output
    beyond = ask(log, "pin", 2, "--wait", DEADLINE_S)
    assert beyond.exit_code == 1 and "a pin takes no replica back" in beyond.output
    ended = threading.Event()
    follower = threading.Thread(target=follow, args=(log, 3, ended))
    follower.start()
    try:
        followed = ask(log, "rollback", 1, "--wait", DEADLINE_S)
    finally:
        ended.set()
        follower.join()
    assert followed.exit_code == 0, followed.output
    assert "followed by a, b" in followed.output


def test_an_acknowledgement_after_the_chain_was_read_counts(log, monkeypatch):
    """The replica need not write another one: it serves the version already."""
    log.grow(4)
    log.acknowledge("a", 3, at=now_us())

    def read(kafka, branch):
        chain = read_chain(kafka, branch)
        log.acknowledge("a", 1, at=now_us(), status=AckStatus.ANCHORED)
        return chain

    monkeypatch.setattr("tidemill.compose.cli.gate_command.read_chain", read)
    followed = ask(log, "rollback", 1, "--wait", DEADLINE_S)
    assert (followed.exit_code, "followed by a" in followed.output) == (0, True), followed.output


def follow(log: WeightLog, decision: int, ended: threading.Event) -> None:
    """Run two replicas that follow the branch's third decision."""
    while not ended.is_set():
        if len(read_chain(log.kafka, log.run).decisions) == decision:
            for replica in ("a", "b"):
                log.acknowledge(replica, 1, at=now_us(), status=AckStatus.ANCHORED)
            return


@pytest.mark.parametrize("command", [("weights", "log"), ("topics", "--create")])
def test_a_log_that_does_not_answer_is_reported_in_one_line(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("tidemill.compose.options.PATIENCE_S", 0.1)
    monkeypatch.setattr("sys.argv", ["tidemill", *command, "--bootstrap", "127.0.0.1:9"])
    monkeypatch.delenv("TIDEMILL_TRACEBACK", raising=False)
    with pytest.raises(SystemExit, match="1"):
        main()
    # Also what the client library, which is not Python, writes.
    told = capfd.readouterr().err
    assert told.startswith("tidemill: no Kafka broker answered at 127.0.0.1:9") and told.count("\n") == 1
