"""Corrections tried on recorded tokens, compared with a plain loop over the tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer.conftest import make_rollout
from tidemill.trainer.choices import CorrectionKind
from tidemill.trainer.config import CorrectionSettings
from tidemill.trainer.mismatch import TrainedTokens
from tidemill.trainer.replay.correction_trials import OWN, PUBLISHED, choose_correction, try_corrections


def tokens_of(rollouts, advantages: list[float], spread: float, seed: int) -> TrainedTokens:
    sampler = torch.cat([torch.from_numpy(r.segments[0].sampled_logprobs()[r.segments[0].mask() == 1].copy())
                         for r in rollouts])  # fmt: skip
    apart = torch.from_numpy(np.random.default_rng(seed).normal(0, spread, len(sampler)).astype("f4"))
    nothing = torch.full_like(apart, torch.nan)
    return TrainedTokens(rollouts, sampler + apart, sampler, nothing, nothing, torch.tensor(advantages), -1, nothing)


@pytest.fixture
def steps() -> list[TrainedTokens]:
    first = [make_rollout("a", index, 1.0) for index in range(4)]
    second = [make_rollout("b", index, 1.0) for index in range(2)]
    return [tokens_of(first, [1.0, -1.0, 0.0, 0.5], 0.5, 1), tokens_of(second, [2.0, -0.25], 0.05, 2)]


def weights_by_hand(kind: CorrectionKind, ratios: list[float], low: float, high: float) -> list[tuple[float, bool]]:
    """Return, for each token of one rollout, its weight and whether it is cut."""
    whole, n = math.prod(ratios), len(ratios)
    mean = whole ** (1 / n)
    one = {
        CorrectionKind.NONE: lambda r: (1.0, False),
        CorrectionKind.TIS: lambda r: (min(r, high), r > high),
        CorrectionKind.MIS: lambda r: (r, False) if low <= r <= high else (0.0, True),
        CorrectionKind.SEQUENCE_TIS: lambda r: (min(whole, high), whole > high),
        CorrectionKind.SEQUENCE_MIS: lambda r: (whole, False) if whole <= high else (0.0, True),
        CorrectionKind.GEOMETRIC: lambda r: (1.0, False) if low <= mean <= high else (0.0, True),
    }
    return [one[kind](ratio) for ratio in ratios]


def test_every_trial_equals_a_loop_over_tokens(steps):
    candidates = {**PUBLISHED, "wide": CorrectionSettings(kind=CorrectionKind.GEOMETRIC, low=0.9, high=1.1)}
    trials = {trial.name: trial for trial in try_corrections(steps, candidates)}
    assert set(trials) == set(candidates)
    for name, each in candidates.items():
        rows = []
        for step in steps:
            place = 0
            for record, advantage in zip(step.trajectories, step.advantages.tolist(), strict=True):
                size = int(record.segments[0].mask().sum())
                apart = (step.trainer_logprobs - step.sampler_logprobs)[place : place + size].tolist()
                place += size
                ratios = [math.exp(d) for d in apart]
                weights = weights_by_hand(each.kind, ratios, each.low, each.high)
                rows += [(advantage, r, w, cut) for r, (w, cut) in zip(ratios, weights, strict=True)]
        bias = sum(abs(a) * abs(w - r) for a, r, w, _ in rows) / sum(abs(a) for a, *_ in rows)
        variance = sum((a * w) ** 2 for a, _, w, _ in rows) / sum(a * a for a, *_ in rows)
        squares = sum(w * w for *_, w, _ in rows)
        trial = trials[name]
        assert (trial.bias, trial.variance) == (pytest.approx(bias, rel=1e-4), pytest.approx(variance, rel=1e-4))
        assert trial.ess == pytest.approx(sum(w for *_, w, _ in rows) ** 2 / (len(rows) * squares or 1.0), rel=1e-4)
        assert trial.cut == sum(cut for *_, cut in rows) / len(rows)
        # Six rollouts in two steps: three per step.
        assert trial.error == pytest.approx(math.sqrt(bias**2 + variance / 3), rel=1e-4)
    assert 0 < trials["TIS (verl, TRL)"].cut < trials["MIS (verl)"].cut < 1, "the cases that the loop is there for"


def test_equal_engines_have_ratios_of_one_and_a_large_mismatch_justifies_a_bound():
    rollouts = [make_rollout("a", index, 1.0) for index in range(8)]
    same = try_corrections([tokens_of(rollouts, [1.0, -1.0] * 4, 0.0, 1)])
    assert {(trial.bias, trial.variance, trial.ess, trial.cut) for trial in same} == {(0.0, 1.0, 1.0, 0.0)}
    apart = try_corrections([tokens_of(rollouts, [1.0, -1.0] * 4, 1.5, 1)])
    errors = {trial.name: trial.error for trial in apart}
    assert [trial.error for trial in apart] == sorted(errors.values())
    assert errors["TIS (verl, TRL)"] < errors["none"]


def test_a_run_keeps_its_correction_unless_another_one_is_clearly_better():
    rollouts = [make_rollout("a", index, 1.0) for index in range(8)]
    own = CorrectionSettings(kind=CorrectionKind.NONE)
    for apart, kept in ((1e-4, True), (1.5, False)):
        tokens = tokens_of(rollouts, [1.0, -1.0] * 4, apart, 1)
        trials = try_corrections([tokens], {**PUBLISHED, OWN: own})
        assert trials[0].name != OWN
        assert (choose_correction(trials).name == OWN) is kept


def test_steps_without_advantages_are_refused(steps):
    flat = replace(steps[0], advantages=torch.zeros(4))
    with pytest.raises(ValueError, match="all advantages of these steps are 0"):
        try_corrections([flat])
