"""Objectives, advantages and corrections compared with independent NumPy formulas, and their required properties."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tidemill.trainer import advantages as formulas
from tidemill.trainer import corrections
from tidemill.trainer.advantages import penalise
from tidemill.trainer.choices import CORRECT_THEMSELVES, CorrectionKind, Estimator
from tidemill.trainer.config import CorrectionSettings, KlSettings, TrainerSettings
from tidemill.trainer.corrections import correction_weights
from tidemill.trainer.objectives import (
    OBJECTIVES,
    Advantage,
    ObjectiveName,
    Options,
    Tokens,
    clipped_tokens,
    loss,
    reference_divergence,
)

LENGTHS = [3, 1, 4, 2]
REWARDS = np.array([1.0, 0.0, 0.5, 0.0])
SEQUENCE = np.repeat(np.arange(4), LENGTHS)
LENGTH_DIVISOR = 16.0
CAP = 2.0


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def sample_logprobs(seed: int) -> np.ndarray:
    return -rng(seed).uniform(0.1, 3.0, len(SEQUENCE))


CURRENT, OLD, SAMPLER = sample_logprobs(1), sample_logprobs(2), sample_logprobs(3)
WEIGHTS = np.minimum(np.exp(OLD - SAMPLER), CAP)


def options_of(name: ObjectiveName, **changes: float) -> Options:
    recipe = OBJECTIVES[name]
    values = {"clip_low": recipe.clip_low, "clip_high": recipe.clip_high, "length_divisor": LENGTH_DIVISOR}
    return Options(**{**values, "behaviour_cap": CAP, **changes})


def tokens_of(advantages: np.ndarray, current: torch.Tensor | None = None, weights: np.ndarray = WEIGHTS) -> Tokens:
    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return Tokens(
        logprobs=tensor(CURRENT).requires_grad_() if current is None else current,
        old_logprobs=tensor(OLD),
        sampler_logprobs=tensor(SAMPLER),
        advantages=tensor(advantages[SEQUENCE]),
        weights=tensor(weights),
        sequence=torch.from_numpy(SEQUENCE),
        n_sequences=4,
        n_tokens=len(SEQUENCE),
        reference_logprobs=tensor(sample_logprobs(4)),
    )


def value_and_gradient(name: ObjectiveName, advantages: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray]:
    tokens = tokens_of(advantages, weights=weights)
    value = loss(OBJECTIVES[name], tokens, options_of(name))
    value.backward()
    return float(value.detach()), tokens.logprobs.grad.numpy()


# Golden values: each formula written again, token by token, in plain Python.


def centred() -> list[float]:
    mean = sum(REWARDS) / 4
    return [r - mean for r in REWARDS]


def standardised() -> list[float]:
    mean = sum(REWARDS) / 4
    deviation = math.sqrt(sum((r - mean) ** 2 for r in REWARDS) / 4)
    return [(r - mean) / (deviation + 1e-6) for r in REWARDS]


def left_out() -> list[float]:
    return [REWARDS[i] - sum(REWARDS[j] for j in range(4) if j != i) / 3 for i in range(4)]


def ppo_term(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """Return min(w A, clip(w) A) and its derivative by log pi."""
    bounded = min(max(ratio, 1 - low), 1 + high)
    if ratio * advantage <= bounded * advantage:
        return ratio * advantage, ratio * advantage
    return bounded * advantage, 0.0


def golden(name: ObjectiveName) -> tuple[float, list[float]]:
    advantage = {
        ObjectiveName.COMPOSER2: centred,
        ObjectiveName.DR_GRPO: centred,
        ObjectiveName.RLOO: left_out,
        ObjectiveName.REINFORCE: lambda: list(REWARDS),
    }.get(name, standardised)()
    values, slopes = [], []
    for t, i in enumerate(SEQUENCE):
        a, c, w = advantage[i], WEIGHTS[t], math.exp(CURRENT[t] - OLD[t])
        if name in (ObjectiveName.COMPOSER2, ObjectiveName.RLOO, ObjectiveName.REINFORCE):
            value, slope = a * CURRENT[t], a
        elif name is ObjectiveName.CISPO:
            value, slope = min(w, 5.0) * a * CURRENT[t], min(w, 5.0) * a
        elif name is ObjectiveName.DECOUPLED_PPO:
            c = min(math.exp(OLD[t] - SAMPLER[t]), CAP)
            value, slope = ppo_term(w, a, 0.2, 0.2)
        else:
            value, slope = ppo_term(w, a, 0.2, 0.28 if name is ObjectiveName.DAPO else 0.2)
        scale = {
            ObjectiveName.COMPOSER2: 4 * LENGTH_DIVISOR,
            ObjectiveName.DR_GRPO: 4 * LENGTH_DIVISOR,
            ObjectiveName.GRPO: 4 * LENGTHS[i],
            ObjectiveName.RLOO: 4,
            ObjectiveName.REINFORCE: 4,
        }.get(name, sum(LENGTHS))
        values.append(c * value / scale)
        slopes.append(-c * slope / scale)
    return -sum(values), slopes


def golden_gspo() -> tuple[float, list[float]]:
    advantage = standardised()
    value, slopes = 0.0, [0.0] * len(SEQUENCE)
    for i, length in enumerate(LENGTHS):
        places = [t for t, owner in enumerate(SEQUENCE) if owner == i]
        ratio = math.exp(sum(CURRENT[t] - OLD[t] for t in places) / length)
        term, slope = ppo_term(ratio, advantage[i], 3e-4, 4e-4)
        weight = sum(WEIGHTS[t] for t in places) / length
        value -= weight * term / 4
        for t in places:
            slopes[t] = -weight * slope / length / 4
    return value, slopes


@pytest.mark.parametrize("name", list(ObjectiveName))
def test_objective_equals_its_formula(name: ObjectiveName) -> None:
    advantages = OBJECTIVES[name].advantage(REWARDS)
    weights = np.ones_like(WEIGHTS) if name in CORRECT_THEMSELVES else WEIGHTS
    value, gradient = value_and_gradient(name, advantages, weights)
    expected_value, expected_gradient = golden_gspo() if name is ObjectiveName.GSPO else golden(name)
    assert value == pytest.approx(expected_value, rel=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6, atol=1e-12)


def test_composer2_numbers_worked_out_on_paper() -> None:
    # Rewards 1 and 0: advantages 1/2 and -1/2. Two rollouts of one token, ratios 3 (bounded to 2) and 1/2, divisor 10.
    tokens = Tokens(
        logprobs=torch.tensor([-1.0, -2.0], requires_grad=True),
        old_logprobs=torch.tensor([-1.0, -2.0]),
        sampler_logprobs=torch.tensor([-1.0 - math.log(3), -2.0 + math.log(2)]),
        advantages=torch.tensor(formulas.centred(np.array([1.0, 0.0])), dtype=torch.float32),
        weights=torch.tensor([2.0, 0.5]),
        sequence=torch.tensor([0, 1]),
        n_sequences=2,
        n_tokens=2,
    )
    value = loss(
        OBJECTIVES[ObjectiveName.COMPOSER2],
        tokens,
        options_of(ObjectiveName.COMPOSER2, length_divisor=10.0),
    )
    value.backward()
    assert value.item() == pytest.approx(-(2 * 0.5 * -1 + 0.5 * -0.5 * -2) / 20)
    np.testing.assert_allclose(tokens.logprobs.grad, [-0.05, 0.0125])


@pytest.mark.parametrize("name", [n for n in ObjectiveName if n is not ObjectiveName.REINFORCE])
@given(reward=st.floats(-100, 100), size=st.integers(2, 16))
@settings(max_examples=30)
def test_equal_rewards_give_exactly_zero_gradient(name: ObjectiveName, reward: float, size: int) -> None:
    advantages = OBJECTIVES[name].advantage(np.full(size, reward))
    assert not advantages.any()
    _, gradient = value_and_gradient(name, np.resize(advantages, 4), np.ones_like(WEIGHTS))
    assert not gradient.any()


@pytest.mark.parametrize("name", [ObjectiveName.COMPOSER2, ObjectiveName.DR_GRPO, ObjectiveName.RLOO])
@given(rewards=arrays(np.float64, 4, elements=st.floats(-1, 1)), factor=st.floats(0.1, 10))
@settings(max_examples=30)
def test_without_deviation_gradients_scale_with_rewards(
    name: ObjectiveName, rewards: np.ndarray, factor: float
) -> None:
    advantage = OBJECTIVES[name].advantage
    _, gradient = value_and_gradient(name, advantage(rewards), WEIGHTS)
    _, scaled = value_and_gradient(name, advantage(rewards * factor), WEIGHTS)
    np.testing.assert_allclose(scaled, gradient * factor, rtol=1e-6, atol=1e-9)


def test_standardised_gradients_do_not_scale_with_rewards() -> None:
    advantage = formulas.standardised
    np.testing.assert_allclose(advantage(REWARDS * 7), advantage(REWARDS), rtol=1e-5)


@pytest.mark.parametrize("advantage", [formulas.centred, formulas.standardised, formulas.leave_one_out])
def test_group_of_one_is_refused_with_advice(advantage: Advantage) -> None:
    with pytest.raises(ValueError, match=r"1 completed.*reinforce"):
        advantage(np.array([1.0]))


def test_reinforce_takes_a_group_of_one() -> None:
    assert formulas.raw(np.array([0.7])) == pytest.approx([0.7])


def test_losses_of_rows_add_up_to_the_loss_of_the_batch() -> None:
    advantages = formulas.centred(REWARDS)
    whole = tokens_of(advantages)
    for name in ObjectiveName:
        parts = 0.0
        for rollout in range(4):
            here = torch.from_numpy(rollout == SEQUENCE)
            fields = ("logprobs", "old_logprobs", "sampler_logprobs", "advantages", "weights", "sequence")
            part = replace(whole, **{field: getattr(whole, field)[here] for field in fields}, reference_logprobs=None)
            parts += loss(OBJECTIVES[name], part, options_of(name)).item()
        assert parts == pytest.approx(loss(OBJECTIVES[name], whole, options_of(name)).item())


@pytest.mark.parametrize("name", ObjectiveName)
def test_clipped_tokens_are_those_without_gradient(name: ObjectiveName) -> None:
    advantages, recipe = formulas.centred(REWARDS), OBJECTIVES[name]
    _, gradient = value_and_gradient(name, advantages, np.ones_like(WEIGHTS))
    clipped = int(clipped_tokens(recipe, tokens_of(advantages), options_of(name)))
    assert clipped == int((gradient == 0).sum())
    clipping = {"grpo", "dr_grpo", "dapo", "gspo", "decoupled_ppo"}
    assert (clipped > 0) is (name in clipping)


# Corrections.

RATIOS = torch.tensor([0.4, 1.0, 3.0, 1.5, 2.0])
OWNERS = torch.tensor([0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        (CorrectionKind.NONE, 0.5, 2.0, [1, 1, 1, 1, 1]),
        (CorrectionKind.TIS, 0.5, 2.0, [0.4, 1, 2, 1.5, 2]),
        (CorrectionKind.MIS, 0.5, 2.0, [0, 1, 0, 1.5, 2]),
        (CorrectionKind.SEQUENCE_TIS, 0.5, 2.0, [1.2, 1.2, 1.2, 2, 2]),
        (CorrectionKind.SEQUENCE_MIS, 0.5, 2.0, [1.2, 1.2, 1.2, 0, 0]),
        (CorrectionKind.GEOMETRIC, 0.9, 1.1, [1, 1, 1, 0, 0]),
    ],
)
def test_correction_golden_values(kind: CorrectionKind, low: float, high: float, expected: list[float]) -> None:
    trainer = RATIOS.log().requires_grad_()
    # Slightly more than zero, so that rounding does not decide whether the last ratio is within the exact bound of 2.
    correction = CorrectionSettings(kind=kind, low=low, high=high)
    weights = correction_weights(correction, trainer, torch.full((5,), 1e-7), OWNERS, 2)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-6)


def test_geometric_mean_does_not_grow_with_length() -> None:
    mean, whole = (
        CorrectionSettings(kind=kind, low=0.9, high=1.15)
        for kind in (CorrectionKind.GEOMETRIC, CorrectionKind.SEQUENCE_MIS)
    )
    for n in (10, 100):
        ratios, owners = torch.full((n,), math.log(1.1)), torch.zeros(n, dtype=torch.long)
        zeros = torch.zeros(n)
        assert correction_weights(mean, ratios, zeros, owners, 1).all()
        assert not correction_weights(whole, ratios, zeros, owners, 1).any()


# Divergences.


def test_estimators_agree_with_the_exact_divergence() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    samples = rng().choice(3, 200_000, p=q)
    log_ratio = torch.from_numpy(np.log(p / q)[samples])
    exact = float((q * np.log(q / p)).sum())
    assert float(corrections.k1(log_ratio).mean()) == pytest.approx(exact, abs=2e-3)
    assert float(corrections.k3(log_ratio).mean()) == pytest.approx(exact, abs=2e-4)
    assert float(corrections.k2(log_ratio).mean()) == pytest.approx(exact, rel=0.1)
    assert bool((corrections.k3(log_ratio) >= 0).all())


def test_diagnostics_of_equal_policies_and_of_unequal_ones() -> None:
    zero = torch.zeros(10)
    assert corrections.effective_sample_size(zero) == 1.0
    assert corrections.share_beyond(zero, 2.0) == 0.0
    assert corrections.chi_square(zero) == 0.0
    ratio = torch.tensor([4.0, 1.0, 1.0, 0.2])
    assert corrections.share_beyond(ratio.log(), 2.0) == 0.5
    assert corrections.effective_sample_size(ratio.log()) == pytest.approx(6.2**2 / (4 * 18.04), rel=1e-6)


def train_toy_policy(place: str, steps: int = 300) -> tuple[float, float]:
    """Return a categorical policy's KL to the reference before and after training on it only; all rewards are 0."""
    generator = torch.Generator().manual_seed(0)
    reference = torch.tensor([0.0, 0.0, 0.0, 0.0]).log_softmax(0)
    logits = torch.tensor([1.0, 0.3, -0.2, -0.8], requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=0.2)
    recipe = OBJECTIVES[ObjectiveName.COMPOSER2]
    group = 64

    def divergence_now() -> float:
        log_p = logits.detach().log_softmax(0)
        return float((log_p.exp() * (log_p - reference)).sum())

    before = divergence_now()
    for _ in range(steps):
        log_p = logits.log_softmax(0)
        actions = torch.multinomial(log_p.detach().exp(), group, replacement=True, generator=generator)
        chosen = log_p[actions]
        k1 = (chosen.detach() - reference[actions]).double().numpy()
        rewards = penalise(np.zeros(group), k1, 0.5 if place == "reward" else 0.0)
        advantages = torch.from_numpy(recipe.advantage(rewards)).float()
        tokens = Tokens(
            chosen,
            chosen.detach(),
            chosen.detach(),
            advantages,
            torch.ones(group),
            torch.arange(group),
            group,
            group,
            reference[actions],
        )
        value = loss(recipe, tokens, options_of(ObjectiveName.COMPOSER2, length_divisor=1.0))
        if place == "loss":
            value = value + 0.5 * reference_divergence(tokens, corrections.Estimator.K1).mean()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return before, divergence_now()


def test_k1_in_the_reward_moves_the_policy_to_the_reference() -> None:
    before, after = train_toy_policy("reward")
    assert after < 0.02 * before


def test_k1_in_the_loss_does_not_move_the_policy_to_the_reference() -> None:
    before, after = train_toy_policy("loss")
    assert after > 0.7 * before


def test_k3_in_the_loss_has_the_gradient_of_its_formula() -> None:
    tokens = tokens_of(np.zeros(4))
    options = Options(0.2, 0.2, LENGTH_DIVISOR, CAP, kl_coefficient=0.1)
    value = loss(OBJECTIVES[ObjectiveName.GRPO], tokens, options)
    value.backward()
    scale = np.array([4 * LENGTHS[i] for i in SEQUENCE])
    ratio = np.exp(sample_logprobs(4) - CURRENT)
    assert value.item() == pytest.approx(float((0.1 * (ratio - 1 - np.log(ratio)) / scale).sum()))
    np.testing.assert_allclose(tokens.logprobs.grad, 0.1 * (1 - ratio) / scale)


# Settings.


def test_k1_in_the_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="zero expected gradient"):
        KlSettings(in_loss=True)


@pytest.mark.parametrize("estimator", [Estimator.K2, Estimator.K3])
def test_an_estimator_of_the_loss_is_refused_in_the_reward(estimator: Estimator) -> None:
    with pytest.raises(ValueError, match="applies to the loss only"):
        KlSettings(estimator=estimator)


@pytest.mark.parametrize("kind", CorrectionKind)
def test_bounds_that_mask_every_token_are_refused(kind: CorrectionKind) -> None:
    if kind in (CorrectionKind.MIS, CorrectionKind.GEOMETRIC):
        with pytest.raises(ValueError, match="would mask every token"):
            CorrectionSettings(kind=kind, low=2.0, high=1.5)
    else:
        CorrectionSettings(kind=kind, low=2.0, high=1.5)


def test_two_corrections_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match=r"set correction\.kind to none"):
        TrainerSettings(objective=ObjectiveName.DECOUPLED_PPO)
    settings = TrainerSettings(
        objective=ObjectiveName.DECOUPLED_PPO, correction=CorrectionSettings(kind=CorrectionKind.NONE)
    )
    assert settings.objective in CORRECT_THEMSELVES


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="beta"):
        TrainerSettings.model_validate({"beta": 0.1})
