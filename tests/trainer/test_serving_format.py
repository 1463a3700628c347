"""Serving weights in formats of few bits: which are quantised, that the trainer computes with them, and the loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.trainer.conftest import make_trainable, resampled, settings_of, tiny_model
from tests.trainer.families import make_model
from tidemill.kernels.quantise import BLOCK_FORMATS, dequantise, quantise
from tidemill.trainer.checkpoint import CheckpointStore
from tidemill.trainer.config import KlSettings, OptimizerSettings, TrainerSettings
from tidemill.trainer.master import quantised_weights
from tidemill.trainer.serving_view import serving_view
from tidemill.trainer.step import Learner
from tidemill.trainer.trainable import TrainableGroup
from tidemill.trainer.trained_weights import TrainedWeights

FORMS = list(BLOCK_FORMATS)


def learner_of(form: str, **changes: object) -> Learner:
    return Learner(tiny_model(), settings_of(serving_format=form, **changes), None)


def published(learner: Learner, tmp_path) -> dict[str, np.ndarray]:
    """Return the serving view as a published version contains it."""
    store = CheckpointStore(str(tmp_path), "run", "main", 1)
    return dict(TrainedWeights(TrainerSettings(), learner, store).whole())


def expected(learner: Learner, form: str) -> dict[str, np.ndarray]:
    """Compute the view of the masters from its definition, as bf16 bit patterns."""
    masters = {k.removeprefix("master/"): v for k, v in learner.masters.state().items() if k.startswith("master/")}
    chosen = quantised_weights(learner.model)
    made = {n: dequantise(quantise(m, BLOCK_FORMATS[form])) if n in chosen else m for n, m in masters.items()}
    return {name: value.bfloat16().view(torch.uint16).numpy() for name, value in made.items()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(bits, other[name]) for name, bits in one.items())


def test_linear_weights_are_quantised_and_nothing_else():
    names = quantised_weights(tiny_model())
    assert {name.split(".")[-2] for name in names} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    assert len(names) == 2 * 7
    experts = quantised_weights(make_model("Qwen3Moe"))
    assert any(name.endswith("experts.gate_up_proj") for name in experts)
    assert not any(name.endswith((".gate.weight", "lm_head.weight", "embed_tokens.weight")) for name in experts)


def test_a_model_without_linear_weights_is_refused():
    with pytest.raises(ValueError, match="no linear weights: set trainer"):
        quantised_weights(torch.nn.Embedding(4, 4))


@pytest.mark.parametrize("forward", ["matched", "masters"])
@pytest.mark.parametrize("form", FORMS)
def test_a_version_has_the_values_of_the_masters_codes_and_scales(form, forward, tmp_path):
    learner = learner_of(form, forward=forward)
    for step in (1, 2):
        learner.train([make_trainable("a"), make_trainable("b")], step, 0, seed=step)
    computed_with = serving_view(learner.model)
    version = published(learner, tmp_path)
    assert same(version, expected(learner, form))
    assert same(version, computed_with) is (forward == "matched")
    assert same(computed_with, serving_view(learner.model)), "reading a version changed the weights"


def test_updates_too_small_for_a_view_are_not_lost(tmp_path):
    """The gradient updates the masters (straight-through), which change although the view does not."""
    learner = learner_of("nvfp4", optimizer=OptimizerSettings(learning_rate=1e-5))
    before, masters = published(learner, tmp_path), {k: v.clone() for k, v in learner.masters.state().items()}
    learner.train([make_trainable("a"), make_trainable("b")], 1, 0, seed=1)
    after = published(learner, tmp_path)
    chosen = quantised_weights(learner.model)
    moved = np.mean([np.mean(before[name] != after[name]) for name in chosen])
    assert moved < 0.01
    now = learner.masters.state()
    shares = [float((now[f"master/{name}"] != masters[f"master/{name}"]).float().mean()) for name in chosen]
    assert min(shares) > 0.5


def sampled_by(learner: Learner, group: TrainableGroup, tmp_path) -> TrainableGroup:
    """Return the group as an engine with the same arithmetic samples it from the learner's published version."""
    sampler = tiny_model()
    sampler.load_state_dict(
        {n: torch.from_numpy(b).view(torch.bfloat16).float() for n, b in published(learner, tmp_path).items()},
        strict=False,
    )
    Learner(sampler, settings_of(), None)
    return replace(group, rollouts=tuple(resampled(sampler, rollout) for rollout in group.rollouts))


@pytest.mark.parametrize("form", FORMS)
def test_a_trainer_that_computes_with_other_weights_than_served_has_more_mismatch(form, tmp_path):
    apart = {}
    for forward in ("matched", "masters"):
        learner = learner_of(form, forward=forward)
        group = sampled_by(learner, make_trainable("a"), tmp_path)
        apart[forward] = learner.train([group], 1, 0, seed=1).metrics["mismatch/max_abs_dlogp"]
    assert apart["matched"] < 1e-5
    assert apart["masters"] > 100 * apart["matched"]


class NotedPublisher:
    """A publisher that stores the arguments other than the weights."""

    def publish(self, version: int, parts: object, **said: object) -> None:
        self.said = said


@pytest.mark.parametrize(
    ("form", "activations", "said"),
    [
        ("nvfp4", "none", ("nvfp4", "")),
        ("bf16", "none", ("", "")),
        ("fp8_blocks", "fp8_rows", ("fp8_blocks", "fp8_rows")),
    ],
)
def test_a_manifest_names_the_formats(form, activations, said, tmp_path):
    publisher, store = NotedPublisher(), CheckpointStore(str(tmp_path), "run", "main", 1)
    settings = settings_of(serving_format=form, serving_activations=activations)
    weights = TrainedWeights(settings, learner_of(form), store, publisher.publish)
    weights.snapshot()
    weights.publish(0)
    assert (publisher.said["serving_format"], publisher.said["serving_activations"]) == said


def test_a_checkpoint_restores_the_same_view(tmp_path):
    straight = learner_of("mxfp8")
    straight.train([make_trainable("a")], 1, 0, seed=1)
    resumed = Learner(tiny_model(seed=9), settings_of(serving_format="mxfp8"), None)
    resumed.masters.load({name: value.clone() for name, value in straight.masters.state().items()})
    assert same(published(resumed, tmp_path), published(straight, tmp_path))


@pytest.mark.parametrize(("form", "forward"), [("nvfp4", "matched"), ("nvfp4", "masters"), ("bf16", "matched")])
def test_a_policy_begins_at_its_reference_in_every_format(form, forward):
    settings = settings_of(serving_format=form, forward=forward, kl=KlSettings(coefficient=0.1))
    # The checkpoint is in fp32, and neither the policy nor the reference computes with all of its bits.
    learner = Learner(tiny_model(), settings, tiny_model())
    metrics = learner.train([make_trainable("a")], 1, 0, seed=1).metrics
    assert metrics["reference/k1"] == 0.0
    assert learner.train([make_trainable("a")], 2, 1, seed=2).metrics["reference/k1"] != 0.0


def test_older_weights_are_restored_unchanged():
    learner = learner_of("nvfp4")
    older, before = learner.masters.serving(), serving_view(learner.model)
    learner.train([make_trainable("a")], 1, 0, seed=1)
    after = serving_view(learner.model)
    with learner.masters.holding(older):
        assert same(serving_view(learner.model), before)
    assert same(serving_view(learner.model), after) and not same(before, after)


def test_bf16_has_no_quantisation_to_compare():
    with pytest.raises(ValidationError, match="set forward to matched"):
        TrainerSettings(forward="masters")
