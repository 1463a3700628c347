"""Baselines of single interactions: worked examples, unbiasedness, and the effect of a target rate on a policy."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.conftest import make_trainable_batch
from tidemill.trainer.advantages import BASELINES, advantages, batch_advantages, has_signal
from tidemill.trainer.choices import BaselineKind
from tidemill.trainer.objectives import Options, Tokens, loss
from tidemill.trainer.step import ONLINE

REWARDS = np.array([1.0, 0.0, 0.5, -0.5])
ARMS = ["stable", "stable", "canary", "stable"]
GOLDEN = {
    BaselineKind.NONE: [1.0, 0.0, 0.5, -0.5],
    BaselineKind.MEAN: [0.75, -0.25, 0.25, -0.75],
    BaselineKind.LEAVE_ONE_OUT: [1.0, -1 / 3, 1 / 3, -1.0],
    # stable: means of the others -0.25, 0.25, 0.5; canary has one answer, compared with all others: 0.5 / 3.
    BaselineKind.ARM: [1.25, -0.25, 1 / 3, -1.0],
}
WITH_BASELINE = [kind for kind in BaselineKind if kind is not BaselineKind.NONE]
finite = st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3))


@pytest.mark.parametrize("kind", list(BaselineKind))
def test_numbers_worked_out_on_paper(kind: BaselineKind) -> None:
    assert BASELINES[kind](REWARDS, ARMS).tolist() == pytest.approx(GOLDEN[kind])
    assert REWARDS.tolist() == [1.0, 0.0, 0.5, -0.5], "what was given is left alone"


@given(rewards=st.lists(st.tuples(finite, st.sampled_from("abc")), min_size=2, max_size=12), shift=finite)
@pytest.mark.parametrize("kind", [BaselineKind.LEAVE_ONE_OUT, BaselineKind.ARM])
def test_a_baseline_does_not_depend_on_the_interactions_own_reward(kind, rewards, shift) -> None:
    """Therefore it does not change the expected gradient. The mean of the whole batch would fail this test."""
    values, arms = np.array([r for r, _ in rewards]), [arm for _, arm in rewards]
    changed = values.copy()
    changed[0] += shift
    before, after = (v[0] - BASELINES[kind](v, arms)[0] for v in (values, changed))
    assert before == pytest.approx(after, abs=1e-8)


@pytest.mark.parametrize("kind", [BaselineKind.LEAVE_ONE_OUT, BaselineKind.ARM, BaselineKind.NONE])
def test_the_expected_gradient_equals_the_exact_policy_gradient(kind: BaselineKind) -> None:
    """Sums over all batches of three answers of a policy with two actions, weighted by their probabilities."""
    p, reward = 0.3, {0: 0.2, 1: 1.0}
    exact = p * (1 - p) * (reward[1] - reward[0])
    total = 0.0
    for actions in itertools.product((0, 1), repeat=3):
        chance = float(np.prod([p if a else 1 - p for a in actions]))
        values = BASELINES[kind](np.array([reward[a] for a in actions]), ["x", "x", "y"])
        total += chance * float(np.mean([v * (a - p) for v, a in zip(values, actions, strict=True)]))
    assert total == pytest.approx(exact)


@given(reward=st.floats(-10, 10), n=st.integers(2, 9))
@pytest.mark.parametrize("kind", WITH_BASELINE)
def test_equal_rewards_have_no_gradient(kind, reward, n) -> None:
    assert not BASELINES[kind](np.full(n, reward), (ARMS * 3)[:n]).any()


@pytest.mark.parametrize("kind", WITH_BASELINE)
def test_a_lone_reward_cannot_be_compared(kind: BaselineKind) -> None:
    with pytest.raises(ValueError, match="reinforce"):
        BASELINES[kind](np.array([1.0]), ["a"])


def test_a_correction_is_the_change_of_the_reward_and_changes_no_other_baseline() -> None:
    corrected = advantages(
        BaselineKind.LEAVE_ONE_OUT,
        np.array([1.0, -2.0, 0.0]),
        np.array([False, True, False]),
        ["a", "a", "a"],
    )
    assert corrected.tolist() == [1.0, -2.0, -1.0]


def test_the_divergence_lowers_rewards_and_not_corrections() -> None:
    batch = make_trainable_batch("a", (1.0, 1.0))
    values = batch_advantages(BaselineKind.NONE, batch, np.array([2.0, 0.0]), 0.25)
    assert values.tolist() == [0.5, 1.0]
    assert not has_signal(BaselineKind.MEAN, batch), "the signal is the users', not the divergence's"
    assert has_signal(BaselineKind.NONE, batch)


def shown_share(accepted: float, rate: float, seed: int, steps: int = 400, batch: int = 512) -> float:
    """Train a policy to show or hide a suggestion, accepted with probability `accepted`; return how often it shows it.

    The loss is that of an online step. Rewards: accepted 1 - rate, rejected -rate, not shown 0. There is no baseline.
    """
    rng = np.random.default_rng(seed)
    logits = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    options = Options(clip_low=0.2, clip_high=0.2, length_divisor=1.0, behaviour_cap=2.0)
    for _ in range(steps):
        scores = torch.log_softmax(logits, 0)
        shown = rng.random(batch) < float(scores.detach()[1].exp())
        liked = rng.random(batch) < accepted
        rewards = np.where(shown, np.where(liked, 1 - rate, -rate), 0.0)
        values = advantages(BaselineKind.NONE, rewards, np.zeros(batch, np.bool_), ["a"] * batch)
        logprobs = scores[torch.from_numpy(shown.astype(np.int64))]
        tokens = Tokens(
            logprobs=logprobs, old_logprobs=logprobs.detach(), sampler_logprobs=logprobs.detach(),
            advantages=torch.from_numpy(values).float(), weights=torch.ones(batch), sequence=torch.arange(batch),
            n_sequences=batch, n_tokens=batch,
        )  # fmt: skip
        optimizer.zero_grad()
        loss(ONLINE, tokens, options).backward()
        optimizer.step()
    return float(torch.softmax(logits.detach(), 0)[1])


@pytest.mark.parametrize("rate", [0.25, 0.6])
def test_suggestions_accepted_more_often_than_the_target_rate_are_shown(rate: float) -> None:
    """A difference of five percentage points from the rate is enough."""
    assert shown_share(rate + 0.05, rate, seed=1) > 0.9
    assert shown_share(rate - 0.05, rate, seed=2) < 0.1
