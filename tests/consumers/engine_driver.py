"""Real vLLM engines driven in this process, and the results that the tests compare: engines of every kind are updated
from version A to version B. `drivers.py` runs it.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from tests.consumers import replica_driver as driver
from tidemill.consumers.replica.environment import prepare_environment, quick_imports
from tidemill.consumers.replica.ranks import RankCoverage, handed_over
from tidemill.kernels.fingerprint import ZERO, TensorKey, fingerprint
from tidemill.kernels.weights.bits import TensorSpec, Weight
from tidemill.kernels.weights.checkpoint import map_checkpoint, save_checkpoint, specs_of
from tidemill.kernels.weights.mirror import ElementChange

View = dict[str, np.ndarray]
"""Tensor name -> bit patterns in its shape."""


@dataclass(frozen=True)
class Kind:
    """A model and the dtype that an engine serves it in."""

    dtype: str
    tied: bool = False
    intermediate: int = 0
    """Intermediate size of each of four experts; 0 for a dense model."""
    norms: str = "bfloat16"
    """Dtype of the norms' weights in the checkpoint."""


KINDS = {
    "experts untied float32, padded": Kind("float32", intermediate=48),
    "experts tied bfloat16": Kind("bfloat16", tied=True, intermediate=64),
    "dense tied float32, norms float32": Kind("float32", tied=True, norms="float32"),
    "dense untied bfloat16": Kind("bfloat16"),
}
"""Each has 200 words, which the engine pads to 256 rows; it pads 48 to 64 columns.

Those with experts are first: vLLM's process groups are made once, and only then for experts too.
"""


def prepare() -> None:
    """Set the environment of engines and import vLLM."""
    prepare_environment(1)
    with quick_imports():
        import vllm.v1.engine.llm_engine
        import vllm.v1.worker.cpu_worker  # noqa: F401


def make_model(kind: Kind, directory: Path) -> Path:
    """Write a tiny random checkpoint of a kind."""
    driver.make_checkpoint(directory, tied=kind.tied)
    if kind.intermediate:
        _make_experts(kind, directory)
    save_checkpoint(directory, {name: _recast(name, held, kind) for name, held in map_checkpoint(directory).items()})
    return directory


def _make_experts(kind: Kind, directory: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=200, hidden_size=64, intermediate_size=64, moe_intermediate_size=kind.intermediate,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=4,
        num_experts_per_tok=2, max_position_embeddings=512, tie_word_embeddings=kind.tied,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.to(torch.bfloat16).save_pretrained(directory)


def _recast(name: str, held: Weight, kind: Kind) -> Weight:
    """Return a weight of a kind, copied because the file that it is mapped from is overwritten."""
    if kind.norms == "bfloat16" or not name.endswith("norm.weight"):
        return Weight(held.dtype, held.bits.copy())
    # Low bits that bf16 does not have, to detect a conversion.
    low = np.random.default_rng(5).integers(1, 1 << 16, held.bits.shape).astype(np.uint32)
    return Weight("float32", (held.bits.astype(np.uint32) << 16) | low)


def save_view(view: View, base: Path, directory: Path) -> Path:
    """Write a checkpoint with these weights and the dtypes, configuration and tokenizer of `base`."""
    directory.mkdir()
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    weights = {
        name: Weight(held.dtype, view[name].reshape(held.bits.shape)) for name, held in map_checkpoint(base).items()
    }
    save_checkpoint(directory, weights)
    return directory


def total(view: View) -> str:
    """Return the fingerprint of a whole version, in hexadecimal."""
    return sum((fingerprint(bits, TensorKey.of(name)) for name, bits in view.items()), start=ZERO).hex()


class InProcess:
    """One vLLM engine in this process, with access to its engine core's methods.

    It lives as long as the process: the end of an engine ends the process groups that all of them use, and collects
    garbage in all that is loaded.
    """

    _all: ClassVar[list[InProcess]] = []

    def __init__(self, directory: Path, dtype: str, **options: Any) -> None:
        from vllm import EngineArgs, LLMEngine

        from tidemill.consumers.replica.plugin import limit_kernel_search_to_vllm

        limit_kernel_search_to_vllm()
        options = {"max_model_len": 128, "kv_cache_memory_bytes": 16 << 20, **options}
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(directory), dtype=dtype, enforce_eager=True, block_size=32, disable_log_stats=True,
                worker_extension_cls="tidemill.consumers.replica.extension.ReplicaExtension", **options,
            )
        )  # fmt: skip
        self.core = self.engine.engine_core.engine_core
        self._all.append(self)
        self.install(specs_of(map_checkpoint(directory)))

    def install(self, specs: list[TensorSpec]) -> None:
        """Map these tensors."""
        self.names = [spec.name for spec in specs]
        boxes = self.core.tidemill_install([(spec.name, list(spec.shape), spec.dtype) for spec in specs], 0)
        self.holdings = RankCoverage(specs, boxes)

    def work(self, work: str, *arguments: str) -> dict[str, Any]:
        """Run long work on the ranks, as `ReplicaEngine` does; return the engine core's answer."""
        self.core.tidemill_begin(work, list(arguments))
        deadline = time.monotonic() + 180
        while (answer := self.core.tidemill_answers()) is None:
            assert time.monotonic() < deadline, work
        assert not answer["refused"], answer
        return answer

    def stage(self, changes: list[tuple[str, np.ndarray, np.ndarray]]) -> dict[str, float]:
        """Prepare (name, indices, bits) changes, as `ReplicaEngine.apply` does."""
        with handed_over([ElementChange(*change) for change in changes]) as handed:
            return self.work("stage", *handed)

    def commit(self, version: int) -> dict[str, float]:
        """Write the staged changes; return the engine core's report."""
        report = self.core.tidemill_commit(version, False)
        assert not report["refused"], report
        return report

    def apply(self, old: View, new: View, version: int) -> dict[str, float]:
        """Write the difference of two views, with its elements in random order."""
        random, changes = np.random.default_rng(version), []
        for name in new:
            changed = random.permutation(np.flatnonzero(old[name].reshape(-1) != new[name].reshape(-1)))
            changes.append((name, changed, new[name].reshape(-1)[changed]))
        self.stage(changes)
        return self.commit(version)

    def load(self, directory: Path, version: int) -> dict[str, float]:
        """Write a whole checkpoint."""
        self.work("load", str(directory))
        return self.commit(version)

    def prove(self) -> dict[str, Any]:
        """Return the proof."""
        return asdict(self.holdings.proof([self.work("prove")]))

    def begin(self, name: str, prompt: list[int], salt: str = "", **sampling: Any) -> None:
        """Request an answer, by default a greedy one."""
        from vllm import SamplingParams

        salted = {"cache_salt": salt} if salt else {}
        asked = SamplingParams(**{"temperature": 0, **sampling})
        self.engine.add_request(name, {"prompt_token_ids": prompt, **salted}, asked)

    def end(self) -> dict[str, Any]:
        """Wait for all answers and return them, by name."""
        done = {}
        while self.engine.has_unfinished_requests():
            done |= {output.request_id: output for output in self.engine.step() if output.finished}
        return done

    def greedy(self) -> list[list[tuple[int, float]]]:
        """Return tokens and logprobs of greedy completions of `prompts`."""
        for n, prompt in enumerate(prompts()):
            self.begin(str(n), prompt, max_tokens=12, logprobs=0)
        done = self.end()
        self.engine.reset_prefix_cache()
        return [chosen(done[str(n)]) for n in range(len(done))]

    @property
    def model(self) -> torch.nn.Module:
        """The engine's own model."""
        return self.core.model_executor.driver_worker.worker.model_runner.model


def chosen(output: Any) -> list[tuple[int, float]]:
    """Return the tokens of an answer and their logprobs."""
    (answer,) = output.outputs
    return [(token, entry[token].logprob) for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]


def prompts() -> list[list[int]]:
    """Return the prompts on which engines are compared."""
    return [[(7 * n + 3 * i) % 190 + 5 for i in range(12 + n)] for n in range(4)]


def logprobs_of(directory: Path, completions: list[list[tuple[int, float]]]) -> list[list[float]]:
    """Return the logprobs of the completions' tokens that transformers computes in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = []
    for prompt, completion in zip(prompts(), completions, strict=True):
        tokens = torch.tensor([token for token, _ in completion])
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens.tolist()]])).logits[0, len(prompt) - 1 : -1]
        found.append(torch.log_softmax(logits, -1)[torch.arange(len(tokens)), tokens].tolist())
    return found


def distance(completions: list[list[tuple[int, float]]], logprobs: list[list[float]]) -> float:
    """Return the mean absolute difference of logprobs."""
    served = [[logprob for _, logprob in completion] for completion in completions]
    return float(np.abs(np.array(served) - np.array(logprobs)).mean())


def compare(kind: Kind, root: Path) -> dict[str, Any]:
    """Compare an engine updated from A to B by a delta, an engine loaded with B, and transformers."""
    a = make_model(kind, root / "a")
    old = driver.view_of(a)
    new = driver.nudged(old, seed=1, fraction=0.2)
    b = save_view(new, a, root / "b")
    moved, fresh = InProcess(a, kind.dtype), InProcess(b, kind.dtype)
    before = moved.greedy()
    moved.apply(old, new, 1)
    after = moved.greedy()
    result = {
        "original": total(old), "expected": total(new), "moved": moved.prove(), "fresh": fresh.prove(),
        "before": before, "moved_greedy": after, "fresh_greedy": fresh.greedy(),
        "distance": distance(after, logprobs_of(b, after)), "distance_to_old": distance(after, logprobs_of(a, after)),
    }  # fmt: skip
    assert not moved.core.tidemill_undo()["refused"]
    result["undone"] = moved.prove()["total"]
    result["undone_greedy"] = moved.greedy()
    moved.load(b, 2)
    result["whole"], result["whole_greedy"] = moved.prove()["total"], moved.greedy()
    result["damage"] = _damage(fresh)
    if kind.intermediate:
        result |= _fused(moved, b)
    if kind.intermediate % 32 == 0 < kind.intermediate:
        result |= _reloaded(moved, b)
    return result


def _damage(engine: InProcess) -> dict[str, Any]:
    """Flip the lowest bit of a live element: no bf16 value in an fp32 engine, another bf16 value in a bf16 engine."""
    from tests.consumers.bit_flip import flip_bit

    (name,) = [name for name in engine.names if name.endswith("1.self_attn.o_proj.weight")]
    flip_bit(engine.core, name, 261, 0)
    return engine.prove()


def fused_view(directory: Path) -> View:
    """Return a bf16 checkpoint under the in-memory names of transformers: the experts of a layer are one tensor."""
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).state_dict()
    fused = {name: tensor.view(torch.int16).numpy().view(np.uint16) for name, tensor in state.items()}
    if "lm_head.weight" not in map_checkpoint(directory):
        del fused["lm_head.weight"]
    return fused


def _fused(engine: InProcess, b: Path) -> dict[str, Any]:
    fused = fused_view(b)
    engine.install([TensorSpec(name, bits.shape, "bfloat16") for name, bits in fused.items()])
    changed = driver.nudged(fused, seed=3)
    engine.apply(fused, changed, 3)
    return {"fused": engine.prove()["total"], "fused_expected": total(changed), "fused_names": list(fused)}


def _reloaded(engine: InProcess, b: Path) -> dict[str, Any]:
    """Reload with vLLM's own reload, which affects packed experts, then heal with a whole write."""
    engine.install(specs_of(map_checkpoint(b)))
    engine.core.collective_rpc("reload_weights", kwargs={"weights_path": str(b)})
    result = {"reloaded": engine.prove()["total"], "reloaded_greedy": engine.greedy()}
    engine.load(b, 4)
    return result | {"healed": engine.prove()["total"], "healed_greedy": engine.greedy()}


def refusal(directory: Path) -> str:
    """Return the error of a bf16 engine for a checkpoint with float32 norms."""
    from tidemill.consumers.replica.weight_map import UnsupportedModelError

    try:
        InProcess(make_model(Kind("bfloat16", norms="float32"), directory), "bfloat16")
    except UnsupportedModelError as error:
        return str(error)
    return ""


def experts_of(kind: str) -> str:
    """Return the order or error for experts of a kernel with this name; empty if they stay as they were loaded."""
    from types import SimpleNamespace

    from tidemill.consumers.replica.cpu_layers import orders_of_experts
    from tidemill.consumers.replica.weight_map import UnsupportedModelError

    model = torch.nn.ModuleDict({"mlp": torch.nn.Module()})
    model["mlp"].w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 4))
    model["mlp"].quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=type(kind, (), {})()))
    try:
        return str(orders_of_experts(model) or "")
    except UnsupportedModelError as error:
        return str(error)


def drive(root: Path) -> dict[str, Any]:
    """Return the comparison of each kind, and refusals."""
    results: dict[str, Any] = {name: compare(kind, root / name.replace(" ", "-")) for name, kind in KINDS.items()}
    results["refusal"] = refusal(root / "refusal")
    results["kernels"] = {kind: experts_of(kind) for kind in ("TritonExperts", "FlashInferExperts")}
    return results
