"""Small random models of several families, and the logprobs that an engine and the trainer compute with each.

    python -m tests.trainer.families DIR [FAMILY...]

It samples from a vLLM engine of each family and prints one JSON line for each: how much the trainer's logprobs of the
sampled tokens differ from the engine's. A last line says which modules of this repository's `kernels/` were taken for
the package `kernels`. It runs in a separate process because vLLM reads its environment at import.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tidemill.schemas.records import Segment, VersionSpan

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 160
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma": {},
    "Phi": {},
    "Phi3": {"sliding_window": None},
    "Mistral": {"sliding_window": None},
    "Qwen3Moe": EXPERTS,
}
"""Changes of `SHAPE`, by the prefix of the family's class names in transformers."""
SERVED = ("Qwen3", "Gemma", "Phi3", "Qwen3Moe")
"""Families that are compared with an engine. For vLLM, Llama and Mistral are one model, Qwen2 is Qwen3 without norms of
heads, and Phi is not served on a CPU."""


def make_config(family: str, **changes: Any) -> PretrainedConfig:
    """Make the configuration of a small model."""
    config: PretrainedConfig = getattr(transformers, f"{family}Config")(
        **{**SHAPE, **FAMILIES.get(family, {}), **changes}
    )
    return config


def make_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Make a random model with weights rounded to bf16, so large that attention and predictions are not uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(family, **changes))
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for parameter in model.parameters():
            widened = parameter.ndim > 1 and (parameter is not inputs or inputs is outputs)
            parameter.copy_((parameter * (6.0 if widened else 1.0)).bfloat16())
    return model.eval()


def segment_of(prompt: list[int], answer: list[int], logprobs: list[float]) -> Segment:
    """Make a segment of one sampled turn."""
    ids, mask = np.array([*prompt, *answer], "<u4"), np.repeat(np.array([0, 1], np.uint8), [len(prompt), len(answer)])
    values = np.array([*[0.0] * len(prompt), *logprobs], "<f4")
    spans = [VersionSpan(0, len(prompt), len(ids))]
    return Segment(len(ids), ids.tobytes(), mask.tobytes(), values.tobytes(), spans)


class OneSegment:
    """The fields of a rollout that packing reads."""

    def __init__(self, segment: Segment) -> None:
        self.rollout_id, self.segments = "r", [segment]


def prompts() -> list[list[int]]:
    """Return prompts with a common prefix."""
    rng = np.random.default_rng(0)
    header = rng.integers(2, VOCAB, 9).tolist()
    return [[*header, *rng.integers(2, VOCAB, 12 + 5 * n).tolist()] for n in range(3)]


def sampled(directory: Path) -> list[OneSegment]:
    """Sample four answers to each prompt at temperature 1 from an engine in this process."""
    from vllm import EngineArgs, LLMEngine, SamplingParams

    from tidemill.consumers.replica.plugin import limit_kernel_search_to_vllm

    limit_kernel_search_to_vllm()
    # Again, because the end of an earlier engine undoes it.
    gc.freeze()
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(directory), dtype="float32", enforce_eager=True, block_size=32, disable_log_stats=True,
            max_model_len=128, kv_cache_memory_bytes=16 << 20, skip_tokenizer_init=True, seed=0,
        )
    )  # fmt: skip
    for n, prompt in enumerate(4 * prompts()):
        sampling = SamplingParams(temperature=1.0, max_tokens=16, logprobs=0, detokenize=False, ignore_eos=True)
        engine.add_request(str(n), {"prompt_token_ids": prompt}, sampling)
    found = []
    while engine.has_unfinished_requests():
        for done in (output for output in engine.step() if output.finished):
            (answer,) = done.outputs
            ids = list(answer.token_ids)
            logprobs = [entry[token].logprob for token, entry in zip(ids, answer.logprobs, strict=True)]
            found.append(OneSegment(segment_of(done.prompt_token_ids, ids, logprobs)))
    return found


def main() -> None:
    """See the module's docstring."""
    from tidemill.consumers.replica.environment import prepare_environment, quick_imports

    prepare_environment(1)
    with quick_imports():
        import vllm.v1.engine.llm_engine
        import vllm.v1.worker.cpu_worker  # noqa: F401
        from transformers.utils import is_kernels_available

        import tidemill.kernels.weights.publish  # noqa: F401
        from tidemill.trainer.batch import pack
        from tidemill.trainer.model import load_model, use_packed_attention
        from tidemill.trainer.policy import frozen_logprobs
    root = Path(sys.argv[1])
    for family in sys.argv[2:] or SERVED:
        begun = time.monotonic()
        make_model(family).to(torch.bfloat16).save_pretrained(root / family)
        answers = sampled(root / family)
        (row,) = pack(answers, 10_000, VOCAB)
        model = load_model(str(root / family)).eval()
        use_packed_attention(model)
        apart = (frozen_logprobs(model, row) - row.sampler_logprobs).abs()
        print(
            json.dumps(
                {
                    "family": family, "max": float(apart.max()), "mean": float(apart.mean()), "tokens": len(apart),
                    "spread": float(row.sampler_logprobs.std()), "shared": 1 - row.tree.length / row.tokens,
                    "seconds": round(time.monotonic() - begun, 1),
                }
            ),
            flush=True,
        )  # fmt: skip
    ours = {"weights", *(path.stem for path in (ROOT / "kernels").glob("*.py"))}
    taken = [name for name in sys.modules if name.startswith("kernels.") and name.split(".")[1] in ours]
    print(json.dumps({"family": "kernels", "available": is_kernels_available(), "taken": taken}), flush=True)


if __name__ == "__main__":
    main()
