"""The size of a model, and the arithmetic of its passes: all parameters, those that a token uses, and FLOPs.

A forward pass over a token multiplies and adds once with each parameter that the token uses: 2 FLOPs a parameter
(arXiv 2001.08361, section 2.1). Attention adds, for each pair of a token and a token that it attends to, two products
of a head's width in each head and layer: 4 x layers x heads x head width FLOPs (arXiv 2204.02311, appendix B, which has
12 for forward and backward together). A backward pass costs twice the forward pass. Norms, rotations and softmax are
left out, as in both sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_USED_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")


class UnknownModelError(ValueError):
    """The size of a model cannot be determined; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters of a causal model, each counted once, and the widths on which memory and arithmetic depend."""

    parameters: int
    root: int
    """Parameters outside the layers: embedding, head and last norm."""
    head: int
    """Parameters of the head; if it is tied, those of the embedding."""
    tied: bool
    experts: int
    """Parameters of all routed experts; 0 in a dense model."""
    expert_share: float
    """Share of the routed experts that one token uses; 1 in a dense model."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    """Width of the feed-forward layer for one token: with experts, the width of an expert times the experts used."""
    used_experts: int
    """Routed experts that one token uses in a layer; 0 in a dense model."""
    normed_heads: bool
    """Queries and keys are normalised by head."""
    vocabulary: int

    @property
    def body(self) -> int:
        """Parameters with which a token is multiplied before the head. An embedding is looked up, not multiplied."""
        unused = self.experts - round(self.experts * self.expert_share)
        return self.parameters - self.head - (0 if self.tied else self.vocabulary * self.hidden) - unused

    @property
    def active(self) -> int:
        """Parameters with which a token is multiplied, including the head."""
        return self.body + self.head

    @property
    def pair(self) -> int:
        """Forward FLOPs of a token that attends to one other token, in all layers."""
        return 4 * self.layers * self.heads * self.head_width

    @property
    def layer(self) -> int:
        """Parameters of a layer, including its routed experts; the mean over the layers."""
        return (self.parameters - self.root) // self.layers

    @property
    def expert_layer(self) -> int:
        """Parameters of the routed experts of a layer; the mean over the layers."""
        return self.experts // self.layers

    @property
    def expert_count(self) -> int:
        """Routed experts of a layer; 0 in a dense model."""
        return round(self.used_experts / self.expert_share)

    def forward(self, tokens: float, pairs: float, scored: float) -> float:
        """Return the FLOPs of a forward pass over `tokens`, with `pairs` of attention; `scored` tokens use the head."""
        return 2.0 * (self.body * tokens + self.head * scored) + self.pair * pairs


def size_of(model: PreTrainedModel) -> ModelSize:
    """Return the size of a causal model, which may be on the `meta` device. Raises UnknownModelError."""
    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise UnknownModelError(f"{type(model).__name__} has no head over a vocabulary: choose a causal language model")
    if getattr(config, "kv_lora_rank", None):
        raise UnknownModelError(
            f"{type(model).__name__} keeps compressed keys and values, whose size is not known here"
        )
    named = dict(model.named_parameters())
    # The layers are the only modules of a causal model that are numbered: `model.layers.0`, `transformer.h.0`.
    in_layers = sum(p.numel() for name, p in named.items() if any(part.isdigit() for part in name.split(".")))
    parameters = sum(p.numel() for p in named.values())
    experts = sum(p.numel() for name, p in named.items() if ".experts." in name)
    count, used = (
        next((int(value) for name in names if (value := getattr(config, name, None))), 0)
        for names in (_EXPERT_COUNTS, _USED_EXPERTS)
    )
    if experts and not (count and used):
        raise UnknownModelError(
            f"{type(model).__name__} has routed experts, and its configuration does not say how many a token uses "
            f"({' or '.join(_USED_EXPERTS[:2])}, {' or '.join(_EXPERT_COUNTS)})"
        )
    if experts and used > count:
        raise UnknownModelError(f"{type(model).__name__} has {count} routed experts, and a token would use {used}")
    heads = getattr(config, "num_attention_heads", None)
    if not heads or not config.num_hidden_layers:
        raise UnknownModelError(
            f"{type(model).__name__} has no layers with attention heads (num_hidden_layers, num_attention_heads): the "
            "trainer needs softmax attention in every layer"
        )
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if experts:
        wide = used * (getattr(config, "moe_intermediate_size", None) or wide)
        wide += getattr(config, "shared_expert_intermediate_size", None) or 0
    return ModelSize(
        parameters=parameters,
        root=parameters - in_layers,
        head=head.weight.numel(),
        tied=embedding.weight is head.weight,
        experts=experts,
        expert_share=used / count if experts else 1.0,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        feed_forward=wide,
        used_experts=used if experts else 0,
        normed_heads=any(name.endswith("q_norm.weight") for name in named),
        vocabulary=config.vocab_size,
    )
