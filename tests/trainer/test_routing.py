"""Routing replay: tokens go to the experts that the sampler chose, the gate still learns, invalid ids are refused."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.trainer.conftest import drawn_experts, fingerprint_of, make_segment, make_trainable, settings_of, tiny_model
from tests.trainer.families import make_model
from tidemill.schemas.expert_ids import packed_ids
from tidemill.schemas.records import Claim
from tidemill.schemas.stored_object import store_claim
from tidemill.trainer.attention import UntrainableModelError
from tidemill.trainer.batch import InvalidRoutingError, PackedRow, RoutedShape, pack, routed_tokens
from tidemill.trainer.choices import Routing
from tidemill.trainer.config import OnlineSettings
from tidemill.trainer.log_input import expert_ids_of
from tidemill.trainer.mismatch import WORST_TOKENS, measure, routed_otherwise
from tidemill.trainer.model import use_packed_attention
from tidemill.trainer.policy import frozen_logprobs, sampled_logprobs
from tidemill.trainer.routing import RoutingReplay
from tidemill.trainer.serving_view import serving_view
from tidemill.trainer.step import Learner
from tidemill.trainer.trainable import TrainableGroup

LAYERS, DENSE, EXPERTS, TOP_K = 3, 1, 8, 2
SHAPE = RoutedShape(LAYERS, (0, 2), EXPERTS, TOP_K)


def experts_model() -> PreTrainedModel:
    """Three layers, the second one dense."""
    return make_model("Qwen3Moe", num_experts=EXPERTS, num_hidden_layers=LAYERS, mlp_only_layers=[DENSE])


def ids_of(group: TrainableGroup, seed: int = 0) -> tuple[np.ndarray, ...]:
    return drawn_experts(group, range(EXPERTS), LAYERS, seed)


def routed_group(name: str, seed: int = 0) -> TrainableGroup:
    group = make_trainable(name)
    return replace(group, expert_ids=ids_of(group, seed))


@pytest.fixture
def row() -> PackedRow:
    return pack(make_trainable("a").rollouts, 1000, 64)[0]


def own_choice(model: PreTrainedModel, row: PackedRow) -> torch.Tensor:
    """Return the experts that the model's routers choose, as i4[L, layers, top_k]."""
    found = torch.zeros(row.tree.length, LAYERS, TOP_K, dtype=torch.int32)

    def keep(layer: int, _gate: object, _inputs: object, answer: tuple[torch.Tensor, ...]) -> None:
        found[:, layer] = answer[2]

    gates = [(layer, model.model.layers[layer].mlp.gate) for layer in SHAPE.routed]
    hooks = [gate.register_forward_hook(partial(keep, layer)) for layer, gate in gates]
    frozen_logprobs(model, row)
    for hook in hooks:
        hook.remove()
    return found


def computed(model: PreTrainedModel, row: PackedRow) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the logprobs of a row, and the gradients of their sum."""
    model.zero_grad()
    logprobs, _ = sampled_logprobs(model, row)
    logprobs.sum().backward()
    return logprobs.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_replaying_the_routers_own_choice_changes_no_bit(row: PackedRow) -> None:
    model = experts_model()
    use_packed_attention(model)
    before, gradients = computed(model, row)
    chosen = own_choice(model, row)
    replay = RoutingReplay(model, Routing.REPLAYED, 0.0)
    for expert_ids in (None, chosen):
        after, again = computed(model, replace(row, expert_ids=expert_ids))
        assert torch.equal(after, before) and equal(gradients, again)
        length = 0 if expert_ids is None else row.tree.length
        assert replay.seen().tolist() == [0, 0, length * len(SHAPE.routed), 0, length]
    after, _ = computed(model, replace(row, expert_ids=chosen.flip(-1)))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    assert replay.seen()[0] == 0, "in another order they are the same experts"


def test_only_replayed_experts_have_a_gradient_and_the_gate_keeps_its_own(row: PackedRow) -> None:
    model = experts_model()
    use_packed_attention(model)
    before = frozen_logprobs(model, row)
    replay = RoutingReplay(model, Routing.REPLAYED, 0.0)
    asked = torch.tensor([[5, 2], [0, 0], [1, 7]], dtype=torch.int32).expand(row.tree.length, -1, -1)
    after, gradients = computed(model, replace(row, expert_ids=asked))
    assert (after - before).abs().max() > 0.01
    for layer, experts in ((0, [2, 5]), (2, [1, 7])):
        mlp = f"model.layers.{layer}.mlp"
        moved = gradients[f"{mlp}.experts.gate_up_proj"].abs().sum((1, 2)).nonzero()[:, 0]
        assert moved.tolist() == experts
        assert gradients[f"{mlp}.gate.weight"].abs().max() > 0
    otherwise, replaced, pairs, *_ = replay.seen().tolist()
    assert 0.5 * pairs < otherwise <= pairs == row.tree.length * 2 and not replaced


def test_comparing_changes_no_bit_and_counts_other_experts(row: PackedRow) -> None:
    model = experts_model()
    use_packed_attention(model)
    before = frozen_logprobs(model, row)
    asked = own_choice(model, row)
    asked[:5, 2] = torch.tensor([[(n + 1) % EXPERTS for n in pair] for pair in asked[:5, 2].tolist()])
    replay = RoutingReplay(model, Routing.OWN, 0.0)
    assert torch.equal(frozen_logprobs(model, replace(row, expert_ids=asked)), before)
    assert replay.seen().tolist() == [5, 0, 2 * row.tree.length, 5, row.tree.length]
    asked[3:7, 0] = torch.tensor([[(n + 1) % EXPERTS for n in pair] for pair in asked[3:7, 0].tolist()])
    frozen_logprobs(model, replace(row, expert_ids=asked))
    assert replay.seen().tolist() == [9, 0, 2 * row.tree.length, 7, row.tree.length], "two tokens in both layers"


def test_the_plausibility_filter_keeps_experts_that_the_router_might_have_chosen(row: PackedRow) -> None:
    model = experts_model()
    use_packed_attention(model)
    before, own = frozen_logprobs(model, row), own_choice(model, row)
    replay = RoutingReplay(model, Routing.REPLAYED, 0.999)
    other = torch.tensor(ids_of(make_trainable("a"), 1)[0][:1].astype(np.int32)).expand(row.tree.length, -1, -1)
    filtered = frozen_logprobs(model, replace(row, expert_ids=other))
    otherwise, replaced, *_ = replay.seen().tolist()
    assert 0 < replaced == otherwise
    torch.testing.assert_close(filtered, before, rtol=0, atol=1e-5)
    kept = frozen_logprobs(model, replace(row, expert_ids=own))
    assert torch.equal(kept, before) and replay.seen()[1] == 0


def test_tokens_of_a_row_keep_their_ids_and_prefixes_with_equal_ids_are_shared() -> None:
    rollouts = [replace(each, segments=[make_segment(7, 24)]) for each in make_trainable("a").rollouts[:3]]
    tokens = routed_tokens(rollouts[0].segments[0])
    first = ids_of(replace(make_trainable("a"), rollouts=tuple(rollouts)))[0]
    third = first.copy()
    third[10:] = (third[10:] + 1) % EXPERTS
    (row,) = pack(rollouts, 1000, 64, routing=Routing.REPLAYED, expert_ids=[first, first, third])
    assert row.tree.length == tokens + tokens - 10
    assert row.position_ids[0].tolist() == [*range(tokens), *range(10, tokens)]
    laid = {tuple(row.expert_ids[:tokens].flatten().tolist()), tuple(row.expert_ids[tokens:].flatten().tolist())}
    whole, rest = tuple(first.flatten().tolist()), tuple(third[10:].flatten().tolist())
    assert laid == {whole, rest} or laid == {tuple(third.flatten().tolist()), tuple(first[10:].flatten().tolist())}
    (own,) = pack(rollouts, 1000, 64, routing=Routing.OWN, expert_ids=[first, first, third])
    assert own.tree.length == tokens and own.expert_ids.shape == (tokens, LAYERS, TOP_K)
    (off,) = pack(rollouts, 1000, 64)
    assert off.expert_ids is None and torch.equal(off.input_ids, own.input_ids)
    shuffled, again = (
        pack(rollouts, 1000, 64, routing=Routing.SHUFFLED, expert_ids=[first, first, third])[0] for _ in range(2)
    )
    assert torch.equal(shuffled.expert_ids, again.expert_ids) and not torch.equal(shuffled.expert_ids, row.expert_ids)
    assert sorted(shuffled.expert_ids.flatten(1).tolist()) == sorted(row.expert_ids.flatten(1).tolist())


def test_rows_do_not_depend_on_other_packed_rollouts() -> None:
    group = routed_group("a")
    model = experts_model()
    use_packed_attention(model)
    RoutingReplay(model, Routing.REPLAYED, 0.0)
    (row,) = pack(group.rollouts, 1000, 64, routing=Routing.REPLAYED, expert_ids=group.expert_ids)
    together = frozen_logprobs(model, row)
    for index, (rollout, ids) in enumerate(zip(group.rollouts, group.expert_ids, strict=True)):
        (alone,) = pack([rollout], 1000, 64, routing=Routing.REPLAYED, expert_ids=[ids])
        torch.testing.assert_close(frozen_logprobs(model, alone), together[row.sequence == index], rtol=0, atol=1e-5)


def trained(routing: Routing, **changes: object) -> tuple[str, dict[str, float]]:
    """Return the fingerprint of the weights after two steps on two groups, and the last step's metrics."""
    learner = Learner(experts_model(), settings_of(routing=routing, **changes), None)
    groups = [routed_group("a"), routed_group("b", 1)]
    metrics = [learner.train(groups, step, 0, seed=step).metrics for step in (1, 2)]
    return fingerprint_of(serving_view(learner.model)), metrics[-1]


def test_a_step_routes_as_the_settings_say_and_is_repeatable() -> None:
    off, own, replayed, shuffled = (trained(routing) for routing in Routing)
    assert off[0] == own[0] != replayed[0] != shuffled[0] != off[0]
    assert trained(Routing.REPLAYED) == replayed
    assert "routing/otherwise" not in off[1]
    assert own[1]["routing/otherwise"] > 0.5 and replayed[1]["routing/otherwise"] > 0.5
    assert replayed[1]["mismatch/k3"] != own[1]["mismatch/k3"]


@pytest.mark.parametrize("routing", [Routing.OWN, Routing.REPLAYED])
@pytest.mark.parametrize("row_tokens", [40, 1000])
def test_the_mismatch_of_a_step_has_slices_by_experts(routing: Routing, row_tokens: int) -> None:
    groups = [routed_group("a"), routed_group("b", 1)]
    learner = Learner(experts_model(), settings_of(routing=routing, row_tokens=row_tokens), None)
    trained = learner.train(groups, 1, 0, seed=1).trained
    _, worst = measure(trained, 0)
    ids = {r.rollout_id: ids for group in groups for r, ids in zip(group.rollouts, group.expert_ids, strict=True)}
    assert len(worst) == WORST_TOKENS
    for token in worst:
        # A rollout here has one segment; the token before the sampled one predicted it.
        sent = ids[token.record_id][token.position - 1]
        assert token.sampler_experts == " ".join(f"{a},{b}" for a, b in np.sort(sent[list(SHAPE.routed)]))
    if routing is Routing.OWN:
        fresh = experts_model()
        use_packed_attention(fresh)
        rollouts = {r.rollout_id: r for group in groups for r in group.rollouts}
        for token in worst:
            (row,) = pack([rollouts[token.record_id]], 1000, 64)
            own = own_choice(fresh, row)[token.position - 1, list(SHAPE.routed)].sort(-1).values
            assert token.trainer_experts == " ".join(f"{a},{b}" for a, b in own.tolist())
    tokens, layers = routed_otherwise(trained)
    assert 0.5 < layers < tokens <= 1.0
    off = Learner(experts_model(), settings_of(), None).train(groups, 1, 0, seed=1).trained
    assert routed_otherwise(off) == (None, None)
    assert {(token.sampler_experts, token.trainer_experts) for token in measure(off, 0)[1]} == {("", "")}


def test_activations_that_are_computed_again_are_routed_the_same() -> None:
    assert trained(Routing.REPLAYED, checkpoint_activations=True)[0] == trained(Routing.REPLAYED)[0]


def test_a_group_without_ids_is_not_trained_with_replay() -> None:
    learner = Learner(experts_model(), settings_of(routing=Routing.REPLAYED), None)
    before = fingerprint_of(serving_view(learner.model))
    with pytest.raises(InvalidRoutingError, match="4 rollouts have the expert ids of 0"):
        learner.train([make_trainable("a")], 1, 0, seed=1)
    assert fingerprint_of(serving_view(learner.model)) == before


BAD = {
    "short by a row": (lambda ids: ids[:-1], "and the segments and the model need"),
    "another number of layers": (lambda ids: ids[:, :2], "and the segments and the model need"),
    "another number of experts a token": (lambda ids: ids[..., :1], "and the segments and the model need"),
    "out of range": (lambda ids: ids + 5, "expert id 12 is not among the model's 8 experts"),
    "one expert twice": (lambda ids: ids * 0, "a token is sent to one expert twice"),
    "another type": (lambda ids: ids.astype(np.float32), "expected u1 or u2"),
    "flat": (lambda ids: ids.reshape(-1), "expected u1 or u2"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_ids_are_refused(name: str, tmp_path) -> None:
    group = make_trainable("a")
    change, why = BAD[name]
    claim = store_claim(str(tmp_path), "ids", packed_ids(change(ids_of(group)[0])))
    with pytest.raises(InvalidRoutingError, match=why):
        expert_ids_of(replace(group.rollouts[0], expert_ids=claim), SHAPE)


def test_ids_are_read_as_stored_or_refused(tmp_path) -> None:
    group = make_trainable("a")
    rollout, ids = group.rollouts[0], ids_of(group)[0]
    ids[:, DENSE] = 255  # not used
    claim = store_claim(str(tmp_path), "ids", packed_ids(ids))
    assert np.array_equal(expert_ids_of(replace(rollout, expert_ids=claim), SHAPE), ids)
    wide = store_claim(str(tmp_path), "wide", packed_ids(ids.astype("<u2")))
    found = expert_ids_of(replace(rollout, expert_ids=wide), SHAPE)
    assert found.dtype == np.uint8 and np.array_equal(found, ids)
    payload = packed_ids(ids)
    damaged = [
        b"",
        payload[:50],
        payload[:-1],
        payload + b"x",
        b"\x93NUMPY\x01\x00\x02\x00((",
        payload[:6] + b"\x07" + payload[7:],
    ]
    for number, junk in enumerate(damaged):
        with pytest.raises(InvalidRoutingError):
            expert_ids_of(replace(rollout, expert_ids=store_claim(str(tmp_path), f"junk{number}", junk)), SHAPE)
    with pytest.raises(InvalidRoutingError, match="recorded without expert ids"):
        expert_ids_of(rollout, SHAPE)
    with pytest.raises(InvalidRoutingError, match="does not exist"):
        expert_ids_of(replace(rollout, expert_ids=Claim(str(tmp_path / "none"), 1, "")), SHAPE)


def test_a_model_whose_routing_cannot_be_replayed_is_refused_at_the_start() -> None:
    asked = settings_of(routing=Routing.REPLAYED)
    with pytest.raises(UntrainableModelError, match="Qwen3ForCausalLM has no experts"):
        Learner(tiny_model(), asked, None)
    other = make_model("GraniteMoe", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(UntrainableModelError, match="none is a router that can be replayed"):
        Learner(other, asked, None)
    changed = experts_model()
    gate = changed.model.layers[2].mlp.gate
    computes = gate.forward
    gate.forward = lambda states: (*(answer * 2 for answer in computes(states)[:2]), computes(states)[2])
    with pytest.raises(UntrainableModelError, match="computes other scores than its adapter"):
        Learner(changed, asked, None)


@pytest.mark.parametrize("family", ["Qwen2Moe", "Olmoe", "Mixtral", "FlexOlmo"])
def test_other_families_are_routed_by_their_adapters(family: str) -> None:
    changes = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = make_model(family, **changes, shared_expert_intermediate_size=64, sliding_window=None)
    assert RoutingReplay(model, Routing.REPLAYED, 0.0).shape == RoutedShape(2, (0, 1), 4, 2)


def test_settings_that_do_not_fit_are_refused_and_routing_is_part_of_the_arithmetic() -> None:
    with pytest.raises(ValueError, match="answers to users are recorded without expert ids"):
        settings_of(routing=Routing.REPLAYED, online=OnlineSettings(enabled=True))
    with pytest.raises(ValueError, match="routing_plausible applies only to replayed experts"):
        settings_of(routing_plausible=0.1)
    hashes = [settings_of(routing=routing).arithmetic_hash() for routing in Routing]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3
    assert settings_of(routing=Routing.REPLAYED, routing_plausible=0.1).arithmetic_hash() not in hashes
