"""Corrections, tried on the tokens of recorded steps: the effect of each on their gradients. Pure.

The policy gradient is a sum over tokens of A w grad log pi: advantage times weight times score. With the ratio rho as
weight, its expectation is that of tokens sampled by the trainer itself; a correction bounds rho, which changes the
expectation (bias) and limits the influence of a few large ratios on the step (variance). Measured over the tokens of
the steps, as shares of the gradient's size with weights of 1:

- bias: sum |A| |w - rho| / sum |A|. An upper bound, because errors of different tokens may cancel;
- variance: sum A^2 w^2 / sum A^2. The mean square of the gradient if the scores of tokens are uncorrelated;
- error: (bias^2 + variance / n)^(1/2) with the n rollouts of a step, the root mean square of the step's gradient, with
  the tokens of a rollout counted as one sample.

The ratio is per token. It leaves a bias of the order of length^2 in the mismatch, which no per-token weight can remove
(verl, "rollout correction"); weights of whole rollouts remove it, and appear as biased here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tidemill.trainer.choices import CorrectionKind
from tidemill.trainer.config import CorrectionSettings
from tidemill.trainer.corrections import bounded, correction_weights
from tidemill.trainer.mismatch import TrainedTokens

PUBLISHED: Mapping[str, CorrectionSettings] = {
    "none": CorrectionSettings(kind=CorrectionKind.NONE, low=0.0, high=1.0),
    "TIS (verl, TRL)": CorrectionSettings(kind=CorrectionKind.TIS, low=0.0, high=2.0),
    "MIS (verl)": CorrectionSettings(kind=CorrectionKind.MIS, low=0.5, high=2.0),
    "IcePop (Ring-1T)": CorrectionSettings(kind=CorrectionKind.MIS, low=0.5, high=5.0),
    "sequence TIS (verl)": CorrectionSettings(kind=CorrectionKind.SEQUENCE_TIS, low=0.0, high=2.0),
    "sequence MIS (verl)": CorrectionSettings(kind=CorrectionKind.SEQUENCE_MIS, low=0.0, high=2.0),
    "geometric rejection (verl)": CorrectionSettings(kind=CorrectionKind.GEOMETRIC, low=0.999, high=1.001),
}
"""Corrections with the bounds from their sources, by name."""


OWN = "this run"
"""Name of the run's own correction among the candidates."""
CLEARLY = 0.01
"""Share of an error below which a smaller one is no reason to change the correction of a run."""


@dataclass(frozen=True, slots=True)
class CorrectionTrial:
    """The effect of a correction on the gradients of some steps."""

    name: str
    kind: str
    low: float
    high: float
    bias: float
    variance: float
    ess: float
    """Effective sample size of the weights: (sum w)^2 / (n sum w^2); 0 if all are 0."""
    cut: float
    """Share of tokens whose weight is bounded, or 0."""
    error: float


def try_corrections(
    steps: Sequence[TrainedTokens], candidates: Mapping[str, CorrectionSettings] = PUBLISHED
) -> list[CorrectionTrial]:
    """Try every candidate on the tokens of `steps`; return the results, smallest error first.

    Raises ValueError if every advantage is 0: then no correction has an effect.
    """
    lengths = [sum(int(s.mask().sum()) for s in record.segments) for step in steps for record in step.trajectories]
    n = len(lengths)
    sequence = torch.repeat_interleave(torch.tensor(lengths))
    advantages = torch.cat([step.advantages for step in steps])[sequence].double()
    if not advantages.any():
        raise ValueError("all advantages of these steps are 0, so no correction changes them: name other steps")
    trainer = torch.cat([step.trainer_logprobs for step in steps])
    sampler = torch.cat([step.sampler_logprobs for step in steps])
    ratio, size = (trainer - sampler).double().exp(), advantages.abs()
    found = []
    for name, each in candidates.items():
        weights = correction_weights(each, trainer, sampler, sequence, n)
        exact = weights.double()
        bias = float((size * (exact - ratio).abs()).sum() / size.sum())
        variance = float((advantages * exact).square().sum() / advantages.square().sum())
        total = exact.square().sum()
        found.append(
            CorrectionTrial(
                name=name,
                kind=each.kind.value,
                low=each.low,
                high=each.high,
                bias=bias,
                variance=variance,
                ess=float(exact.sum().square() / (len(exact) * total)) if total else 0.0,
                cut=float(bounded(each, weights).double().mean()),
                error=(bias**2 + variance * len(steps) / n) ** 0.5,
            )
        )
    return sorted(found, key=lambda trial: trial.error)


def choose_correction(trials: Sequence[CorrectionTrial]) -> CorrectionTrial:
    """Return the trial with the smallest error; the run's own if that is not clearly smaller."""
    best = min(trials, key=lambda trial: trial.error)
    return next((t for t in trials if t.name == OWN and t.error <= (1 + CLEARLY) * best.error), best)
