"""The step on an online batch: its gradient compared with a separate computation, mixed steps, and its settings."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.records import member_of
from tests.trainer.conftest import (
    fingerprint_of,
    make_group,
    make_rollout,
    make_trainable,
    make_trainable_batch,
    queue_of,
    tiny_model,
)
from tidemill.schemas.config import RunSettings
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.records import StepInput
from tidemill.trainer.batch import InvalidRolloutError, pack
from tidemill.trainer.batch_builder import BatchBuilder
from tidemill.trainer.choices import BaselineKind, CorrectionKind, Estimator, ObjectiveName
from tidemill.trainer.config import CorrectionSettings, KlSettings, OnlineSettings, OptimizerSettings, TrainerSettings
from tidemill.trainer.master import MasterWeights
from tidemill.trainer.online_queue import WeightLine
from tidemill.trainer.policy import frozen_logprobs, sampled_logprobs
from tidemill.trainer.serving_view import serving_view
from tidemill.trainer.step import Learner
from tidemill.trainer.trainable import Reference

ON = OnlineSettings(enabled=True)
HUGE_NORM = 1e9


def settings_of(**changes: object) -> TrainerSettings:
    plain = {
        "kl": KlSettings(coefficient=0.0),
        "optimizer": OptimizerSettings(learning_rate=1e-3, max_grad_norm=HUGE_NORM),
        "row_tokens": 128,
        "length_divisor": 16.0,
        "online": ON,
    }
    return TrainerSettings(**{**plain, **changes})


def gradient_of(learner: Learner, monkeypatch: pytest.MonkeyPatch, *args, **options) -> dict[str, torch.Tensor]:
    """Return the gradient that a step gives to the optimizer."""
    seen: dict[str, torch.Tensor] = {}

    def update(_self, _learning_rate: float) -> float:
        seen.update({name: p.grad.clone() for name, p in learner.model.named_parameters()})
        learner.model.zero_grad()
        return 0.0

    with monkeypatch.context() as patched:
        patched.setattr(MasterWeights, "update", update)
        learner.train(*args, **options)
    return seen


def by_hand(model, batch, values: list[float], divisor: float, bound: float) -> dict[str, torch.Tensor]:
    """Compute -1/(n L) sum_i A_i sum_t min(rho_t, bound) grad log pi, one interaction at a time."""
    total = torch.zeros(())
    for interaction, advantage in zip(batch.interactions, values, strict=True):
        row = pack([interaction], 1000, 64)[0]
        logprobs, _ = sampled_logprobs(model, row)
        weights = torch.exp(logprobs.detach() - row.sampler_logprobs).clamp(max=bound)
        total = total - advantage * (weights * logprobs).sum()
    (total / (len(values) * divisor)).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    scale = max(float(value.abs().max()) for value in second.values())
    return all(torch.allclose(first[name], second[name], rtol=1e-3, atol=1e-5 * scale) for name in second)


def test_the_gradient_is_that_of_reinforce_with_a_baseline(monkeypatch) -> None:
    batch = make_trainable_batch("b", (1.0, 0.0, 0.5))
    learner = Learner(tiny_model(), settings_of(), None)
    found = gradient_of(learner, monkeypatch, [], 1, 0, 1, online=batch)
    expected = by_hand(learner.model, batch, [0.75, -0.75, 0.0], divisor=16.0, bound=2.0)
    assert close(found, expected)
    assert not close(found, by_hand(learner.model, batch, [0.5, -0.5, 0.0], divisor=16.0, bound=2.0))


def test_a_mixed_step_is_the_weighted_sum_of_its_parts(monkeypatch):
    batch, group = make_trainable_batch("b", (1.0, 0.0, 0.5)), make_trainable("g")
    learner = Learner(tiny_model(), settings_of(online=OnlineSettings(enabled=True, simulated_weight=0.3)), None)
    users = gradient_of(learner, monkeypatch, [], 1, 0, 1, online=batch)
    simulated = gradient_of(learner, monkeypatch, [group], 1, 0, 1)
    mixed = gradient_of(learner, monkeypatch, [group], 1, 0, 1, online=batch)
    assert close(mixed, {name: users[name] + 0.3 * simulated[name] for name in users})


def test_metrics_keep_the_parts_apart() -> None:
    batch, group = make_trainable_batch("b", (1.0, 0.0, 0.5)), make_trainable("g", (1.0, 0.0))
    late = replace(batch.members[0], correction=True, reward=-9.0)
    corrected = replace(
        batch, members=(*batch.members, late), interactions=(*batch.interactions, batch.interactions[0])
    )
    outcome = Learner(tiny_model(), settings_of(), None).train([group], 1, 0, 1, online=corrected)
    metrics = outcome.metrics
    tokens = [sum(r.sampled_tokens for r in sampled) for sampled in (corrected.interactions, group.rollouts)]
    assert (metrics["online/tokens"], metrics["simulated/tokens"]) == (tokens[0], tokens[1])
    assert (outcome.tokens, outcome.rollouts) == (sum(tokens), 6)
    assert metrics["online/reward"] == pytest.approx(0.5), "a correction is no reward"
    assert (metrics["online/members"], metrics["online/corrections"]) == (4, 1)
    assert metrics["simulated/reward"] == metrics["reward"] == 0.5
    assert metrics["loss"] == pytest.approx(metrics["online/loss"] + metrics["simulated/loss"])
    assert 0 < metrics["online/ess"] <= 1
    assert metrics["online/mismatch"] > 0
    # Advantages 0.75, -0.75, 0, and -9 for the correction: nearly all of the gradient comes from one answer.
    assert metrics["online/effective_members"] == pytest.approx(10.5**2 / (2 * 0.75**2 + 81))
    assert metrics["online/entropy"] == pytest.approx(np.log(64), rel=0.01)
    alone = Learner(tiny_model(), settings_of(), None).train([], 1, 0, 1, online=batch).metrics
    assert not {name for name in alone if name.startswith(("simulated/", "reward"))}
    plain = Learner(tiny_model(), settings_of(), None).train([group], 1, 0, 1).metrics
    assert not {name for name in plain if name.startswith(("online/", "simulated/"))}


@pytest.mark.parametrize("estimator", [Estimator.K1, Estimator.K3])
def test_the_divergence_from_the_reference_covers_both_parts(monkeypatch, estimator) -> None:
    kl = KlSettings(coefficient=0.5, in_loss=estimator is Estimator.K3, estimator=estimator)
    moved, reference = tiny_model(), tiny_model()
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    learner = Learner(moved, settings_of(kl=kl), reference)
    batch = make_trainable_batch("b", (0.0, 0.0, 0.0))
    found = gradient_of(learner, monkeypatch, [], 1, 0, 1, online=batch)
    assert any(value.any() for value in found.values())
    if estimator is Estimator.K1:
        rows = [pack([interaction], 1000, 64)[0] for interaction in batch.interactions]
        k1 = [float((frozen_logprobs(moved, row) - frozen_logprobs(reference, row)).sum()) for row in rows]
        penalised = [-0.5 * value for value in k1]
        values = [1.5 * (value - float(np.mean(penalised))) for value in penalised]
        assert close(found, by_hand(moved, batch, values, divisor=16.0, bound=2.0))


def fingerprint(learner: Learner) -> str:
    return fingerprint_of(serving_view(learner.model))


def test_an_online_step_is_repeatable_bit_for_bit_and_larger_by_its_scale() -> None:
    batch, group = make_trainable_batch("b", (1.0, 0.0, 0.5)), make_trainable("g")
    prints = []
    for scale in (1.0, 1.0, 4.0):
        learner = Learner(
            tiny_model(), settings_of(online=OnlineSettings(enabled=True, learning_rate_scale=scale)), None
        )
        outcome = learner.train([group], 1, 0, 1, online=batch)
        assert outcome.learning_rate == pytest.approx(scale * 1e-3)
        prints.append(fingerprint(learner))
        assert learner.train([group], 2, 1, 2).learning_rate == pytest.approx(1e-3), "of online steps alone"
    assert prints[0] == prints[1] != prints[2]


def test_a_malformed_interaction_does_not_change_the_weights() -> None:
    batch = make_trainable_batch("b", (1.0, 0.0))
    wrong = replace(batch.interactions[0], segments=[replace(batch.interactions[0].segments[0], spans=[])])
    learner = Learner(tiny_model(), settings_of(), None)
    before = fingerprint(learner)
    with pytest.raises(InvalidRolloutError, match="interaction b-0, segment 0: version spans"):
        learner.train([], 1, 0, 1, online=replace(batch, interactions=(wrong, batch.interactions[1])))
    assert fingerprint(learner) == before


def test_settings_of_online_steps_change_the_settings_hash() -> None:
    off, on = settings_of(online=OnlineSettings()), settings_of()
    assert off.arithmetic_hash() != on.arithmetic_hash()
    shaping = [
        {"baseline": BaselineKind.NONE},
        {"baseline": BaselineKind.ARM},
        {"simulated_weight": 0.5},
        {"learning_rate_scale": 2.0},
    ]
    hashes = {settings_of(online=OnlineSettings(enabled=True, **one)).arithmetic_hash() for one in shaping}
    assert len(hashes | {on.arithmetic_hash()}) == 5
    other = OnlineSettings(enabled=True, max_wait_seconds=1, simulated_groups_per_batch=3, min_members=4)
    assert settings_of(online=other).arithmetic_hash() == on.arithmetic_hash()
    waiting = OnlineSettings(max_wait_seconds=1, baseline=BaselineKind.NONE)
    assert settings_of(online=waiting).arithmetic_hash() == off.arithmetic_hash(), "nothing is learnt from users"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minibatches": 2}, "minibatches to 1"),
        (
            {
                "correction": CorrectionSettings(kind=CorrectionKind.NONE),
                "online": OnlineSettings(enabled=True, max_policy_lag=1),
            },
            "correction.kind",
        ),
    ],
)
def test_contradictory_settings_are_refused_with_advice(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(**changes)
    with pytest.raises(ValueError, match=r"min_members to 2 or more, or online.baseline to none"):
        OnlineSettings(min_members=1)


def test_corrections_follow_the_bound_of_weighted_tokens() -> None:
    """They may be as old as any trained token if older tokens are weighted; otherwise only of the current weights."""
    fresh, line = make_trainable_batch("b", (1.0, 0.0), version=3), WeightLine("run", "main")
    for version in (1, 2, 3):
        line.made(version, version - 1, 0)
    old = make_trainable_batch("old", (-2.0,), version=1)
    members = [*fresh.members, replace(old.members[0], correction=True, offset=9)]
    read = Reference(fresh.place, replace(fresh.batch, version=3, members=members))
    found = {Position.of(m): i for m, i in zip(members, [*fresh.interactions, *old.interactions], strict=True)}
    for kind, left_out in ((CorrectionKind.TIS, []), (CorrectionKind.NONE, ["stale"])):
        left = queue_of(line, correction=CorrectionSettings(kind=kind)).settle(read, found, 3)
        assert [entry.reason for entry in left.excluded] == left_out


COMPARING = [name for name in ObjectiveName if name is not ObjectiveName.REINFORCE]


@pytest.mark.parametrize("objective", COMPARING)
def test_groups_of_one_are_refused_if_rollouts_are_compared(objective) -> None:
    none = CorrectionSettings(kind=CorrectionKind.NONE)
    settings = settings_of(objective=objective, correction=none)
    with pytest.raises(ValueError, match="the objective `reinforce`"):
        BatchBuilder(RunSettings(min_completed=1), settings)
    alone = make_group("g", [member_of(make_rollout("g", 0, 1.0, size=1), 0, 0)])
    builder = BatchBuilder(RunSettings(), settings)
    with pytest.raises(ValueError, match="the objective `reinforce`"):
        builder.wants(Reference(StepInput("g", "groups", 0, 0), alone), 0)


def test_groups_of_one_are_trained_by_reinforce() -> None:
    builder = BatchBuilder(
        RunSettings(min_completed=1, skip_no_signal=False), settings_of(objective=ObjectiveName.REINFORCE)
    )
    alone = make_group("g", [member_of(make_rollout("g", 0, 1.0, size=1), 0, 0)])
    assert builder.wants(Reference(StepInput("g", "groups", 0, 0), alone), 0)


@pytest.mark.parametrize("left", [{"min_completed": 1}, {"skip_no_signal": False}])
def test_groups_of_one_that_would_all_be_excluded_are_refused(left) -> None:
    builder = BatchBuilder(RunSettings(**left), settings_of(objective=ObjectiveName.REINFORCE))
    alone = make_group("g", [member_of(make_rollout("g", 0, 1.0, size=1), 0, 0)])
    with pytest.raises(ValueError, match=r"run\.min_completed to 1 and run\.skip_no_signal to false"):
        builder.wants(Reference(StepInput("g", "groups", 0, 0), alone), 0)
