"""The mismatch of sampler and trainer, compared with a plain loop over tokens, and the tokens that a step returns."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from tests.trainer.conftest import (
    fingerprint_of,
    make_interaction,
    make_rollout,
    make_segment,
    make_trainable,
    make_trainable_batch,
    resampled,
    settings_of,
    tiny_model,
)
from tidemill.schemas.records import Interaction, Rollout, VersionSpan
from tidemill.trainer.batch import Trajectory, pack
from tidemill.trainer.choices import ObjectiveName
from tidemill.trainer.config import CorrectionSettings
from tidemill.trainer.mismatch import TrainedTokens, alarms, measure, warning
from tidemill.trainer.policy import frozen_logprobs
from tidemill.trainer.serving_view import serving_view
from tidemill.trainer.step import Learner

VERSION = 7
POSITION_ENDS = (64, 256, 1024, 4096, 16384, 65536)


def sampled(trajectory: Trajectory) -> list[tuple[int, int]]:
    """Return the segment and the position of each sampled token, in order."""
    return [
        (number, position)
        for number, segment in enumerate(trajectory.segments)
        for position, flag in enumerate(segment.mask())
        if flag
    ]


def tokens_of(trajectories: list[Trajectory], spread: float, seed: int = 0) -> TrainedTokens:
    """Make tokens whose trainer logprobs are normally distributed around the sampler's."""
    sampler = torch.tensor([float(t.segments[s].sampled_logprobs()[p]) for t in trajectories for s, p in sampled(t)])
    apart = torch.from_numpy(np.random.default_rng(seed).normal(0, spread, len(sampler)).astype("f4"))
    older = torch.full((len(sampler),), torch.nan)
    weights, cut = apart.exp().clamp(max=2.0), apart > math.log(2)
    return TrainedTokens(trajectories, sampler + apart, sampler, weights, cut, torch.ones(len(trajectories)), -1, older)


@pytest.fixture
def trajectories() -> list[Trajectory]:
    """Two environments, two replicas, forked contexts, versions 5 to 7, ten turns, a long context, an answer."""
    long = make_segment(5, 400, version=6)
    many = make_segment(6, 24, version=7)
    mask, logprobs = np.zeros(24, np.uint8), np.zeros(24, "<f4")
    mask[1::2] = 1
    logprobs[1::2] = np.linspace(-6.0, -0.01, 12)
    many = replace(many, loss_mask=mask.tobytes(), logprobs=logprobs.tobytes(),
                   spans=[VersionSpan(7, at, at + 1) for at in range(1, 24, 2)])  # fmt: skip
    prompt = replace(many, loss_mask=bytes(24), logprobs=bytes(96), spans=[])
    return [
        make_rollout("a", 0, 1.0, version=7),
        make_rollout("a", 1, 0.0, segments=[make_segment(1, 30, 5, later=7), prompt, long]),
        make_rollout("b", 2, 0.0, environment="other", segments=[many]),
        make_interaction("q", version=6),
    ]


def slices_by_hand(tokens: TrainedTokens) -> dict[tuple[str, str, str], dict[str, float]]:
    """Compute the slices token by token, in plain Python."""
    found: dict[tuple[str, str, str], list[tuple[float, bool]]] = defaultdict(list)
    place = 0
    for trajectory in tokens.trajectories:
        turn, last = -1, None
        for number, position in sampled(trajectory):
            segment = trajectory.segments[number]
            follows = last == (number, position - 1)
            turn, last = turn if follows else turn + 1, (number, position)
            is_last = position + 1 == segment.n_tokens or not segment.mask()[position + 1]
            version = next(s.version for s in segment.spans if s.start <= position < s.end)
            chance = math.exp(float(tokens.sampler_logprobs[place]))
            bucket = sum(position >= end for end in POSITION_ENDS)
            begin = (0, *POSITION_ENDS)[bucket]
            lag = VERSION - version
            properties = {
                "all": "all",
                "environment": trajectory.environment if isinstance(trajectory, Rollout) else "",
                "replica": trajectory.replica_id,
                "lag": str(lag),
                "position": f"{begin}-" if bucket == len(POSITION_ENDS) else f"{begin}-{POSITION_ENDS[bucket] - 1}",
                "turn": str(turn) if turn < 8 else "8-",
                "place": "last" if is_last else "inner" if follows else "first",
                "probability": "below 0.1" if chance < 0.1 else "0.1 to 0.9" if chance < 0.9 else "above 0.9",
            }
            apart = float(tokens.trainer_logprobs[place]) - float(tokens.sampler_logprobs[place])
            parts = {"all": apart, "lagged" if lag else "engines": apart}
            older = float(tokens.older_logprobs[place])
            if lag and version == tokens.older_version and not math.isnan(older):
                parts["engines"] = older - float(tokens.sampler_logprobs[place])
                parts["staleness"] = float(tokens.trainer_logprobs[place]) - older
            for part, of in parts.items():
                for dimension, value in properties.items():
                    found[part, dimension, value].append((of, bool(tokens.cut[place])))
            place += 1
    return {name: numbers_by_hand(*zip(*pairs, strict=True)) for name, pairs in found.items()}


def numbers_by_hand(apart: tuple[float, ...], cut: tuple[bool, ...]) -> dict[str, float]:
    n, sizes, ratios = len(apart), sorted(map(abs, apart)), [math.exp(d) for d in apart]

    def quantile(share: float) -> float:
        below = math.floor(share * (n - 1))
        above = min(below + 1, n - 1)
        return sizes[below] + (share * (n - 1) - below) * (sizes[above] - sizes[below])

    return {
        "tokens": n,
        "k1": -sum(apart) / n,
        "k3": sum(math.exp(d) - 1 - d for d in apart) / n,
        "p50": quantile(0.5),
        "p99": quantile(0.99),
        "max": sizes[-1],
        "beyond_2": sum(r > 2 or r < 0.5 for r in ratios) / n,
        "ess": sum(ratios) ** 2 / (n * sum(r * r for r in ratios)),
        "cut": sum(cut),
    }


@pytest.mark.parametrize("scored", [0, 40])
def test_every_slice_equals_a_loop_over_tokens(trajectories, scored):
    tokens = tokens_of(trajectories, spread=0.8)
    if scored:
        # Among the first tokens, only those of version 6 count as scored at the weights that sampled them.
        older = tokens.older_logprobs.clone()
        older[:scored] = tokens.sampler_logprobs[:scored] + 0.01
        older[-5:] = tokens.sampler_logprobs[-5:] - 0.02
        tokens = replace(tokens, older_version=6, older_logprobs=older)
    slices, _ = measure(tokens, VERSION)
    by_hand = slices_by_hand(tokens)
    assert {(s.part, s.dimension, s.value) for s in slices} == set(by_hand) and len(slices) == len(by_hand)
    for each in slices:
        numbers = {name: value for name, value in asdict(each).items() if name not in ("part", "dimension", "value")}
        expected = by_hand[each.part, each.dimension, each.value]
        assert numbers == pytest.approx(expected, rel=1e-4, abs=1e-6), each
    assert any(each.part == "staleness" for each in slices) == bool(scored)
    # The test data must contain these slices.
    values = {(dimension, value) for part, dimension, value in by_hand if part == "all"}
    assert {("lag", "0"), ("lag", "1"), ("lag", "2"), ("turn", "8-"), ("position", "256-1023"), ("environment", ""),
            ("place", "first"), ("place", "last"), ("probability", "above 0.9")} <= values  # fmt: skip


def test_the_worst_tokens_name_their_positions(trajectories):
    tokens = tokens_of(trajectories, spread=0.1)
    places = [(t, s, p) for t in trajectories for s, p in sampled(t)]
    odd = {places.index((trajectories[1], 2, 300)): 5.0, places.index((trajectories[3], 0, 7)): -4.0}
    trainer = tokens.trainer_logprobs.clone()
    for place, apart in odd.items():
        trainer[place] = tokens.sampler_logprobs[place] + apart
    _, worst = measure(replace(tokens, trainer_logprobs=trainer), VERSION)
    first, second = worst[:2]
    assert len(worst) == 16
    assert (first.record_id, first.segment, first.position, first.turn) == ("a-1", 2, 300, 3)
    assert (first.version, first.lag, first.environment, first.replica_id) == (6, 1, "test", "replica-1")
    assert first.token_id == trajectories[1].segments[2].ids()[300]
    assert first.trainer_logprob - first.sampler_logprob == pytest.approx(5.0, abs=1e-5)
    # A user can have the answer erased, so none of its token ids is stored here.
    assert (second.record_id, second.token_id, second.environment) == ("q", None, "")
    sizes = [abs(token.trainer_logprob - token.sampler_logprob) for token in worst]
    assert sizes == sorted(sizes, reverse=True)


def test_a_step_without_tokens_of_its_own_weights_has_no_engines_part():
    tokens = tokens_of([make_rollout("a", 0, 1.0, version=3)], 0.1)
    slices, _ = measure(tokens, VERSION)
    assert {each.part for each in slices} == {"all", "lagged"}


def test_an_alarm_is_raised_for_a_whole_part_at_its_bound(trajectories):
    tokens = tokens_of(trajectories, spread=0.0)
    calm, _ = measure(tokens, VERSION)
    assert alarms(calm) == {}
    # The answer, which older weights sampled, is beyond a ratio of 2: too few tokens for the share of the step.
    apart, answer = torch.zeros(len(tokens.weights)), len(sampled(trajectories[3]))
    apart[-answer:] = 1.0
    slices, _ = measure(replace(tokens, trainer_logprobs=tokens.sampler_logprobs + apart), VERSION)
    share = answer / len(apart)
    assert 0.02 < share < 0.1
    assert alarms(slices) == {
        "all/k3": pytest.approx(share * (math.e - 2), rel=1e-4),
        "lagged/k3": pytest.approx(slices_by_hand(replace(tokens, trainer_logprobs=tokens.sampler_logprobs + apart))[
            "lagged", "all", "all"]["k3"], rel=1e-4),
    }  # fmt: skip
    told = warning(alarms(slices))
    assert "lagged/k3 is" in told and "(alarm from 0.01 on)" in told and "run.max_policy_lag" in told


def expected_logprobs(model: torch.nn.Module, trajectories: list[Trajectory]) -> torch.Tensor:
    """Compute the trainer's logprobs with each record in its own row."""
    return torch.cat([frozen_logprobs(model, pack([each], 4096, 64)[0]) for each in trajectories])


@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_step_returns_its_tokens_in_the_order_of_its_records(minibatches):
    groups = [make_trainable("a"), make_trainable("bb", (1.0, 0.0, 0.0)), make_trainable("c", (0.5, 0.0, 1.0, 0.25))]
    learner = Learner(tiny_model(), settings_of(minibatches=minibatches, objective=ObjectiveName.DR_GRPO), None)
    start = tiny_model()
    Learner(start, settings_of(), None)
    outcome = learner.train(groups, 1, 0, seed=1)
    trained = outcome.trained
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert list(trained.trajectories) == rollouts
    assert len(trained.trainer_logprobs) == outcome.tokens
    own = torch.tensor([float(r.segments[s].sampled_logprobs()[p]) for r in rollouts for s, p in sampled(r)])
    assert torch.equal(trained.sampler_logprobs, own)
    # The first minibatch uses the initial weights; with one minibatch, all tokens do.
    first = groups[: 1 if minibatches == 3 else 3]
    before = expected_logprobs(start, [rollout for group in first for rollout in group.rollouts])
    assert torch.allclose(trained.trainer_logprobs[: len(before)], before, atol=1e-5)
    slices, _ = measure(trained, 0)
    assert slices[0].k3 == pytest.approx(outcome.metrics["mismatch/k3"], rel=1e-4)
    assert slices[0].max == pytest.approx(outcome.metrics["mismatch/max_abs_dlogp"])


def test_tokens_are_in_order_even_if_rows_are_not():
    group, sizes = make_trainable("a", (1.0, 0.0, 0.5)), (60, 60, 20)
    rollouts = tuple(replace(r, segments=[make_segment(n, size)])
                     for n, (r, size) in enumerate(zip(group.rollouts, sizes, strict=True)))  # fmt: skip
    settings = settings_of(row_tokens=84)
    rows = pack(rollouts, settings.row_tokens, 64)
    assert [row.sequence.unique().tolist() for row in rows] == [[0, 2], [1]], "the short one fills the first row"
    outcome = Learner(tiny_model(), settings, None).train([replace(group, rollouts=rollouts)], 1, 0, seed=1)
    start = tiny_model()
    Learner(start, settings, None)
    assert torch.allclose(outcome.trained.trainer_logprobs, expected_logprobs(start, list(rollouts)), atol=1e-5)


def test_an_online_step_returns_answers_before_rollouts():
    online, group = make_trainable_batch("q", (1.0, -1.0, 0.5)), make_trainable("a")
    outcome = Learner(tiny_model(), settings_of(), None).train([group], 1, 0, 1, online)
    assert [type(each) for each in outcome.trained.trajectories] == [Interaction] * 3 + [Rollout] * 4
    start = tiny_model()
    Learner(start, settings_of(), None)
    before = expected_logprobs(start, [*online.interactions, *group.rollouts])
    assert torch.allclose(outcome.trained.trainer_logprobs, before, atol=1e-5)


def test_a_behaviour_weight_at_its_cap_counts_as_cut():
    settings = settings_of(objective=ObjectiveName.DECOUPLED_PPO, correction=CorrectionSettings(kind="none"),
                           behaviour_cap=1.1)  # fmt: skip
    trained = Learner(tiny_model(), settings, None).train([make_trainable("a")], 1, 0, 1).trained
    ratio = (trained.trainer_logprobs - trained.sampler_logprobs).exp()
    assert torch.equal(trained.cut, ratio >= 1.1) and 0 < int(trained.cut.sum()) < len(trained.cut)


def test_a_change_of_the_weights_is_not_counted_as_engine_difference():
    """Only tokens of other weights differ from the trainer's logprobs, and only in their own part."""
    now, before = tiny_model(), tiny_model()
    for model in (now, before):
        Learner(model, settings_of(), None)
    with torch.no_grad():
        for parameter in before.parameters():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    fresh, old = make_trainable("a", version=VERSION), make_trainable("b", version=VERSION - 1)
    fresh = replace(fresh, rollouts=tuple(resampled(now, rollout) for rollout in fresh.rollouts))
    old = replace(old, rollouts=tuple(resampled(before, rollout) for rollout in old.rollouts))
    trained = Learner(now, settings_of(), None).train([fresh, old], VERSION + 1, VERSION, 1).trained
    whole = {each.part: each for each in measure(trained, VERSION)[0] if each.dimension == "all"}
    assert whole["engines"].max < 1e-5 < 1e-3 < whole["lagged"].p50
    assert whole["all"].k3 == pytest.approx(whole["lagged"].k3 * whole["lagged"].tokens / whole["all"].tokens, rel=1e-3)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_tokens_of_older_weights_are_scored_at_those_and_training_is_unchanged(minibatches):
    """The trainer's own model samples at the previous version, so the whole difference is staleness."""

    def steps(**changes: object) -> tuple[list[str], list[TrainedTokens]]:
        learner = Learner(tiny_model(), settings_of(minibatches=minibatches, **changes), None)
        seen, groups = [], [make_trainable("a"), make_trainable("b")]
        fingerprints = []
        for step in range(1, 5):
            # Version 2 samples for step 4, which begins at version 3.
            if step == 3:
                groups = [
                    replace(group, rollouts=tuple(resampled(learner.model, of_version(r, 2)) for r in group.rollouts))
                    for group in groups
                ]
            seen.append(learner.train(groups, step, step - 1, seed=step).trained)
            fingerprints.append(fingerprint_of(serving_view(learner.model)))
        return fingerprints, seen

    unscored, never = steps(score_older_every=0)
    scored, sometimes = steps(score_older_every=2)
    assert scored == unscored and len(set(scored)) == 4
    assert {tokens.older_version for tokens in never} == {-1}
    # In every second step, at the previous version; the first step has no previous version.
    assert [tokens.older_version for tokens in sometimes] == [-1, 0, -1, 2]
    whole = {each.part: each for each in measure(sometimes[3], 3)[0] if each.dimension == "all"}
    assert set(whole) == {"all", "engines", "staleness", "lagged"}
    assert 0 < whole["staleness"].tokens == whole["engines"].tokens < whole["lagged"].tokens
    assert whole["engines"].max < 1e-5 < 1e-3 < whole["staleness"].max
    assert (measure(sometimes[2], 2)[0][0].k3, measure(never[2], 2)[0][0].k3) == pytest.approx((0.0, 0.0), abs=1e-9)


def of_version(rollout: Rollout, version: int) -> Rollout:
    spans = [replace(span, version=version) for span in rollout.segments[0].spans]
    return replace(rollout, segments=[replace(rollout.segments[0], spans=spans)], version_min=version,
                   version_max=version)  # fmt: skip
