"""`tidemill plan`: what fits, what to change, and the formula compared with a real trainer."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig
from typer.testing import CliRunner

from tests.bench import bench_plan
from tidemill.compose.cli import app
from tidemill.compose.plan.estimates import delta_at_density, delta_at_rate
from tidemill.compose.plan.fit import GIB, Devices, devices_of
from tidemill.compose.plan.memory import FP32, PROCESS_BYTES, ReplicaCase, kv_bytes
from tidemill.trainer.model import size_of_name

QWEN3_8B = Qwen3Config(
    vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
)  # fmt: skip
QWEN3_30B = Qwen3MoeConfig(
    vocab_size=151_936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_experts=128,
    head_dim=128, num_attention_heads=32, num_key_value_heads=4, num_experts_per_tok=8, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for name, config in (("8b", QWEN3_8B), ("30b", QWEN3_30B)):
        made[name] = str(tmp_path_factory.mktemp(name))
        config.save_pretrained(made[name])
    return made


@pytest.fixture(scope="module", autouse=True)
def made_once() -> Iterator[None]:
    """Each model is made once for all plans: this takes longer than a plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidemill.trainer.model.size_of_name", cache(size_of_name))
        yield


def planned(*arguments: str, status: int = 0) -> dict:
    result = CliRunner().invoke(app, ["plan", "--learning-rate", "1e-6", *arguments, "--json"])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def test_eight_billion_parameters_fit_on_sixteen_gpus_and_not_on_one(models):
    found = planned("--model", models["8b"], "--gpus", "16x80")
    assert found["fits"] and (found["trainer_devices"], found["replicas_beside"]) == (4, 12)
    smaller = planned("--model", models["8b"], "--gpus", "16x80", "--set", "trainer.publish.on_device=false")
    totals = [each["trainer"][0]["total"] for each in (found, smaller)]
    assert totals[0] - totals[1] == pytest.approx(4 * found["model"]["parameters"])
    (one,) = (each for each in found["trainer"] if each["ranks"] == 1)
    assert not one["fits"]
    # Masters 4, moments 8, gradients 4 and the reference's 2 bytes per parameter.
    names = ("weights", "masters", "moments", "gradients", "reference")
    assert sum(one["bytes"][name] for name in names) == 18 * found["model"]["parameters"]
    # Values in the serving format, and masters that are gathered in fp32, are not rounded by the gathering.
    for changed, more in (("serving_format=mxfp8", 6), ("compute=float32", 6)):
        other = planned("--model", models["8b"], "--gpus", "16x80", "--set", f"trainer.{changed}")["trainer"][0]
        assert (
            other["ranks"] == 1
            and sum(other["bytes"][name] for name in names) == (18 + more) * found["model"]["parameters"]
        ), changed
    alone = planned("--model", models["8b"], "--gpus", "1x80", status=1)
    assert "trainer" in alone["verdict"] and alone["verdict"].startswith("does not fit")
    (ranks,) = (change for change in alone["changes"] if change["what"].endswith("device of its own"))
    assert ranks["fits"] and ranks["gib"] <= 72


def test_roles_that_have_no_devices_of_their_own_share_them(models):
    found = planned("--model", models["8b"], "--gpus", "4x80", "--set", "trainer.publish.on_device=false")
    assert found["same_devices"] and found["replicas_beside"] == 1
    trainer, replica = (
        next(each for each in found[role] if each["devices"] == found[f"{role}_devices"])
        for role in ("trainer", "replica")
    )
    assert trainer["total"] + replica["total"] <= 0.9 * 80 * GIB


def test_changes_that_are_proposed_as_enough_are_enough(models):
    base = ("--model", models["8b"], "--gpus", "4x80", "--row-tokens", "16384")
    found = planned(*base, status=1)
    (together,) = (change for change in found["changes"] if change["what"] == "all of these together")
    assert together["fits"] == (together["gib"] <= 72)
    settings = ("--set", "trainer.kl.coefficient=0", "--set", "trainer.row_tokens=1024")
    settings += ("--set", "trainer.score_older_every=0")
    settings += ("--set", "trainer.checkpoint_activations=true", "--set", "trainer.publish.on_device=false")
    smaller = planned("--model", models["8b"], "--gpus", "4x80", *settings)
    (four,) = (each for each in smaller["trainer"] if each["ranks"] == 4)
    assert four["total"] / GIB == pytest.approx(together["gib"])


def test_engines_side_by_side_share_the_requests_and_not_the_weights(models):
    base = ("--model", models["8b"], "--gpus", "16x80", "--tensor-parallel", "2")
    one, two = (planned(*base, "--data-parallel", engines)["replica"][0] for engines in "12")
    assert (two["devices"], two["bytes"]["weights"]) == (4, one["bytes"]["weights"])
    assert two["bytes"]["kv_cache"] == one["bytes"]["kv_cache"] / 2


def test_engines_side_by_side_share_the_experts(models):
    size = size_of_name(models["30b"])
    base = ("--model", models["30b"], "--gpus", "64x80", "--tensor-parallel", "2")
    one, four = (planned(*base, "--data-parallel", engines)["replica"][0] for engines in "14")
    assert one["bytes"]["weights"] == 2 * size.parameters / 2
    assert four["devices"] == 8
    assert four["bytes"]["weights"] == 2 * ((size.parameters - size.experts) / 2 + size.experts / 8)
    assert four["bytes"]["update"] < one["bytes"]["update"]


def test_a_trainer_gathers_only_its_own_experts_of_a_layer_if_they_are_divided(models):
    size = size_of_name(models["30b"])
    base = ("--model", models["30b"], "--gpus", "6x80", "--set", "trainer.checkpoint_activations=true")
    found = planned(*base, status=1)
    told = {change["what"]: change["gib"] for change in found["changes"]}
    divided = planned(*base, "--set", "trainer.expert_parallel=2", status=1)
    assert [each["ranks"] for each in found["trainer"]] == [1, 2, 4, 6]
    assert [each["ranks"] for each in divided["trainer"]] == [2, 4, 6]
    gathered, own = (each["trainer"][-1]["bytes"]["gathered"] for each in (found, divided))
    assert gathered - own == (2 * 2 + 2 + 4) * size.expert_layer / 2
    # 6 ranks and 128 experts: both are divisible by 2.
    assert told["trainer.expert_parallel=2"] == pytest.approx(divided["trainer"][-1]["total"] / GIB)
    assert not any("expert_parallel" in change["what"] for change in divided["changes"])


def test_experts_may_be_divided_by_a_number_that_is_no_power_of_two(tmp_path):
    config = deepcopy(QWEN3_30B)
    config.num_experts = 96
    config.save_pretrained(tmp_path)
    base = ("--model", str(tmp_path), "--set", "trainer.expert_parallel=3")
    assert [each["ranks"] for each in planned(*base, "--gpus", "16x80")["trainer"]] == [3, 6, 12, 15]
    small = planned(*base, "--gpus", "4x20", status=1)
    assert [each["ranks"] for each in small["trainer"]] == [3]
    counts = [int(each["what"].split()[0]) for each in small["changes"] if "ranks, each on" in each["what"]]
    assert counts and counts[0] % 3 == 0


@pytest.mark.parametrize(("model", "over", "gpus"), [("8b", 2, "8x80"), ("30b", 3, "6x80"), ("30b", 8, "4x80")])
def test_experts_that_cannot_be_divided_are_an_error_of_the_plan(models, model, over, gpus):
    arguments = ["plan", "--model", models[model], "--gpus", gpus, "--set", f"trainer.expert_parallel={over}"]
    told = str(CliRunner().invoke(app, arguments).exception)
    assert told.startswith(f"trainer.expert_parallel is {over}: it must divide the {128 * (model == '30b')} experts")


def test_a_tensor_parallel_size_divides_the_heads(models):
    found = planned("--model", models["8b"], "--gpus", "12x80")
    assert [each["tensor_parallel"] for each in found["replica"]] == [1, 2, 4, 8]


def test_the_replica_has_the_ranks_that_its_settings_name(models):
    found = planned("--model", models["8b"], "--gpus", "12x80", "--set", "replica.tensor_parallel=4")
    assert [each["tensor_parallel"] for each in found["replica"]] == [4]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--gpus", "8x80", "--tensor-parallel", "3"), "cannot share the 32 attention heads"),
        (("--gpus", "2x80", "--tensor-parallel", "4"), "1 engines of 4 ranks needs a device for each rank"),
        (("--gpus", "2x80", "--data-parallel", "4"), "4 engines of 1 ranks needs a device for each rank"),
    ],
)
def test_ranks_that_a_replica_cannot_have_are_an_error_of_the_plan(models, arguments, told):
    result = CliRunner().invoke(app, ["plan", "--model", models["8b"], *arguments])
    assert told in str(result.exception)


def test_keys_and_values_are_copied_where_there_are_more_ranks_than_their_heads(models):
    size = size_of_name(models["30b"])

    def case(ranks: int) -> ReplicaCase:
        return ReplicaCase(
            tensor_parallel=ranks, data_parallel=1, requests=1, context=1, step_tokens=1,
            value_bytes=2, changed=0, gpu=True,
        )  # fmt: skip

    assert kv_bytes(size, case(1)) == 96 * 1024
    assert kv_bytes(size, case(8)) == kv_bytes(size, case(4)) == 24 * 1024


def test_more_requests_than_fit_lead_to_the_number_that_does(models):
    base = ("--model", models["8b"], "--gpus", "1x48", "--context", "32768")
    found = planned(*base, "--requests", "64", status=1)
    (fewer,) = (change for change in found["changes"] if change["what"].startswith("--requests"))
    requests = int(fewer["what"].split()[1].rstrip(","))
    for number, fits in ((requests, True), (requests + 1, False)):
        (replica,) = planned(*base, "--requests", str(number), status=1)["replica"]
        assert replica["fits"] is fits


def test_a_time_is_given_only_with_a_peak_and_a_share(models):
    base = ("--model", models["8b"], "--gpus", "16x80")
    names = {each["name"] for each in planned(*base)["estimates"]}
    assert "step_seconds" not in names
    found = planned(*base, "--peak-tflops", "1000", "--share", "0.4")
    told = {each["name"]: each["value"] for each in found["estimates"]}
    assert told["step_seconds"] == pytest.approx(told["training_tflop"] / (400 * found["trainer_devices"]))
    refused = CliRunner().invoke(app, ["plan", *base, "--peak-tflops", "1000"])
    assert "--share" in str(refused.exception)


def test_the_arithmetic_of_a_step_is_a_third_inference_without_frozen_passes(models):
    found = planned("--model", models["8b"], "--gpus", "16x80", "--set", "trainer.kl.coefficient=0")
    told = {each["name"]: each["value"] for each in found["estimates"]}
    assert (told["sampling_tflop"] + told["prefilling_tflop"]) / told["training_tflop"] == pytest.approx(
        1 / 3, rel=1e-3
    )


def test_a_delta_follows_from_the_learning_rate_or_from_a_density():
    slow, fast = delta_at_rate(1e-7, 0.9), delta_at_rate(1e-5, 0.9)
    assert 0 < slow.changed < fast.changed < fast.elements
    assert 0.3 < slow.exponent_class / slow.changed < 2
    at = delta_at_density(0.02)
    assert at.changed / at.elements == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("text", ["8", "8x", "x80", "0x80", "8x0", "-1x80", "8x80x2", "eight"])
def test_invalid_devices_are_refused(text: str):
    with pytest.raises(ValueError, match="8x80"):
        devices_of(text, None)


def test_one_kind_of_devices_is_asked_for():
    assert devices_of(None, "2x23.5") == Devices(2, 23.5, gpu=False)
    for both in ((None, None), ("1x80", "1x23")):
        with pytest.raises(ValueError, match="one of --gpus and --cpu"):
            devices_of(*both)


def test_the_tables_read_well_in_a_pipe_and_as_csv(models):
    arguments = ["plan", "--model", models["8b"], "--gpus", "8x80"]
    piped = CliRunner().invoke(app, arguments)
    lines = piped.stdout.splitlines()
    assert lines[0].split("\t") == ["trainer_gib", "1", "2", "4", "8"]
    assert any(line.startswith("replica_gib\t1\t2\t4\t8") for line in lines)
    rows = list(csv.DictReader(io.StringIO(CliRunner().invoke(app, [*arguments, "--csv"]).stdout)))
    assert {row["role"] for row in rows} == {"trainer", "replica"}


def test_a_missing_model_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = CliRunner().invoke(app, ["plan", "--model", "nobody/no-such-model", "--gpus", "1x80"])
    assert "no-such-model" in str(result.exception) and "config.json" in str(result.exception)


def test_a_rank_does_not_hold_the_model_when_it_starts(models):
    def host(*arguments: str) -> float:
        found = planned("--model", models["30b"], "--set", "trainer.publish_beside=false", *arguments, status=1)
        return next(each["value"] for each in found["estimates"] if each["name"] == "trainer_host_bytes")

    size = size_of_name(models["30b"])
    whole = host("--gpus", "1x80", "--set", "trainer.compute=float32")
    assert whole > 8 * size.parameters
    for ranks in (1, 8):
        rank = host("--gpus", f"{ranks}x80")
        assert FP32 * size.head / ranks < rank < 8 * GIB + PROCESS_BYTES


def test_memory_of_publishing_during_a_step_is_counted_where_it_is_used(models):
    base = ("--model", models["8b"], "--set", "trainer.kl.coefficient=0")

    def one(*arguments: str) -> dict:
        return planned(*base, *arguments, status=1)["trainer"][0]["bytes"]

    held = 2 * 2 * planned(*base, "--cpu", "1x23", status=1)["model"]["parameters"]
    beside, after = (one("--cpu", "1x23", "--set", f"trainer.publish_beside={on}") for on in ("true", "false"))
    assert beside["publication"] > after["publication"] == held
    # Half of the elements of a block of 2^24, at 36 bytes each, and 64 MiB of output, as 32 chunks three times.
    dense = one("--cpu", "1x23", "--density", "0.5")
    assert 36 * 2**23 + 160 * 2**20 < dense["publication"] - held < 600 * 2**20
    assert one("--gpus", "1x80")["publication"] == held
    assert one("--gpus", "1x80", "--set", "trainer.publish.on_device=false")["publication"] == 0
    told = planned(*base, "--gpus", "1x80", status=1)["changes"]
    assert "trainer.publish.on_device=false" in {change["what"] for change in told}
    assert one("--gpus", "1x80", "--set", "trainer.score_older_every=0")["older_weights"] == 0
    assert one("--gpus", "1x80")["older_weights"] == held / 2


def test_the_formula_is_within_15_percent_of_a_process_that_took_two_steps(kafka, monkeypatch, capsys):
    arguments = ["--bootstrap", kafka.bootstrap, "--model", "small", "--rows", "2"]
    monkeypatch.setattr("sys.argv", ["bench_plan.py", *arguments])
    bench_plan.main()
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert found["planned_mb"] == pytest.approx(found["measured_mb"], rel=0.15)
