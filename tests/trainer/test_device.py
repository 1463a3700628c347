"""The device of a trainer: which one is chosen, which are refused, and how it changes the hash of a step."""

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import PretrainedConfig

from tests.trainer.conftest import make_rollout
from tests.trainer.families import make_model
from tidemill.kernels.weights.ranks import Ranks
from tidemill.trainer import attention
from tidemill.trainer.attention import TreeAttention, tree_calls
from tidemill.trainer.batch import pack
from tidemill.trainer.choices import StepMachine
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.job import SINGLE, Job, compute_dtype, device_of
from tidemill.trainer.policy import SampledLogprobs
from tidemill.trainer.sharding import layers_of, require_divisible
from tidemill.trainer.step import Learner

TWO_RANKS = StepMachine(ranks=2)


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that makes torch report a number of GPUs; nothing is computed on them."""
    return lambda number: monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


@pytest.mark.parametrize(
    ("device", "there", "job", "expected"),
    [
        ("auto", 0, SINGLE, "cpu"),
        ("auto", 2, SINGLE, "cuda:0"),
        ("auto", 2, Job(Ranks(), 1, 2), "cuda:1"),
        ("cpu", 2, SINGLE, "cpu"),
        ("cuda", 2, Job(Ranks(), 1, 2), "cuda:1"),
        ("cuda:1", 2, SINGLE, "cuda:1"),
    ],
)
def test_the_device_is_chosen(gpus, device, there, job, expected):
    gpus(there)
    assert device_of(TrainerSettings(device=device), job) == torch.device(expected)


@pytest.mark.parametrize(
    ("device", "there", "job", "message"),
    [
        ("cuda", 0, SINGLE, "trainer.device is cuda and torch sees 0 CUDA devices here, not number 0: set"),
        ("cuda:3", 2, SINGLE, "sees 2 CUDA devices here, not number 3"),
        ("auto", 2, Job(Ranks(), 2, 3), "not number 2: set trainer.device to cpu, start fewer ranks"),
        ("cuda:1", 2, Job(Ranks(), 0, 2), "cuda:1 is one GPU for the 2 ranks of this machine: set it to cuda"),
    ],
)
def test_a_missing_device_is_refused(gpus, device, there, job, message):
    gpus(there)
    with pytest.raises(ValueError, match=message):
        device_of(TrainerSettings(device=device), job)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "mps"])
def test_an_unknown_kind_of_device_is_refused(device):
    with pytest.raises(ValidationError, match="device"):
        TrainerSettings(device=device)


def test_the_type_of_the_computation():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert compute_dtype(TrainerSettings(), cpu) == torch.float32
    assert compute_dtype(TrainerSettings(), gpu) == torch.bfloat16
    assert compute_dtype(TrainerSettings(compute="float32"), gpu) == torch.float32
    assert compute_dtype(TrainerSettings(compute="bfloat16"), cpu) == torch.bfloat16


def test_one_process_on_a_cpu_in_float32_keeps_its_hash():
    assert TrainerSettings(share_prefixes=False).arithmetic_hash(StepMachine()) == "65df4e88a6d39794"
    others = [
        StepMachine("cuda"),
        StepMachine(compute="bfloat16"),
        TWO_RANKS,
        StepMachine(ranks=3),
        StepMachine("cuda", "bfloat16", 2),
    ]
    settings = TrainerSettings()
    assert settings.arithmetic_hash() != "65df4e88a6d39794", "prefixes are shared"
    assert len({settings.arithmetic_hash(machine) for machine in (StepMachine(), *others)}) == 6
    assert settings.arithmetic_hash() != TrainerSettings(experts="eager").arithmetic_hash()
    assert settings.arithmetic_hash() != TrainerSettings(expert_parallel=2).arithmetic_hash()
    views = (("mxfp8", "matched"), ("mxfp8", "masters"), ("nvfp4", "matched"))
    quantised = [TrainerSettings(serving_format=form, forward=forward) for form, forward in views]
    assert len({made.arithmetic_hash() for made in (settings, *quantised)}) == 4
    same = TrainerSettings(device="cpu", checkpoint_activations=True, checkpoint_every=3)
    assert settings.arithmetic_hash() == same.arithmetic_hash()


def test_another_machine_and_other_settings_have_different_errors():
    settings, other = TrainerSettings(), TrainerSettings(row_tokens=64)
    recorded = settings.arithmetic_hash(StepMachine("cuda", "bfloat16", 8))
    assert settings.difference(recorded, TWO_RANKS) == (
        "by 8 ranks on a CUDA device in bfloat16, now by 2 ranks on a CPU in float32"
    )
    told = other.difference(recorded, StepMachine())
    assert told == f"with other settings (hash {recorded}, now {other.arithmetic_hash()})"


def test_a_model_whose_layers_are_not_marked_cannot_be_sharded():
    class Unmarked(nn.Module):
        config = PretrainedConfig(num_hidden_layers=2)

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    with pytest.raises(ValueError, match=r"Unmarked marks 0 modules as layers .* and has 2: it"):
        layers_of(Unmarked())


EXPERTS = "no plan that divides the experts of"


@pytest.mark.parametrize(
    ("family", "changes", "over", "ranks", "why"),
    [
        ("Qwen3Moe", {}, 2, 3, r"expert_parallel is 2 and the job has 3 rank\(s\): start 2 or a multiple of it"),
        ("Qwen3Moe", {}, 2, 1, r"and the job has 1 rank\(s\)"),
        ("Qwen3Moe", {"num_experts": 6}, 4, 4, "has 6 experts: set it to a number that divides both these and the 4 r"),
        ("Qwen3", {}, 2, 2, f"{EXPERTS} Qwen3ForCausalLM over ranks, each expert whole: set it to 1"),
        ("Qwen3Moe", {"mlp_only_layers": [0, 1]}, 2, 2, EXPERTS),
        ("Qwen3Moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}, 2, 4, ""),
        ("Qwen3", {}, 1, 3, ""),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(family, changes, over, ranks, why):
    model = make_model(family, **changes)
    if not why:
        return require_divisible(model, over, ranks)
    with pytest.raises(ValueError, match=why):
        require_divisible(model, over, ranks)


def test_experts_that_are_not_divided_whole_are_refused():
    model = make_model("Qwen3Moe")
    model.ep_plan = model.ep_plan | {"model.layers.*.mlp.experts.down_proj": "colwise"}
    with pytest.raises(ValueError, match=EXPERTS):
        require_divisible(model, 2, 2)


def test_a_learner_refuses_experts_before_it_changes_the_model():
    model = make_model("Qwen3Moe")
    with pytest.raises(ValueError, match="expert_parallel is 2 and the job has 1"):
        Learner(model, TrainerSettings(device="cpu", kl={"coefficient": 0.0}, expert_parallel=2), None)


def test_a_row_moves_with_all_of_its_tensors():
    (row,) = pack([make_rollout("g", index, 1.0) for index in range(4)], 1000, 64)
    moved = row.to(torch.device("meta"))
    short = [tensor for runs in moved.tree.short for tensor in (runs.tokens, runs.slots, runs.mask)]
    tensors = [moved.input_ids, moved.position_ids, moved.predicting, moved.predictors, moved.targets]
    assert {tensor.device.type for tensor in [*tensors, *short, moved.sampler_logprobs, moved.sequence]} == {"meta"}
    assert short, "nothing would be seen of the batches"
    assert (moved.tokens, moved.tree.runs, moved.tree.trunks) == (row.tokens, row.tree.runs, row.tree.trunks)
    assert row.to(torch.device("cpu")) is row


def random_tree(length: int) -> torch.Tensor:
    """Return the parents of a long trunk with branches, one of them long."""
    parents = torch.arange(-1, length - 1)
    parents[100], parents[130], parents[140] = 79, 79, 59
    return parents


@pytest.mark.parametrize("kernel", [True, False])
def test_attention_in_half_precision_equals_full_precision_up_to_rounding(kernel, monkeypatch):
    """With torch's attention kernel for CPUs, and with the matrix products for every device."""
    if not kernel:
        monkeypatch.setattr(attention, "_has_kernel", lambda *_: False)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(1, heads, 240, 16, generator=generator) for heads in (4, 2, 2)]
    slope = torch.randn(1, 4, 240, 16, generator=generator)
    calls, results = tree_calls(random_tree(240).numpy()), {}
    for dtype in (torch.float32, torch.bfloat16):
        own = [state.detach().to(dtype).requires_grad_() for state in states]
        out = TreeAttention.apply(*own, calls, 0.25)
        out.backward(slope.to(dtype))
        results[dtype] = [out.detach(), *(state.grad for state in own)]
        assert all(tensor.dtype == dtype for tensor in results[dtype])
    for full, half in zip(results[torch.float32], results[torch.bfloat16], strict=True):
        assert float((full - half.float()).norm() / full.norm()) < 0.01


def test_logprobs_in_half_precision_are_float32(monkeypatch):
    """In chunks of the vocabulary, whose gradients are summed."""
    monkeypatch.setattr("tidemill.trainer.policy.CHUNK_SCORES", 300)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(20, 16, generator=generator), torch.randn(64, 16, generator=generator)
    predictors, targets = torch.arange(20), torch.randint(64, (20,), generator=generator)
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        own = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weight)]
        logprobs, entropy = SampledLogprobs.apply(*own, None, predictors, targets, True)
        assert logprobs.dtype == entropy.dtype == torch.float32
        logprobs.sum().backward()
        grads.append([logprobs.detach(), *(tensor.grad.float() for tensor in own)])
    for full, half in zip(*grads, strict=True):
        assert float((full - half).norm() / full.norm()) < 0.02
