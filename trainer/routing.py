"""Routing replay: the trainer sends each token to the experts that the sampler used.

A mixture of experts amplifies rounding: if two experts have almost equal scores, sampler and trainer may choose
different ones, and the token's logprob changes by far more than rounding. With the sampler's expert ids in the row,
each router uses these experts. Their scores are the trainer's own, so that the router keeps its gradient.

Invariants: without ids in a row, no bit changes; a model is refused at the start if the class of one of its routers has
no adapter here, or if the router computes other scores than its adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tidemill.trainer.attention import UntrainableModelError
from tidemill.trainer.batch import PackedRow, RoutedShape
from tidemill.trainer.choices import Routing
from tidemill.trainer.policy import REPLAY

Scores = Callable[[Any, Tensor, Tensor], Tensor]
"""Maps a router, its logits [L, experts] and expert ids i8[L, top_k] to the scores [L, top_k] of those experts."""
Routed = tuple[Tensor, Tensor, Tensor]
"""The outputs of a router: logits, scores and expert ids."""


def _softmax_then_top_k(router: Any, logits: Tensor, ids: Tensor, normalised: bool | None = None) -> Tensor:  # noqa: ANN401 - transformers' routers have no common type
    """Apply softmax over all experts; with `normalised` (None: as the router says) the chosen ones' scores sum to 1."""
    chances = logits.softmax(-1, dtype=torch.float).gather(-1, ids)
    if router.norm_topk_prob if normalised is None else normalised:
        chances = chances / chances.sum(-1, keepdim=True)
    return chances


_NORMALISED: Scores = partial(_softmax_then_top_k, normalised=True)
ADAPTERS: Mapping[str, Scores] = {
    "Qwen3MoeTopKRouter": _softmax_then_top_k,
    "Qwen2MoeTopKRouter": _softmax_then_top_k,
    "OlmoeTopKRouter": _softmax_then_top_k,
    "FlexOlmoTopKRouter": _softmax_then_top_k,
    "MixtralTopKRouter": _NORMALISED,
}
"""Scores of the routers that can be replayed, by the name of their class in transformers."""


class RoutingReplay:
    """Routes the tokens of `model` by the expert ids of its rows; call `lay` with each row before it is computed.

    Raises UntrainableModelError for a model without experts, or with routers that have no adapter.
    """

    def __init__(self, model: PreTrainedModel, routing: Routing, plausible: float) -> None:
        self._routing, self._plausible = routing, plausible
        self._ids: Tensor | None = None
        routers = _routers(model)
        sizes = {(len(router.weight), int(router.top_k)) for _, router in routers}
        if len(sizes) != 1:
            raise UntrainableModelError(f"trainer.routing: the layers differ in (experts, top_k): {sorted(sizes)}")
        self._layers = [layer for layer, _ in routers]
        self.shape = RoutedShape(
            int(model.config.get_text_config().num_hidden_layers), tuple(self._layers), *sizes.pop()
        )
        self._seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """For each layer with experts: bool[L], the tokens for which its router chose other experts than the ids;
        i8[], the number of tokens with replaced ids; and i2[L, top_k], the router's own choice."""
        for layer, router in routers:
            _require_same_scores(router)
            router.register_forward_hook(partial(self._route, layer))
        setattr(model, REPLAY, self)

    def lay(self, row: PackedRow) -> None:
        """Route by the ids of `row`, also when its layers are computed again for their gradients."""
        self._ids = row.expert_ids
        self._seen = {}

    def seen(self) -> Tensor:
        """Return i8[5] of the last computed row: (token, layer) pairs for which the router chose other experts than the
        ids; pairs with ids replaced as implausible; all pairs; tokens with a pair of the first kind; all tokens.
        """
        if self._ids is None:
            return torch.zeros(5, dtype=torch.int64)
        elsewhere = torch.stack([self._seen[layer][0] for layer in self._layers])
        replaced = torch.stack([self._seen[layer][1] for layer in self._layers]).sum()
        found = torch.stack([elsewhere.sum(), replaced, elsewhere.any(0).sum()]).tolist()
        return torch.tensor([found[0], found[1], elsewhere.numel(), found[2], len(self._ids)])

    def experts(self, places: Tensor) -> Tensor | None:
        """Return i4[n, 2, layers, top_k] of n tokens of the last computed row: the experts in the ids, and the routers'
        own choice, ascending; for the layers with experts. None for a row without ids."""
        if self._ids is None:
            return None
        recorded = self._ids[places][:, self._layers]
        own = torch.stack([self._seen[layer][2][places] for layer in self._layers], 1)
        return torch.stack([recorded.int(), own.int()], 1).sort(-1).values.cpu()

    def _route(self, layer: int, router: nn.Module, _inputs: object, answer: Routed) -> Routed | None:
        if self._ids is None:
            return None
        logits, _, own = answer
        recorded = self._ids[:, layer].long()
        elsewhere = (own.sort(-1).values != recorded.sort(-1).values).any(-1)
        used, replaced = _plausible_ids(logits.detach(), own, recorded, self._plausible)
        self._seen[layer] = elsewhere, replaced, own.short()
        if self._routing is Routing.OWN:
            return None
        scores = ADAPTERS[type(router).__name__](router, logits, used)
        return logits, scores.to(answer[1].dtype), used


def _plausible_ids(logits: Tensor, own: Tensor, recorded: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return the ids to use, i8[L, top_k], and the number of tokens whose ids were replaced, i8[].

    An expert in `recorded` counts as implausible if its probability is below `share` of the smallest one among the
    router's own experts; it is replaced by the most probable expert that is not in `recorded`.
    """
    if not share:
        return recorded, recorded.new_zeros(())
    chances = logits.softmax(-1, dtype=torch.float)
    kept = chances.gather(-1, recorded) >= share * chances.gather(-1, own).amin(-1, keepdim=True)
    whole = kept.all(-1, keepdim=True)
    # Above every probability, so that they are chosen first.
    chances = chances.scatter(-1, recorded, torch.where(kept, 2.0, -1.0))
    return torch.where(whole, recorded, chances.topk(recorded.shape[-1], -1).indices), (~whole).sum()


def _routers(model: PreTrainedModel) -> list[tuple[int, Any]]:
    """Return the routers of a model with the numbers of their layers. Raises UntrainableModelError."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    found = []
    for number, layer in enumerate(layers):
        for block in layer.modules():
            if not hasattr(block, "experts"):
                continue
            within = [type(child).__name__ for child in block.children()]
            known = [child for child in block.children() if type(child).__name__ in ADAPTERS]
            if len(known) != 1:
                raise UntrainableModelError(
                    f"trainer.routing: layer {number} of {type(model).__name__} routes tokens by {', '.join(within)}, "
                    f"of which none is a router that can be replayed ({', '.join(ADAPTERS)}): set trainer.routing to "
                    "off, or add an adapter of its scores to ADAPTERS in trainer/routing.py"
                )
            found.append((number, known[0]))
    if not found:
        raise UntrainableModelError(
            f"trainer.routing: {type(model).__name__} has no experts in its layers, so there is no routing to replay: "
            "set trainer.routing to off"
        )
    return found


def _require_same_scores(router: Any) -> None:  # noqa: ANN401 - transformers' routers have no common type
    generator = torch.Generator().manual_seed(0)
    # With weights of its own: those of the router may not be loaded yet.
    trial = copy.deepcopy(router).to_empty(device="cpu")
    with torch.no_grad():
        trial.weight.normal_(generator=generator)
        logits, scores, ids = trial(torch.randn(16, trial.weight.shape[1], generator=generator))
        weighted = ADAPTERS[type(router).__name__](trial, logits, ids).to(scores.dtype)
    if not torch.equal(weighted, scores):
        raise UntrainableModelError(
            f"trainer.routing: {type(router).__name__} computes other scores than its adapter in "
            "trainer/routing.py: this version of transformers has changed it"
        )
