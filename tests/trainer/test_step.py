"""The optimizer step: what changes the weights, what does not, and that it is repeatable bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer.conftest import fingerprint_of, make_segment, make_trainable, resampled, settings_of, tiny_model
from tidemill.schemas.records import MOST_REWARD, VersionSpan
from tidemill.trainer import policy
from tidemill.trainer.batch import pack
from tidemill.trainer.choices import CORRECT_THEMSELVES, CorrectionKind
from tidemill.trainer.config import CorrectionSettings, KlSettings, OptimizerSettings
from tidemill.trainer.master import MasterWeights
from tidemill.trainer.metrics import reward_metrics
from tidemill.trainer.objectives import ObjectiveName
from tidemill.trainer.policy import frozen_logprobs
from tidemill.trainer.serving_view import serving_view
from tidemill.trainer.step import Learner, split


def fingerprint(model: torch.nn.Module) -> str:
    return fingerprint_of(serving_view(model))


def mean_logprob(learner: Learner, rollout) -> float:
    return float(frozen_logprobs(learner.model, pack([rollout], 1000, 64)[0]).mean())


@pytest.fixture
def groups():
    return [make_trainable("a"), make_trainable("b", (1.0, 0.0, 0.0)), make_trainable("c", (0.5, 0.0, 1.0, 0.25))]


@pytest.mark.parametrize("name", list(ObjectiveName))
def test_every_objective_raises_the_better_rollout(name: ObjectiveName) -> None:
    kind = CorrectionKind.NONE if name in CORRECT_THEMSELVES else CorrectionKind.TIS
    learner = Learner(tiny_model(), settings_of(objective=name, correction=CorrectionSettings(kind=kind)), None)
    group = make_trainable("a", (1.0, 0.0))
    good, bad = group.rollouts
    before = mean_logprob(learner, good) - mean_logprob(learner, bad)
    for number in range(1, 4):
        learner.train([group], number, 0, seed=number)
    assert mean_logprob(learner, good) - mean_logprob(learner, bad) > before + 0.1


def test_equal_rewards_do_not_change_the_weights() -> None:
    learner = Learner(tiny_model(), settings_of(), None)
    before = fingerprint(learner.model)
    outcome = learner.train([make_trainable("a", (0.1, 0.1, 0.1))], 1, 0, seed=1)
    assert outcome.metrics["grad_norm"] == 0.0
    assert fingerprint(learner.model) == before


def test_a_gradient_that_is_not_finite_ends_the_step_with_a_remedy_and_changes_nothing() -> None:
    learner = Learner(tiny_model(), settings_of(), None)
    before = fingerprint(learner.model)
    with pytest.raises(RuntimeError, match=r"is not finite.*weights checkout VERSION DIRECTORY"):
        learner.train([make_trainable("a", (1e38, 0.0))], 1, 0, seed=1)
    assert fingerprint(learner.model) == before


@pytest.mark.parametrize("name", list(ObjectiveName))
def test_the_gradient_of_the_greatest_reward_is_finite_also_in_a_long_rollout(name: ObjectiveName) -> None:
    kind = CorrectionKind.NONE if name in CORRECT_THEMSELVES else CorrectionKind.TIS
    learner = Learner(tiny_model(), settings_of(objective=name, correction=CorrectionSettings(kind=kind)), None)
    # As large as that of a rollout with a million times as many tokens.
    million = 1e6 * MOST_REWARD
    assert learner.train([make_trainable("a", (million, -million))], 1, 0, seed=1).metrics["grad_norm"] > 0


def test_tool_output_gets_exactly_zero_gradient() -> None:
    """A token id that occurs only in trailing tool output gets no gradient through the untied input embedding."""
    group = make_trainable("a", (1.0, 0.0))
    lone = 63
    rollouts = []
    for rollout in group.rollouts:
        segment = rollout.segments[0]
        ids = segment.ids().copy()
        ids[ids == lone] = 0
        ids[-2:] = lone
        rollouts.append(replace(rollout, segments=[replace(segment, token_ids=ids.tobytes())]))
    model = tiny_model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    learner = Learner(model, settings_of(), None)
    seen = {}
    model.model.embed_tokens.weight.register_post_accumulate_grad_hook(lambda p: seen.update(embed=p.grad.clone()))
    learner.train([replace(group, rollouts=tuple(rollouts))], 1, 0, seed=1)
    assert not seen["embed"][lone].any()
    assert seen["embed"].any()


def test_the_head_runs_once_for_each_predicting_token_only(monkeypatch) -> None:
    group = make_trainable("a", (1.0, 0.0))
    twice = replace(group, rollouts=(group.rollouts[0], group.rollouts[0]))
    sampled = int(group.rollouts[0].segments[0].mask().sum())
    shapes = []
    scores = policy._scores
    monkeypatch.setattr(policy, "_scores", lambda hidden, *head: shapes.append(len(hidden)) or scores(hidden, *head))
    for share in (True, False):
        Learner(tiny_model(), settings_of(share_prefixes=share), None).train([twice], 1, 0, seed=1)
    assert shapes == [sampled, 2 * sampled]


def test_accumulation_over_rows_gives_the_gradient_of_one_row(groups) -> None:
    norms = []
    for row_tokens in (64, 4096):
        learner = Learner(tiny_model(), settings_of(row_tokens=row_tokens), None)
        norms.append(learner.train(groups, 1, 0, seed=1).metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_serving_view_is_the_rounded_master(groups) -> None:
    learner = Learner(tiny_model(), settings_of(), None)
    learner.train(groups, 1, 0, seed=1)
    state = learner.masters.state()
    for name, parameter in learner.model.named_parameters():
        master = state[f"master/{name}"]
        assert torch.equal(parameter, master.to(torch.bfloat16).float())
    assert any(not torch.equal(p, state[f"master/{n}"]) for n, p in learner.model.named_parameters())


def test_small_updates_add_up_in_the_masters() -> None:
    """Weights in bf16 only would lose every update below 1/256 of a weight."""
    learner = Learner(tiny_model(), settings_of(optimizer=OptimizerSettings(learning_rate=1e-6)), None)
    group, first = make_trainable("a"), fingerprint(learner.model)
    changed = []
    for number in range(1, 6):
        learner.train([group], number, 0, seed=number)
        now = serving_view(learner.model)
        changed.append(sum(int((now[k] != v).sum()) for k, v in serving_view(tiny_model()).items()))
    assert fingerprint(learner.model) != first
    assert changed == sorted(changed)
    assert changed[-1] > changed[0]


def test_metrics_count_what_was_trained() -> None:
    old = make_trainable("a", (1.0, 0.0, 0.5), version=2)
    learner = Learner(tiny_model(), settings_of(), None)
    outcome = learner.train([old, make_trainable("b", version=4)], 1, 5, seed=1)
    sampled = [sum(int(r.segments[0].mask().sum()) for r in g.rollouts) for g in (old, make_trainable("b"))]
    assert [(c.lag, c.tokens) for c in outcome.lag] == [(1, sampled[1]), (3, sampled[0])]
    assert (outcome.rollouts, outcome.tokens) == (7, sum(sampled))
    metrics = outcome.metrics
    assert metrics["lag/max"] == 3.0
    assert metrics["reward"] == pytest.approx((1.5 + 2.0) / 7)
    assert metrics["reward/correct"] == metrics["reward"]
    assert 0 < metrics["mismatch/ess"] <= 1
    assert metrics["entropy"] == pytest.approx(np.log(64), rel=0.01)
    assert metrics["mismatch/max_abs_dlogp"] > metrics["mismatch/mean_abs_dlogp"] > 0


def test_success_that_nobody_judged_is_no_metric() -> None:
    group = make_trainable("a")
    unjudged = replace(group, rollouts=tuple(replace(rollout, success=None) for rollout in group.rollouts))
    assert "success" not in reward_metrics([unjudged])
    assert reward_metrics([group, unjudged])["success"] == 0.5


def test_mismatch_is_zero_for_the_trainers_own_logprobs_and_grows_with_a_perturbation(groups) -> None:
    learner = Learner(tiny_model(), settings_of(), None)
    own = [replace(g, rollouts=tuple(resampled(learner.model, r) for r in g.rollouts)) for g in groups]
    clean = Learner(tiny_model(), settings_of(), None).train(own, 1, 0, seed=1).metrics
    assert clean["mismatch/max_abs_dlogp"] < 1e-5
    noisy = tiny_model()
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter.mul_(1 + 1e-2 * torch.randn_like(parameter))
    assert Learner(noisy, settings_of(), None).train(own, 1, 0, seed=1).metrics["mismatch/k3"] > clean["mismatch/k3"]


def test_kl_in_the_reward_moves_the_policy_back_to_the_reference() -> None:
    kl = KlSettings(coefficient=0.5)
    moved = tiny_model()
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    learner = Learner(moved, settings_of(kl=kl), tiny_model())
    group = make_trainable("a", (0.0,) * 4)
    outcome = learner.train([group], 1, 0, seed=1)
    assert "reference/k1" in outcome.metrics
    assert outcome.metrics["grad_norm"] > 0


def test_kl_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="reference model is needed"):
        Learner(tiny_model(), settings_of(kl=KlSettings(coefficient=0.1)), None)


def test_minibatches_take_consecutive_groups_and_update_the_policy_in_between(groups) -> None:
    assert [list(part) for part in split([1, 2, 3, 4, 5], 2)] in ([[1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5]])
    assert [list(part) for part in split([1], 4)] == [[1]]
    learner = Learner(
        tiny_model(), settings_of(minibatches=3, objective=ObjectiveName.DR_GRPO, clip_low=0.0, clip_high=0.0), None
    )
    outcome = learner.train(groups, 1, 0, seed=1)
    assert outcome.metrics["clip_fraction"] > 0


@pytest.mark.parametrize("kind", [CorrectionKind.NONE, CorrectionKind.SEQUENCE_TIS, CorrectionKind.GEOMETRIC])
def test_a_weight_within_its_bounds_does_not_count_as_bounded(groups, kind: CorrectionKind) -> None:
    correction = CorrectionSettings(kind=kind, low=0.0, high=1e30)
    metrics = Learner(tiny_model(), settings_of(correction=correction), None).train(groups, 1, 0, seed=1).metrics
    assert metrics["mismatch/max_abs_dlogp"] > 0 and metrics["correction/bounded"] == 0


def test_state_of_another_model_is_refused() -> None:
    learner = Learner(tiny_model(), settings_of(), None)
    state = {k: v for k, v in learner.masters.state().items() if "layers.1" not in k}
    with pytest.raises(ValueError, match="another model"):
        learner.masters.load(state)


def test_spans_of_two_versions_are_counted_token_by_token() -> None:
    group = make_trainable("a", (1.0, 0.0))
    spanning = replace(group.rollouts[0], segments=[make_segment(5, 24, version=1, later=3)])
    outcome = Learner(tiny_model(), settings_of(), None).train(
        [replace(group, rollouts=(spanning, group.rollouts[1]))], 1, 3, seed=1
    )
    assert {c.lag: c.tokens for c in outcome.lag}[2] == 6
    assert {c.lag: c.tokens for c in outcome.lag}[0] == 6
    assert spanning.segments[0].spans[1] == VersionSpan(3, 16, 22)


def test_a_learner_makes_torch_deterministic() -> None:
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(2)
    Learner(tiny_model(), settings_of(), None)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({"warmup_steps": 4}, {1: 0.25, 2: 0.5, 4: 1.0, 9: 1.0}),
        (
            {"warmup_steps": 2, "decay_steps": 10, "final_learning_rate": 0.1},
            {1: 0.5, 2: 0.91, 6: 0.55, 11: 0.1, 50: 0.1},
        ),
    ],
)
def test_the_learning_rate_rises_then_stays_or_falls_to_its_final_share(changes, rates):
    master = MasterWeights(torch.nn.Linear(2, 2), OptimizerSettings(learning_rate=1.0, **changes))
    assert {step: master.learning_rate(step) for step in rates} == pytest.approx(rates)
