"""Attention over a row whose tokens form a tree: each token attends to itself and to its ancestors.

A row's tokens form a forest: a token's parent is the token before it in each sequence that contains it. A token comes
after its parent, directly followed by all its descendants (depth-first order). Three kinds of calls cover the pairs of
a token and a token that it attends to, each pair once:

- a long run of tokens without a branch attends to itself causally;
- short runs, and whole subtrees that are as short, attend to themselves in batches, padded to a common length, under a
  mask (if only one run has its length, it is treated as a long one);
- everything below a run that branches attends to that run, without a mask.

So the arithmetic is that of the existing pairs, and the number of calls that of the long runs and branches. Each call
returns its output and the logarithm of its sum of exponentials; the outputs are averaged, weighted by these sums. Given
the output and the logarithm over all keys, each call's gradients depend only on its own keys, so nothing else is stored
for the backward pass (as in ring attention, arXiv 2310.01889).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

SHORT = 64
"""Maximum tokens of a run or subtree that is computed under a mask. Masked pairs cost as much as others; a call has a
fixed cost."""
_PADDING = 8
"""Short runs are padded to multiples of this, so that there are few batches."""


@dataclass(frozen=True, slots=True)
class ShortRuns:
    """B runs or subtrees of at most N tokens, padded to N; padding attends only to itself."""

    tokens: Tensor
    """i8[B * N]: the row's token in each slot; any token in padding."""
    slots: Tensor
    """i8[K]: the slots that are not padding."""
    mask: Tensor
    """f4[B, 1, N, N]: 0 if a slot (third axis) attends to another (fourth axis), otherwise minus infinity."""

    def to(self, device: torch.device) -> ShortRuns:
        return ShortRuns(self.tokens.to(device), self.slots.to(device), self.mask.to(device))


@dataclass(frozen=True, slots=True)
class TreeCalls:
    """The calls for a row of L tokens."""

    length: int
    """L."""
    runs: tuple[tuple[int, int], ...]
    """Start and end of each run that attends to itself in a call of its own."""
    short: tuple[ShortRuns, ...]
    trunks: tuple[tuple[int, int, int], ...]
    """Start and end of each run that branches, and the end of its descendants, which begin at the run's end."""

    def to(self, device: torch.device) -> TreeCalls:
        """Return the same calls with the tensors on `device`."""
        return replace(self, short=tuple(runs.to(device) for runs in self.short))


def tree_calls(parents: npt.NDArray[np.int64]) -> TreeCalls:
    """Return the calls for tokens with these parents.

    Args:
        parents: i8[L], -1 for a token without one; in depth-first order.
    """
    # Start and end of each run without a branch, and the end of the subtree that begins with it.
    tokens = np.arange(len(parents))
    children = np.bincount(parents[parents >= 0], minlength=len(parents))
    starts = np.flatnonzero((parents != tokens - 1) | (children[tokens - 1] > 1) | (tokens == 0))
    ends = np.append(starts[1:], len(parents))
    above = np.searchsorted(starts, parents[starts], "right") - 1
    stops = ends.copy()
    for number in range(len(starts) - 1, -1, -1):
        if above[number] >= 0:
            stops[above[number]] = max(stops[above[number]], stops[number])
    below = np.repeat(stops, ends - starts)
    runs: list[tuple[int, int]] = []
    short: dict[int, list[tuple[int, int]]] = defaultdict(list)
    trunks: list[tuple[int, int, int]] = []
    place = 0
    while place < len(starts):
        start, end, stop = int(starts[place]), int(ends[place]), int(stops[place])
        whole = stop - start <= SHORT
        last = stop if whole else end
        if last - start <= SHORT:
            short[-(-(last - start) // _PADDING) * _PADDING].append((start, last))
        else:
            runs.append((start, last))
        if last < stop:
            trunks.append((start, end, stop))
        place = int(np.searchsorted(starts, last))
    for length, members in list(short.items()):
        if len(members) == 1 and below[members[0][0]] == below[slice(*members[0])].min():
            runs += short.pop(length)
    batches = (_batch(np.array(members), length, below) for length, members in sorted(short.items()))
    return TreeCalls(len(parents), tuple(runs), tuple(batches), tuple(trunks))


def separate_calls(lengths: Sequence[int]) -> TreeCalls:
    """Return the calls for consecutive sequences that share no tokens."""
    parents = np.arange(-1, sum(lengths) - 1)
    parents[np.cumsum([0, *lengths[:-1]])] = -1
    return tree_calls(parents)


def _batch(members: npt.NDArray[np.int64], length: int, below: npt.NDArray[np.int64]) -> ShortRuns:
    tokens = members[:, :1] + np.arange(length)
    real = tokens < members[:, 1:]
    tokens = np.where(real, tokens, members[:, :1])
    attending, attended = tokens[:, :, None], tokens[:, None, :]
    allowed = (attended <= attending) & (attending < below[attended]) & real[:, :, None] & real[:, None, :]
    allowed |= np.eye(length, dtype=np.bool_)
    mask = np.where(allowed, np.float32(0), np.float32(-np.inf))
    return ShortRuns(
        torch.from_numpy(tokens.reshape(-1)), torch.from_numpy(np.flatnonzero(real)), torch.from_numpy(mask[:, None])
    )


_HARMLESS = frozenset(
    {"cache_position", "logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits"}
    | {"past_key_values", "position_ids", "return_dict", "use_cache"}
)
"""Arguments that models pass to an attention function and that do not change its result."""
_KNOWN = {
    "attention_mask": "a mask or bias of its own on the attention scores, such as ALiBi",
    "block_indices": "sparse attention",
    "dropout": "dropout of attention weights",
    "indices": "sparse attention",
    "is_causal": "attention to later tokens",
    "position_bias": "a position bias on the attention scores",
    "s_aux": "attention sinks",
    "sliding_window": "a sliding window",
    "softcap": "a soft cap on the attention scores",
}

Three = tuple[Tensor, Tensor, Tensor]


class UntrainableModelError(ValueError):
    """The computation of a model would give wrong results in a packed row."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree: TreeCalls | None = None,
    **others: Any,  # noqa: ANN401 - what other attention functions of the interface take
) -> tuple[Tensor, None]:
    """Compute attention by transformers' interface: `query` f4[1, heads, L, d] to f4[1, L, heads, d].

    Without a `tree` the tokens are one sequence. Raises UntrainableModelError for any argument in `others` that would
    change the result.
    """
    for name, given in {"attention_mask": attention_mask, **others}.items():
        if given is None or name in _HARMLESS or (name, given) in (("dropout", 0), ("is_causal", True)):
            continue
        shown = "" if isinstance(given, Tensor) else f" {given}"
        what = _KNOWN.get(name, "something unknown to packed rows")
        raise UntrainableModelError(f"layer {getattr(module, 'layer_idx', '?')} has {what} (`{name}`{shown})")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    calls = separate_calls((query.shape[2],)) if tree is None else tree
    return TreeAttention.apply(query, key, value, calls, scale).transpose(1, 2), None  # type: ignore[no-untyped-call]


class TreeAttention(torch.autograd.Function):
    """Softmax attention of f4[1, heads, L, d] over f4[1, kv_heads, L, d] along a tree, in the layout [1, L, heads, d].

    Heads share key and value heads evenly.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: TreeCalls, scale: float) -> Tensor:  # noqa: ANN401
        states, shape = (query, key, value), (1, query.shape[2], query.shape[1])
        out = query.new_empty(*shape, value.shape[-1]).transpose(1, 2)
        lse = query.new_empty(*shape, dtype=torch.promote_types(query.dtype, torch.float32)).transpose(1, 2)
        for start, end in tree.runs:
            own = slice(start, end)
            out[:, :, own], lse[:, :, own] = _attend(_cut(states, own, own), scale, causal=True)
        for short in tree.short:
            part, sums = _attend(_slots(short, states), scale, mask=short.mask)
            _place(short, part, out)
            _place(short, sums[..., None], lse[..., None])
        for start, end, stop in tree.trunks:
            below = slice(end, stop)
            part, sums = _attend(_cut(states, below, slice(start, end)), scale)
            both = torch.logaddexp(lse[:, :, below], sums)
            out[:, :, below] *= (lse[:, :, below] - both).exp()[..., None].to(out.dtype)
            out[:, :, below] += part.mul_((sums - both).exp()[..., None].to(out.dtype))
            lse[:, :, below] = both
        ctx.save_for_backward(*states, out, lse)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # noqa: ANN401
        query, key, value, out, lse = ctx.saved_tensors
        states, made, scale = (query, key, value), (grad, out, lse[..., None]), ctx.scale
        totals = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for start, end in ctx.tree.runs:
            own = slice(start, end)
            parts = _slopes(_cut(states, own, own), _cut(made, own, own), scale, causal=True)
            for total, part in zip(totals, parts, strict=True):
                total[:, :, own] = part
        for short in ctx.tree.short:
            parts = _slopes(_slots(short, states), _slots(short, made), scale, mask=short.mask)
            for total, part in zip(totals, parts, strict=True):
                _place(short, part, total)
        for start, end, stop in ctx.tree.trunks:
            below, trunk = slice(end, stop), slice(start, end)
            parts = _slopes(_cut(states, below, trunk), _cut(made, below, below), scale)
            for total, place, part in zip(totals, (below, trunk, trunk), parts, strict=True):
                total[:, :, place] += part
        return *totals, None, None


def _cut(states: Three, first: slice, others: slice) -> Three:
    return states[0][:, :, first], states[1][:, :, others], states[2][:, :, others]


def _slots(short: ShortRuns, states: Three) -> Three:
    """Arrange [1, heads, L, d] as [B, heads, N, d]."""
    batch, _, length, _ = short.mask.shape
    a, b, c = (
        x[0].transpose(0, 1).index_select(0, short.tokens).view(batch, length, x.shape[1], x.shape[3]).transpose(1, 2)
        for x in states
    )
    return a, b, c


def _place(short: ShortRuns, states: Tensor, into: Tensor) -> None:
    """Write [B, heads, N, d] to its tokens in [1, heads, L, d]."""
    rows = states.transpose(1, 2).flatten(0, 1).index_select(0, short.slots)
    into[0].transpose(0, 1).index_copy_(0, short.tokens[short.slots], rows)


def _attend(states: Three, scale: float, *, causal: bool = False, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Make one call: return output [B, heads, N, d] and logarithm of the sum of exponentials [B, heads, N]."""
    query, key, value = states
    if _has_kernel(query, value, mask):
        made: tuple[Tensor, ...]
        if query.device.type == "cpu":
            made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *states, 0.0, causal, attn_mask=None if mask is None else mask.to(query.dtype), scale=scale
            )
        else:
            made = torch.ops.aten._scaled_dot_product_flash_attention(*states, 0.0, causal, scale=scale)
        return made[0], made[1]
    scores = _scores(query, key, scale, causal, mask)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp().to(value.dtype) @ value[:, :, None]
    return out.flatten(1, 2), lse.flatten(1, 2)


def _slopes(states: Three, made: Three, scale: float, *, causal: bool = False, mask: Tensor | None = None) -> Three:
    """Return one call's gradients of query, key and value.

    `made` contains the gradient of the output, the output and the logarithm of the sum of exponentials
    ([B, heads, N, 1]), over all keys to which the queries attend, in this call and in others.
    """
    query, key, value = states
    grad, out, lse = made
    if _has_kernel(query, value, mask):
        grads: Three
        if query.device.type == "cpu":
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, *states, out, lse[..., 0], 0.0, causal,
                attn_mask=None if mask is None else mask.to(query.dtype), scale=scale,
            )  # fmt: skip
        else:
            # The kernel reads the logarithms as one block of memory. Without dropout it reads no random state.
            sums, random = lse[..., 0].contiguous(), torch.empty(0, dtype=torch.uint64, device=query.device)
            grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, *states, out, sums, None, None, query.shape[2], key.shape[2], 0.0, causal, random, random,
                scale=scale,
            )  # fmt: skip
        return grads
    grad, query, out, lse = (x.view(x.shape[0], key.shape[1], -1, *x.shape[2:]) for x in (grad, query, out, lse))
    weights = (_scores(states[0], key, scale, causal, mask) - lse).exp()
    scores = weights * (grad @ value[:, :, None].mT - (grad * out).sum(-1, keepdim=True)) * scale
    weights, scores = weights.to(grad.dtype), scores.to(grad.dtype)
    return (scores @ key[:, :, None]).flatten(1, 2), (scores.mT @ query).sum(2), (weights.mT @ grad).sum(2)


def _has_kernel(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch has a call that also returns the logarithm, for heads of equal width.

    On a CPU it always has one. On a GPU it is flash attention, for numbers of 16 bits and without a mask.
    """
    width = query.shape[-1]
    if width != value.shape[-1]:
        return False
    if query.device.type == "cpu":
        return True
    return query.device.type == "cuda" and query.element_size() == 2 and mask is None and width in range(8, 257, 8)


def _scores(query: Tensor, key: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    """Return scaled scores [B, kv_heads, heads of each, N, M], minus infinity if a token does not attend."""
    grouped = query.reshape(query.shape[0], key.shape[1], -1, *query.shape[2:])
    scores = grouped @ key[:, :, None].mT * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if causal:
        mask = scores.new_full(scores.shape[-2:], -torch.inf).triu(1)
    elif mask is not None:
        mask = mask[:, None].to(scores.dtype)
    return scores if mask is None else scores + mask
