"""Estimates for a step's computation and the size of its delta, each with its assumptions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidemill.kernels.bounds import DeltaBounds, DeltaCounts
from tidemill.trainer.model_size import ModelSize

SAMPLE = 1 << 18
"""Number of weights from which a delta is estimated."""
SPREAD = 0.02
"""Standard deviation of a weight: the usual initial value of models (`initializer_range`)."""
HALVINGS = 40
TERA = 1e12
Bits = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Estimate:
    """One number, and its assumptions."""

    name: str
    value: float
    rests_on: str


def step_estimates(
    size: ModelSize,
    *,
    rollouts: int,
    prompt: int,
    sampled: int,
    repeated: bool,
    frozen: int,
    pace: tuple[int, float, float] | None,
) -> list[Estimate]:
    """Return TFLOP of a step and of its rollouts; with `pace` also the duration of a step.

    Assumes no sharing: neither of prompts in the trainer's rows nor of prefixes in the replica's cache.

    Args:
        prompt: tokens of a rollout that are not sampled.
        sampled: tokens of a rollout that are sampled.
        repeated: layers are computed a second time for their gradients.
        frozen: passes without a gradient: by the reference, and by the policy before the step.
        pace: number of devices, peak TFLOP/s of one, and the share of the peak that a step reaches.
    """
    tokens = prompt + sampled
    pairs, before = tokens * (tokens + 1) / 2, prompt * (prompt + 1) / 2
    training = rollouts * (3 + repeated + frozen) * size.forward(tokens, pairs, sampled)
    sampling = rollouts * size.forward(sampled, pairs - before, sampled)
    prefilling = rollouts * size.forward(prompt, before, 0)
    passes = (
        "forward and backward"
        + ", layers computed twice" * repeated
        + f", {frozen} passes without a gradient" * (frozen > 0)
    )
    found = [
        Estimate("training_tflop", training / TERA, f"{rollouts} rollouts of {tokens:,} tokens; {passes}"),
        Estimate("sampling_tflop", sampling / TERA, f"{sampled:,} sampled tokens of each rollout"),
        Estimate("prefilling_tflop", prefilling / TERA, f"{prompt:,} other tokens; no prefix cached"),
        Estimate("inference_share", (sampling + prefilling) / (training + sampling + prefilling), "of the three above"),
    ]
    if pace is not None:
        devices, peak_tflops, share = pace
        seconds = training / (TERA * peak_tflops * share * devices)
        basis = f"your {peak_tflops:g} TFLOP/s and share {share:g}, {devices} devices"
        found.append(Estimate("step_seconds", seconds, basis))
        found.append(Estimate("trained_tokens_per_s", rollouts * tokens / seconds, basis))
    return found


def delta_estimates(size: ModelSize, learning_rate: float, beta: float, density: float | None) -> list[Estimate]:
    """Return the number of elements that one step changes, and the minimum bytes of its delta (`kernels.bounds`).

    Args:
        beta: decay of AdamW's first moment.
        density: share of the elements that change; None: estimated from the learning rate.
    """
    if density is None:
        sample = delta_at_rate(learning_rate, beta)
        basis = f"learning rate {learning_rate:g}, gradients that are noise, weights of spread {SPREAD:g}"
    else:
        sample, basis = delta_at_density(density), "your density"
    changed = size.parameters * sample.changed / sample.elements
    each = sample.exponent_class / max(sample.changed, 1)
    return [
        Estimate("changed_elements", changed, basis),
        Estimate("density", sample.changed / sample.elements, basis),
        Estimate("delta_bytes", changed * each, f"{each:.2f} bytes an element: the lower bound of a sample"),
        Estimate("anchor_bytes", 2.0 * size.parameters, "2 bytes a parameter"),
    ]


def delta_at_rate(learning_rate: float, beta: float) -> DeltaBounds:
    """Estimate the change of a sample of weights by AdamW; gradients are noise, `beta` is the first moment's decay.

    The first moment is then normal with (1 - beta) / (1 + beta) of a gradient's variance, and the second moment is 1.
    """
    return _bounds(learning_rate * math.sqrt((1 - beta) / (1 + beta)))


def delta_at_density(density: float) -> DeltaBounds:
    """Estimate the same with the learning rate at which this share of the elements changes."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        old, new = _sample(middle)
        low, high = (middle, high) if float(np.mean(new != old)) < density else (low, middle)
    return _bounds(high)


def _bounds(distance: float) -> DeltaBounds:
    counts = DeltaCounts("bfloat16")
    counts.count(*_sample(distance))
    return counts.bounds()


def _sample(distance: float) -> tuple[Bits, Bits]:
    """Return bf16 patterns of weights before and after a step with changes of standard deviation `distance`."""
    old = np.random.default_rng(0).normal(0.0, SPREAD, SAMPLE).astype(np.float32)
    return _rounded(old), _rounded((old + np.random.default_rng(1).normal(0.0, distance, SAMPLE)).astype(np.float32))


def _rounded(values: npt.NDArray[np.float32]) -> Bits:
    """Return bf16 patterns, rounded to nearest, ties to even."""
    wide = values.view(np.uint32)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
