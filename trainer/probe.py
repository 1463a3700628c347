"""Whether a model computes in a packed row what it computes for whole sequences.

That holds for models whose layers see other tokens through softmax attention over all earlier tokens and in no other
way, and whose logits are the output of their head. Any other model would train without an error, and wrongly. So a
model is refused by what its configuration says, by what its layers hand to attention, and by comparing a small row with
the model's own results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from tidemill.trainer.attention import UntrainableModelError, packed_attention
from tidemill.trainer.tree import tree_calls

PACKED_ATTENTION = "tidemill_packed"
"""Name under which transformers knows packed attention."""
TOLERANCE = 2e-3
"""Largest difference of a logprob, in nats, that is put down to rounding in float32."""
_STATED = {
    "alibi": "ALiBi, a position bias on the attention scores",
    "attn_logit_softcapping": "a soft cap on the attention scores",
    "final_logit_softcapping": "a soft cap on the logits",
}
_WAY_OUT = (
    "The trainer needs softmax attention over all earlier tokens in every layer, and logits that are the output of the "
    "head. Choose another model, or remove from the checkpoint's config.json what no context of the run reaches, such "
    "as a window (`sliding_window`, `layer_types`)."
)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make `model` take a `tree` (see `attention.packed_attention`).

    Raises UntrainableModelError, which names what is in the way, for a model that is not right in packed rows.
    """
    if model.config._attn_implementation == PACKED_ATTENTION:
        return
    training = model.training
    model.eval()
    with torch.no_grad():
        problem = _stated_problem(model.config.get_text_config()) or _seen_problem(model)
    model.train(training)
    if problem:
        raise UntrainableModelError(f"{type(model).__name__} cannot be trained: {problem}. {_WAY_OUT}")


def _stated_problem(config: PretrainedConfig) -> str:
    kinds: dict[str, list[str]] = {}
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        kinds.setdefault(kind, []).append(str(layer))
    kinds.pop("full_attention", None)
    if kinds:
        return "; ".join(f"`{kind}` in layers {', '.join(layers)}" for kind, layers in kinds.items())
    return "; ".join(f"it has {what} (`{name}`)" for name, what in _STATED.items() if getattr(config, name, None))


def _seen_problem(model: PreTrainedModel) -> str:
    """Compare a row with whole sequences: tokens 0-19, tokens 0-11 and 20-29, and tokens 30-38."""
    paths = [torch.arange(20), torch.cat([torch.arange(12), torch.arange(20, 30)]), torch.arange(30, 39)]
    parents = torch.arange(-1, 38)
    parents[20], parents[30] = 11, -1
    depths = torch.cat([torch.arange(20), torch.arange(12, 22), torch.arange(9)])
    ids = (7 * torch.arange(39) + 3) % model.config.get_text_config().vocab_size

    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model:
        return "it has no linear head over a base model"
    whole = [model(input_ids=ids[path][None], use_cache=False).logits[0] for path in paths]
    states = model.base_model(input_ids=ids[paths[0]][None], use_cache=False).last_hidden_state[0]
    if _apart(linear(states, head.weight, head.bias), whole[0]) > TOLERANCE:
        return "its logits are not the output of its head, but scaled or capped"

    layers: list[bool] = []

    def counted(*args: Any, **options: Any) -> tuple[Tensor, None]:  # noqa: ANN401 - passes on what it gets
        layers.append(options.get("tree") is not None)
        return packed_attention(*args, **options)

    AttentionInterface.register(PACKED_ATTENTION, counted)
    try:
        model.set_attn_implementation(PACKED_ATTENTION)
        row = model.base_model(
            input_ids=ids[None], position_ids=depths[None], tree=tree_calls(parents.numpy()), use_cache=False
        ).last_hidden_state[0]
    except UntrainableModelError as error:
        return str(error)
    except (TypeError, ValueError) as error:
        return f"its forward pass does not take a packed row ({error})"
    finally:
        AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    expected = model.config.get_text_config().num_hidden_layers
    if sum(layers) < expected:
        return (
            f"{expected - sum(layers)} of its {expected} layers do not use transformers' attention interface with what "
            "the forward pass is given (recurrent layers, linear attention, or attention of the model's own)"
        )
    logits = linear(row, head.weight, head.bias)
    apart = max(_apart(logits[path], expected) for path, expected in zip(paths, whole, strict=True))
    if not apart <= TOLERANCE:
        return f"logprobs in a packed row are up to {apart:.2g} nats from those of whole sequences"
    return ""


def _apart(logits: Tensor, expected: Tensor) -> float:
    return float((log_softmax(logits, -1) - log_softmax(expected, -1)).abs().max())
