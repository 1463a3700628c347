"""Trainers of several ranks: each world size is repeatable bit for bit, and a lost rank ends the job."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.trainer import rank_driver
from tests.trainer.conftest import tiny_model
from tests.trainer.families import make_model
from tests.trainer.rank_driver import STEPS, settings_of
from tidemill.kernels.fingerprint import ZERO
from tidemill.kernels.weights.ranks import Ranks
from tidemill.kernels.weights.tensor_parts import TensorPart
from tidemill.trainer.checkpoint import CheckpointStore
from tidemill.trainer.job import Job

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 2400
"""For all jobs together. In each, the ranks wait for one another: beside 20 busy processes they took 925 s."""
pytestmark = pytest.mark.timeout(LIMIT_S + 300)
KL = {"kl": {"coefficient": 0.05}, "objective": "grpo", "minibatches": 2}
EXPERTS = {"model": "{root}/experts", "experts": "grouped_mm"}
DIVIDED = {**EXPERTS, "expert_parallel": 2}
DIVIDED_TWICE = {**DIVIDED, "checkpoint_activations": True}
GATE = "layers.1.mlp.gate"
SCORED = {"model": "{root}/scored", "compute": "bfloat16"}
CLIPPED = {"optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.01}}
ROUNDED = {"serving_format": "nvfp4", "serving_activations": "nvfp4"}
HALF_KL = {**KL, **EXPERTS, "compute": "bfloat16", "score_older_every": 2}
SCORED_IN_FP32 = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
ONLINE = {"online": {"enabled": True, "simulated_weight": 0.3}}
HALF = {"compute": "bfloat16"}
ODD = {"vocab_size": 161, "head_dim": 10, "intermediate_size": 97}


def laid(model: str, **settings: object) -> dict[str, object]:
    """Return the options of a job that reads a model by rows."""
    return {"model": f"{{root}}/{model}", "settings": settings}


SILENT = {"answers_s": 0.2}
"""The lost rank cannot report its failure, so that the others need not wait for it."""
JOBS = {
    "divided of four": (4, "trained", {"settings": DIVIDED}),
    "divided grpo of four": (4, "trained", {"settings": {**KL, **DIVIDED}, "groups": ["a", "b"]}),
    "clipped four": (4, "saved_first", {"settings": {**DIVIDED, **CLIPPED}, "store": "{root}/clipped four"}),
    "divided saved": (4, "saved", {"settings": DIVIDED_TWICE, "store": "{root}/divided"}),
    "laid unevenly divided experts": (4, "laid", laid("Six", expert_parallel=2)),
    "bf16 kl": (3, "trained", {"settings": HALF_KL, "steps": 3}),
    "bf16 kl of copies": (3, "trained", {"settings": HALF_KL, "steps": 3, "copies": True}),
    "grpo three": (3, "trained", {"settings": KL, "groups": ["a", "b"]}),
    "laid odd": (3, "laid", laid("Odd")),
    "laid on more ranks than experts": (3, "laid", laid("experts")),
    "two": (2, "trained", {}),
    "recomputed": (2, "trained", {"settings": {"checkpoint_activations": True}}),
    "bf16 two": (2, "trained", {"settings": {"compute": "bfloat16"}}),
    "online two": (2, "trained", {"settings": ONLINE, "online": True}),
    "experts two": (2, "trained", {"settings": EXPERTS}),
    "divided": (2, "trained", {"settings": DIVIDED}),
    "scored bf16 two": (2, "trained", {"settings": {**EXPERTS, **SCORED}}),
    "scored bf16 divided": (2, "trained", {"settings": {**DIVIDED, **SCORED}}),
    "crowded divided": (2, "trained", {"settings": {**DIVIDED, "routing": "replayed"}, "routed": [0, 1]}),
    "clipped two": (2, "saved_first", {"settings": {**DIVIDED, **CLIPPED}, "store": "{root}/clipped two"}),
    "saved": (2, "saved", {}),
    "restarted": (2, "restarted", {}),
    "blocks two": (2, "restarted", {"settings": {"serving_format": "fp8_blocks"}}),
    "blocks two of masters": (2, "restarted", {"settings": {"serving_format": "fp8_blocks", "forward": "masters"}}),
    "rounded two": (2, "trained", {"settings": {**ROUNDED, "checkpoint_activations": True}, "steps": 2}),
    "rounded experts divided": (2, "trained", {"settings": {**DIVIDED, **ROUNDED}, "steps": 2}),
    "laid experts": (2, "laid", laid("experts", experts="grouped_mm")),
    "laid untied in half": (2, "laid", laid("Llama", **HALF)),
    "laid divided experts": (2, "laid", laid("experts", expert_parallel=2, **HALF)),
    "laid stacked in several files": (2, "laid", laid("Stacked")),
    "laid tied, with scales over ranks": (2, "laid", laid("Qwen3", serving_format="fp8_blocks")),
    "Granite": (2, "refused", laid("Granite")),
    "Mistral": (2, "refused", laid("Mistral")),
    "different": (2, "different", {}),
    "one": (1, "trained", {}),
    "bf16 one": (1, "trained", {"settings": {"compute": "bfloat16"}}),
    "grpo one": (1, "trained", {"settings": KL, "groups": ["a", "b"]}),
    "online one": (1, "trained", {"settings": ONLINE, "online": True}),
    "experts one": (1, "trained", {"settings": EXPERTS}),
    "experts grpo one": (1, "trained", {"settings": {**KL, **EXPERTS}, "groups": ["a", "b"]}),
    "crowded one": (1, "trained", {"settings": {**EXPERTS, "routing": "replayed"}, "routed": [0, 1]}),
    "clipped one": (1, "saved_first", {"settings": {**EXPERTS, **CLIPPED}, "store": "{root}/clipped one"}),
    "divided saved by one": (1, "resaved", {"settings": EXPERTS, "store": "{root}/divided", "restore": 1, "save": 4}),
    "saved by one": (1, "resaved", {"restore": 1, "save": 4}),
    "blocks one": (1, "restarted", {"settings": {"serving_format": "fp8_blocks"}}),
    "rounded one": (1, "trained", {"settings": ROUNDED, "steps": 2}),
    "rounded experts one": (1, "trained", {"settings": {**EXPERTS, **ROUNDED}, "steps": 2}),
    "laid experts in half": (1, "laid", laid("experts", **HALF)),
    "saved again": (2, "resaved", {"restore": 4, "save": 6}),
    "divided saved again": (4, "resaved", {"settings": DIVIDED, "store": "{root}/divided", "restore": 4, "save": 6}),
    "failing": (2, "failing", {"how": "raise"}),
    "killed": (2, "failing", {"how": "kill", **SILENT}),
    "hanging": (2, "failing", {"settings": {**DIVIDED, "ranks_timeout_s": 9}, "how": "hang", "within": GATE, **SILENT}),
    "killed saving": (2, "killed_saving", {"store": "{root}/store of killed", **SILENT}),
    "first killed": (3, "failing", {"how": "kill", "rank": 0}),
}
"""Those for the same number of ranks are together, since they run in the same processes."""
LAID = [name for name, (_, scenario, _) in JOBS.items() if scenario == "laid"]
UNTRAINABLE = {
    "Granite": ({"logits_scaling": 8.0}, r"Granite.* cannot be trained: it scales its logits \(`logits_scaling` 8.0\)"),
    "Mistral": ({"sliding_window": 100}, "Mistral.* cannot be trained: layer 0 has a sliding window"),
}


def stacked(directory: Path, model: PreTrainedModel) -> None:
    """Write a checkpoint as an anchor contains it: with the model's own names, here in two files."""
    model.config.save_pretrained(directory)
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in model.state_dict().items()}
    names, places = list(tensors), {}
    for number, own in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in own}, directory / file)
        places |= dict.fromkeys(own, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """A directory with the results of the jobs."""
    root = tmp_path_factory.mktemp("ranks")
    tiny_model().bfloat16().save_pretrained(root / "model")
    jobs = [
        {"name": name, "ranks": ranks, "scenario": scenario, "options": options}
        for name, (ranks, scenario, options) in JOBS.items()
    ]
    make_model("Qwen3Moe").bfloat16().save_pretrained(root / "experts")
    make_model("Glm4Moe", **SCORED_IN_FP32).bfloat16().save_pretrained(root / "scored")
    for family in ("Qwen3", "Llama"):
        make_model(family).bfloat16().save_pretrained(root / family)
    make_model("Llama", **ODD).save_pretrained(root / "Odd")
    make_model("Qwen3Moe", num_experts=6).bfloat16().save_pretrained(root / "Six")
    stacked(root / "Stacked", make_model("Qwen3Moe"))
    for family, (changes, _) in UNTRAINABLE.items():
        make_model(family, **changes).bfloat16().save_pretrained(root / family)
    (root / "jobs.json").write_text(json.dumps(jobs).replace("{root}", str(root)))
    command = [sys.executable, "-m", rank_driver.__name__, str(root / "jobs.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    logs = "\n".join(f"{path.stem}:\n{path.read_text()}" for path in sorted(root.glob("*.log")))
    assert done.returncode == 0, done.stderr + logs
    print(logs)
    return root


def found(out: Path, name: str, rank: int = 0) -> dict:
    return json.loads((out / f"{name}-{rank}.json").read_text())


def ended(out: Path, name: str) -> list[int]:
    return json.loads((out / f"{name}.json").read_text())


def fingerprints(out: Path, name: str) -> list[str]:
    return [step["fingerprint"] for step in found(out, name)["steps"]]


def differing(out: Path, one: str, other: str) -> tuple[int, int]:
    """Return the number of bf16 weights that differ between two runs, and the number of all weights."""
    views = [found(out, name)["view"] for name in (one, other)]
    pairs = [(np.array(bits), np.array(views[1][name])) for name, bits in views[0].items()]
    return sum(int((a != b).sum()) for a, b in pairs), sum(a.size for a, _ in pairs)


def test_a_world_size_is_repeatable(out):
    """Also its metrics, here of the second step."""
    assert found(out, "saved") == found(out, "two")["steps"][1]
    assert len(set(fingerprints(out, "two"))) == STEPS


@pytest.mark.parametrize(
    ("one", "more"),
    [
        ("one", "two"),
        ("grpo one", "grpo three"),
        ("online one", "online two"),
        ("bf16 one", "bf16 two"),
        ("experts one", "experts two"),
        ("experts one", "divided"),
        ("experts one", "divided of four"),
        ("experts grpo one", "divided grpo of four"),
        ("crowded one", "crowded divided"),
    ],
)
def test_ranks_make_the_weights_of_one_process(out, one, more):
    """Equal up to rounding: the gradients of rows are summed in another order."""
    apart, of = differing(out, one, more)
    assert apart < 0.01 * of
    for here, there in zip(found(out, one)["steps"], found(out, more)["steps"], strict=True):
        assert here["tokens"] == there["tokens"]
        assert list(here["metrics"]) == list(there["metrics"])
        assert there["metrics"] == pytest.approx(here["metrics"], rel=1e-3, abs=1e-5)
        # The tokens of all ranks, in the order of the rollouts: each slice has the same tokens.
        assert list(here["apart"]) == list(there["apart"])
        for name, numbers in here["apart"].items():
            assert there["apart"][name] == pytest.approx(numbers, rel=1e-2, abs=1e-4), name


def test_repeated_rows_of_idle_ranks_change_nothing(out):
    """One of three ranks has no row of its own in an update: the first step has the metrics of one process."""
    here, there = (found(out, name)["steps"][0]["metrics"] for name in ("grpo one", "grpo three"))
    for name in ("loss", "entropy", "mismatch/k3", "packing/tokens", "packing/computed"):
        assert there[name] == pytest.approx(here[name], rel=1e-5), name


def test_activations_that_are_computed_twice_give_the_same_bits(out):
    assert fingerprints(out, "recomputed") == fingerprints(out, "two")
    assert found(out, "recomputed")["hash"] == found(out, "two")["hash"]


def test_divided_experts_are_repeatable_also_if_activations_are_computed_twice(out):
    here, again = found(out, "divided of four")["steps"][1], found(out, "divided saved")
    assert here["fingerprint"] == again["fingerprint"]
    for name in ("loss", "grad_norm", "entropy"):
        assert here["metrics"][name] == again["metrics"][name], name


@pytest.mark.parametrize("name", ["clipped two", "clipped four"])
def test_divided_experts_have_the_clipped_gradients_of_one_process(out, name):
    """Checkpoints after one step: the first moments are a tenth of the gradients, scaled to the limit of their norm."""
    one, more = (CheckpointStore(str(out / store), "run", "main", 9).read(1)[1] for store in ("clipped one", name))
    assert one.keys() == more.keys()
    for key in one:
        torch.testing.assert_close(more[key], one[key], rtol=0, atol=2e-6 * float(one[key].abs().max()), msg=key)
    moments = [moment for key, moment in more.items() if key.startswith("exp_avg/")]
    assert 10 * float(torch.nn.utils.get_total_norm(moments)) == pytest.approx(0.01, rel=1e-4)
    here, there = (found(out, run)["metrics"] for run in ("clipped one", name))
    for metric in ("loss", "grad_norm"):
        assert there[metric] == pytest.approx(here[metric], rel=1e-6), metric


def test_the_parts_of_divided_experts_are_the_whole_version(out):
    for name in ("divided", "divided of four", "scored bf16 divided"):
        whole = {key: np.array(bits, np.uint16) for key, bits in found(out, name)["view"].items()}
        parts = [TensorPart(key, "bfloat16", bits.shape, 0, bits) for key, bits in whole.items()]
        assert sum((part.fingerprint() for part in parts), ZERO).hex() == fingerprints(out, name)[-1], name


def test_divided_experts_are_computed_in_bf16_like_gathered_ones(out):
    """Also if the router gives the scores of the experts in fp32."""
    here, there = (found(out, name)["steps"] for name in ("scored bf16 two", "scored bf16 divided"))
    assert there[0]["metrics"] == pytest.approx(here[0]["metrics"], rel=1e-5)
    for one, other in zip(here, there, strict=True):
        assert other["metrics"]["loss"] == pytest.approx(one["metrics"]["loss"], rel=0.01)


def test_a_checkpoint_of_divided_experts_is_read_by_one_process_and_back(out):
    """Its files are not in the order of the rows: ranks 0 to 3 hold the experts 0, 2, 1 and 3."""
    saved, one, again = (found(out, f"divided saved{by}") for by in ("", " by one", " again"))
    assert one["recorded"] == one["restored"] == again["recorded"] == again["restored"]
    assert saved["fingerprint"] == again["fingerprint"] == fingerprints(out, "divided of four")[1]
    states = [CheckpointStore(str(out / "divided"), "run", "main", 9).read(step)[1] for step in (1, 4, 6)]
    for key, tensor in states[0].items():
        assert torch.equal(states[1][key], tensor) and torch.equal(states[2][key], tensor), key


def test_another_computation_dtype_gives_other_bits(out):
    assert fingerprints(out, "bf16 one") != fingerprints(out, "one")
    loss = [found(out, name)["steps"][0]["metrics"]["loss"] for name in ("one", "bf16 one")]
    assert loss[0] == pytest.approx(loss[1], rel=0.05)


def test_masters_rounded_by_the_gathering_train_like_masters_with_rounded_copies(out):
    """Also with minibatches, a reference, tokens that are scored at older weights, and ranks with unequal rows."""
    assert found(out, "bf16 kl") == found(out, "bf16 kl of copies")
    assert len(set(fingerprints(out, "bf16 kl"))) == 3


def test_the_hash_names_the_machine(out):
    assert found(out, "one")["hash"] == settings_of().arithmetic_hash()
    assert len({found(out, name)["hash"] for name in ("one", "two", "bf16 one", "bf16 two")}) == 4
    assert len({found(out, name)["hash"] for name in ("experts two", "divided", "divided of four")}) == 3


def test_a_checkpoint_is_read_by_another_number_of_ranks(out):
    """From 2 ranks to 1 to 2: weights and moments are bit-equal, and the next step equals the uninterrupted one."""
    saved, one, again = (found(out, name) for name in ("saved", "saved by one", "saved again"))
    assert one["recorded"] == one["restored"] == again["recorded"] == again["restored"]
    assert saved["fingerprint"] == again["fingerprint"] == fingerprints(out, "two")[1]
    folder = out / "store/run/checkpoints/main"
    whole = load_file(folder / "step-00000004.safetensors")
    for step in (1, 6):
        first, second = (load_file(folder / f"step-{step:08d}{other}.safetensors") for other in ("", ".rank-1-of-2"))
        assert first.keys() == second.keys() == whole.keys()
        for name, tensor in whole.items():
            parts = [part.numpy() for part in (first[name], second[name])]
            joined = np.concatenate(parts) if tensor.ndim else parts[0]
            np.testing.assert_array_equal(joined.view(np.int32), tensor.numpy().view(np.int32), err_msg=name)


@pytest.mark.parametrize("name", ["restarted", "clipped two"])
def test_ranks_return_to_the_starting_weights(out, name):
    here = found(out, name)
    assert here["restarted"] == here["start"]


def test_blocks_shared_by_two_ranks_have_the_scales_of_one_process(out):
    one, *two = (found(out, f"blocks {name}") for name in ("one", "two", "two of masters"))
    assert one["start"] != found(out, "restarted")["start"]
    assert two == [one, one]


def test_a_rank_that_fails_ends_the_others_with_its_reason(out):
    here = found(out, "failing")
    assert here["class"] == "RanksLostError"
    assert here["error"].startswith("rank 1: MemoryError: no room for a row")
    assert ended(out, "failing") == [0, 1]


def test_a_killed_rank_is_named(out):
    here = found(out, "killed")
    assert here["class"] == "RanksLostError"
    assert here["error"].startswith("rank 1 is gone or hangs; start the trainer again, it goes on from the log")
    assert ended(out, "killed") == [0, -9]


def test_a_rank_that_hangs_before_it_sends_tokens_to_experts_is_named(out):
    """The time limit is that of the settings, also for the groups over which experts are divided."""
    here = found(out, "hanging")
    assert here["error"].startswith("rank 1 is gone or hangs") and "9000ms" in here["error"]
    assert ended(out, "hanging") == [0, 1]


def test_a_rank_killed_while_saving_leaves_no_checkpoint(out):
    here = found(out, "killed saving")
    assert here["error"].startswith("rank 1 is gone or hangs")
    assert here["steps"] == []
    assert list((out / "store of killed").rglob("*.partial")), "it was killed before it had written anything"


def test_the_other_ranks_end_if_the_first_one_is_lost(out):
    assert ended(out, "first killed") == [-9, 1, 1]
    logs = [(out / f"first killed-{rank}.log").read_text() for rank in (1, 2)]
    assert all("RanksLostError: the first rank, or torchrun, is gone; start the trainer again" in log for log in logs)


def test_ranks_with_different_settings_are_refused(out):
    for rank in (0, 1):
        assert (
            "rank 1 has trainer.row_tokens 128, rank 0 has 96: start all ranks"
            in found(out, "different", rank)["error"]
        )


@pytest.mark.parametrize("name", LAID)
def test_rows_that_ranks_read_equal_a_whole_load_bit_for_bit(out, name):
    ranks, _, options = JOBS[name]
    for rank in (here := [found(out, name, rank) for rank in range(ranks)]):
        assert (rank["differing"], rank["differing after a step"]) == ([], [])
        assert "buffer/model.rotary_emb.inv_freq" in rank["names"]
    tied = options["model"].endswith("Qwen3")
    assert ("master/lm_head.weight" in here[0]["names"]) == (not tied), "tied weights are one"


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_all_ranks_refuse_a_model_that_they_would_compute_wrongly(out, name):
    assert ended(out, name) == [0, 0]
    for rank in (0, 1):
        assert re.match(UNTRAINABLE[name][1], found(out, name, rank)["error"])


class TwoInstallations(Ranks):
    """Two ranks, of which the second one's Tidemill has a setting that the first one's does not have."""

    def gather(self, make):
        return [make(), {**make(), "trainer.colour": "blue"}]


def test_ranks_with_different_installations_are_refused():
    with pytest.raises(ValueError, match=r"rank 1 has trainer.colour blue, rank 0 has None.*the same installation"):
        Job(TwoInstallations()).require_same({"trainer": settings_of()})


class SeenFacts(Ranks):
    """One process, which keeps what its ranks would compare."""

    def gather(self, make):
        self.facts = make()
        return [self.facts]


@pytest.mark.parametrize("changed", ["trainer/job.py", "trainer/replay/steps.py", "kernels/weights/bits.py"])
def test_ranks_compare_all_code_that_computes(changed, tmp_path, monkeypatch):
    for name in ("trainer/job.py", "trainer/replay/steps.py", "kernels/weights/bits.py", "schemas/records.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    monkeypatch.setattr("tidemill.trainer.job.__file__", str(tmp_path / "trainer" / "job.py"))
    ranks, seen = SeenFacts(), []
    for text in ("one", "one", "another"):
        (tmp_path / changed).write_text(text)
        Job(ranks).require_same({})
        seen.append(ranks.facts["code"])
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize(
    ("alone", "together"),
    [("rounded one", "rounded two"), ("rounded experts one", "rounded experts divided")],
)
def test_rounded_activations_are_those_of_one_process(out, alone, together):
    """Without the rounding the loss of a step differs by 1 % and more."""
    losses = [[step["metrics"]["loss"] for step in found(out, name)["steps"]] for name in (alone, together)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
