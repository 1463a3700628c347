"""The memory of a trainer's process, from the model's size and the settings.

Counted is the fullest moment of a step: the backward pass of a row begins, gradients of the rows before it are there.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.trainer.model_size import ModelSize
from tidemill.trainer.policy import CHUNK_SCORES, keeps_scores

FP32, BF16 = 4, 2
PROCESS_BYTES = 0.75 * 2**30
"""Resident after the libraries are imported; of a process on a CPU, where that memory is the device's."""
SCORE_BUFFERS = 4
"""Arrays of a chunk's scores that are there at once: two of this chunk, two of the one before it."""


@dataclass(frozen=True, slots=True)
class TrainerCase:
    """How a trainer runs."""

    ranks: int
    row_tokens: int
    """Tokens of the longest row."""
    reference: bool
    """A reference model is held, for the KL term."""
    gpu: bool


def trainer_bytes(size: ModelSize, case: TrainerCase) -> dict[str, float]:
    """Bytes of one rank, by what they hold."""
    share = size.parameters / case.ranks
    device = {
        # Parameters are fp32 tensors that hold bf16 values, beside the masters (trainer/master.py).
        "weights": FP32 * share,
        "masters": FP32 * share,
        "moments": 2 * FP32 * share,
        "gradients": FP32 * share,
        "reference": FP32 * share * case.reference,
        "gathered": _gathered(size) if case.ranks > 1 else 0.0,
        "activations": float(FP32 * case.row_tokens * size.layers * kept_numbers(size)),
        "head": _head(size, case.row_tokens),
    }
    # The view of the version held, and the publisher's copy for the next delta: in the memory of the host.
    return device if case.gpu else {**device, "versions": trainer_host_bytes(size, case), "process": PROCESS_BYTES}


def trainer_host_bytes(size: ModelSize, case: TrainerCase) -> float:
    """Bytes in the host's memory for one rank: the serving view, and the publisher's copy of the newest version."""
    return 2 * BF16 * size.parameters / case.ranks


def kept_numbers(size: ModelSize) -> int:
    """Numbers that a layer keeps of each token for its backward pass.

    Of each of two norms its input, the normalised input and its output; queries, keys and values after the rotation and
    the attention's output; gate, activated gate, up and their product. Heads that are normalised keep their input and
    the normalised input too. Routed experts keep their copy of the token, and their output before it is weighted.
    """
    queries, keys = size.heads * size.head_width, size.kv_heads * size.head_width
    normed = 2 * (queries + keys) if size.normed_heads else 0
    routed = 2 * size.used_experts * size.hidden
    return 6 * size.hidden + 2 * queries + 2 * keys + normed + 4 * size.feed_forward + routed


def _gathered(size: ModelSize) -> float:
    """Two layers gathered, a layer's gradients with their reduction's input, and the same of the parameters outside."""
    return float(2 * FP32 * size.layer + 2 * FP32 * size.layer + 2 * FP32 * size.root)


def _head(size: ModelSize, tokens: int) -> float:
    """Scores of a chunk, probabilities that are kept, outputs of the last layer, and the gradient of the head."""
    scores = tokens * size.vocabulary
    kept = scores if keeps_scores(tokens, size.vocabulary) else 0
    chunk = min(max(CHUNK_SCORES, size.vocabulary), scores)
    return float(FP32 * (SCORE_BUFFERS * chunk + kept + 2 * tokens * size.hidden + size.head))
