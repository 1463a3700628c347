"""Packing of rollouts from the log into rows of tokens for the model.

A row is one forward pass over a tree of tokens. If segments of a row begin with the same tokens, the row contains these
once: the prompt of a group, a header common to all prompts, turns that branches of a rollout share. A sampled token is
predicted from the token of the row that is the last of its context. A rollout is never split over rows, so that
per-rollout quantities need one row only. The same rollouts in the same order give the same rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.schemas.expert_ids import ExpertIds, unpacked_ids
from tidemill.schemas.records import MOST_LOGPROB, Interaction, Rollout, Segment
from tidemill.trainer.attention import TreeCalls, tree_calls
from tidemill.trainer.choices import Routing

Trajectory = Rollout | Interaction
"""A record of sampled tokens that a step can train on."""


class InvalidRolloutError(ValueError):
    """A rollout or an interaction whose token arrays contradict each other or themselves."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One packed row of L tokens, P of which predict T sampled tokens for training.

    Tokens after the last predicting token of a segment are left out: no result depends on them.
    """

    input_ids: Tensor
    """i8[1, L]."""
    position_ids: Tensor
    """i8[1, L]: the number of tokens before each token in its segments."""
    tree: TreeCalls
    """The tokens that each token follows, as calls of attention."""
    predicting: Tensor
    """i8[P], ascending: positions in the row of the tokens whose outputs predict sampled tokens."""
    predictors: Tensor
    """i8[T]: for each sampled token, the index in `predicting` of the token that predicts it."""
    targets: Tensor
    """i8[T]: the sampled token ids, by rollout in the given order, and in order within each rollout."""
    sampler_logprobs: Tensor
    """f4[T]."""
    sequence: Tensor
    """i8[T]: the rollout of each sampled token, by its index in the batch."""
    tokens: int
    """Tokens of the segments; shared and left-out tokens are counted each time they occur."""
    expert_ids: Tensor | None = None
    """i4[L, layers, top_k]: the experts that the sampler sent each token to; None if the routing does not use them."""

    def to(self, device: torch.device) -> PackedRow:
        """Return the row on `device`; the same object if it is already there."""
        if self.input_ids.device == device:
            return self
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return PackedRow(**{name: value.to(device) if hasattr(value, "to") else value for name, value in held.items()})


@dataclass(frozen=True, slots=True)
class _Piece:
    """A rollout's segments with sampled tokens, before they are placed in a row."""

    index: int
    segments: tuple[Segment, ...]
    inputs: tuple[bytes, ...]
    """For each segment, the tokens before its last sampled one, `width` bytes each: the token id, >u4, so that bytes
    sort as ids do, and the expert ids if tokens are routed by them."""
    width: int
    expert_ids: tuple[ExpertIds, ...]
    """Expert ids of the same tokens; empty if the routing does not use them."""


@dataclass(slots=True)
class _OpenRow:
    """A row to which rollouts can be added."""

    pieces: list[_Piece] = field(default_factory=list)
    inputs: list[bytes] = field(default_factory=list)
    """The inputs of all segments, sorted: a new segment shares most tokens with one of its two neighbours."""
    tokens: int = 0
    """Tokens that the row will have."""

    def added(self, piece: _Piece, share: bool) -> int:
        """Return the number of tokens that a rollout would add."""
        total = 0
        for place, ids in enumerate(piece.inputs):
            total += len(ids) // piece.width
            if share:
                at = bisect_left(self.inputs, ids)
                near = (*self.inputs[max(at - 1, 0) : at + 1], *piece.inputs[:place])
                total -= max((_common(ids, other, piece.width) for other in near), default=0)
        return total

    def add(self, piece: _Piece, tokens: int) -> None:
        """Add a rollout that adds `tokens` tokens."""
        self.pieces.append(piece)
        self.tokens += tokens
        for ids in piece.inputs:
            insort(self.inputs, ids)


def pack(
    rollouts: Sequence[Trajectory],
    row_tokens: int,
    vocab_size: int,
    *,
    share_prefixes: bool = True,
    routing: Routing = Routing.OFF,
    expert_ids: Sequence[ExpertIds] = (),
) -> list[PackedRow]:
    """Pack `rollouts` into rows of at most `row_tokens` tokens; a longer rollout has a row of its own.

    A rollout is added to the row with room for it in which it adds the fewest tokens; of equal rows, to the first.

    Args:
        share_prefixes: whether a row contains the common first tokens of its segments once. Tokens that are
            routed by their expert ids are equal only if their expert ids are equal too.
        routing: how tokens are routed.
        expert_ids: the expert ids of each rollout, if `routing` needs them.

    Raises:
        InvalidRolloutError: a rollout fails `check`.
    """
    for rollout in rollouts:
        check(rollout, vocab_size)
    rows: list[_OpenRow] = []
    for index, rollout in enumerate(rollouts):
        kept = tuple(segment for segment in rollout.segments if segment.mask().any())
        inputs = [segment.ids()[: routed_tokens(segment)].astype(">u4").view("u1").reshape(-1, 4) for segment in kept]
        experts: tuple[ExpertIds, ...] = ()
        if routing is not Routing.OFF:
            experts = tuple(np.split(expert_ids[index], np.cumsum([len(ids) for ids in inputs])[:-1]))
        if routing not in (Routing.OFF, Routing.OWN):
            beside = [np.ascontiguousarray(ids.reshape(len(ids), -1)).view("u1") for ids in experts]
            inputs = [np.concatenate(pair, axis=1) for pair in zip(inputs, beside, strict=True)]
        piece = _Piece(index, kept, tuple(ids.tobytes() for ids in inputs), inputs[0].shape[1], experts)
        added = [row.added(piece, share_prefixes) for row in rows]
        fitting = [place for place, row in enumerate(rows) if row.tokens + added[place] <= row_tokens]
        best = min(fitting, key=added.__getitem__, default=None)
        if best is None:
            rows.append(_OpenRow())
            rows[-1].add(piece, rows[-1].added(piece, share_prefixes))
        else:
            rows[best].add(piece, added[best])
    return [_row(row.pieces, share_prefixes, routing) for row in rows]


def check(rollout: Trajectory, vocab_size: int) -> None:
    """Raise InvalidRolloutError unless the arrays have the right lengths, token ids are in the vocabulary, and version
    spans cover exactly the sampled tokens, of which there must be at least one."""
    for place, segment in enumerate(rollout.segments):
        problem = _segment_problem(segment, vocab_size)
        if problem:
            raise InvalidRolloutError(f"{_name(rollout)}, segment {place}: {problem}")
    if not any(segment.mask().any() for segment in rollout.segments):
        raise InvalidRolloutError(f"{_name(rollout)}: no sampled token")


def token_versions(segment: Segment) -> npt.NDArray[np.int64]:
    """Return i8[n_tokens]: the weight version of each sampled token, -1 for other tokens."""
    versions = np.full(segment.n_tokens, -1, np.int64)
    for span in segment.spans:
        versions[span.start : span.end] = span.version
    return versions


def sampled_versions(rollout: Trajectory) -> npt.NDArray[np.int64]:
    """Return i8[T]: the weight version of each sampled token of a rollout, in order."""
    return np.concatenate([token_versions(s)[s.mask() == 1] for s in rollout.segments])


def _name(trajectory: Trajectory) -> str:
    if isinstance(trajectory, Rollout):
        return f"rollout {trajectory.rollout_id}"
    return f"interaction {trajectory.interaction_id}"


def _segment_problem(segment: Segment, vocab_size: int) -> str:
    n = segment.n_tokens
    sizes = (len(segment.token_ids), len(segment.loss_mask), len(segment.logprobs))
    if sizes != (4 * n, n, 4 * n):
        return f"arrays of {sizes} bytes for {n} tokens, expected {(4 * n, n, 4 * n)}"
    mask = segment.mask()
    if n and segment.ids().max() >= vocab_size:
        return f"token id {segment.ids().max()} is not in the model's vocabulary of {vocab_size}"
    if n and mask.max() > 1:
        return "the loss mask has values other than 0 and 1"
    if n and mask[0]:
        return "its first token is marked as sampled, and has nothing before it to be predicted from"
    logprobs = segment.sampled_logprobs()[mask == 1]
    if not np.isfinite(logprobs).all() or (logprobs > MOST_LOGPROB).any():
        return "the logprob of a sampled token is not a finite number at most 0"
    ordered = all(0 <= span.start < span.end <= n for span in segment.spans)
    apart = all(a.end <= b.start for a, b in pairwise(segment.spans))
    if not ordered or not apart or not np.array_equal(token_versions(segment) >= 0, mask == 1):
        return "version spans do not cover exactly the sampled tokens"
    return ""


def routed_tokens(segment: Segment) -> int:
    """Return the number of tokens on which the logprobs of sampled ones depend: those before the last sampled one."""
    sampled = np.flatnonzero(segment.mask())
    return int(sampled[-1]) if sampled.size else 0


def _common(first: bytes, second: bytes, width: int) -> int:
    """Return the number of common first tokens of two segments."""
    size = min(len(first), len(second)) // width
    kind = np.dtype(np.uint32) if width == 4 else np.dtype((np.void, width))
    apart = np.flatnonzero(np.frombuffer(first, kind, size) != np.frombuffer(second, kind, size))
    return int(apart[0]) if apart.size else size


def _row(pieces: Sequence[_Piece], share: bool, routing: Routing) -> PackedRow:
    inputs = [ids for piece in pieces for ids in piece.inputs]
    segments = [segment for piece in pieces for segment in piece.segments]
    paths, parents, depths, tokens = _laid_out(inputs, pieces[0].width, share)
    sampled = [np.flatnonzero(segment.mask()) for segment in segments]
    places = np.concatenate([path[at - 1] for path, at in zip(paths, sampled, strict=True)])
    predicting, predictors = np.unique(places, return_inverse=True)
    per_sampled = zip(segments, sampled, strict=True)
    targets, logprobs = zip(*((s.ids()[at], s.sampled_logprobs()[at]) for s, at in per_sampled), strict=True)
    owners = [piece.index for piece in pieces for _ in piece.segments]
    found, expert_ids = [ids for piece in pieces for ids in piece.expert_ids], None
    if found:
        # A token shared by several segments gets the expert ids of the last of them.
        routed = np.empty((len(tokens), *found[0].shape[1:]), np.int32)
        for path, ids in zip(paths, found, strict=True):
            routed[path] = ids
        if routing is Routing.SHUFFLED:
            routed = np.random.default_rng(len(tokens)).permutation(routed)
        expert_ids = torch.from_numpy(routed)
    return PackedRow(
        input_ids=torch.from_numpy(tokens)[None],
        position_ids=torch.from_numpy(depths)[None],
        tree=tree_calls(parents),
        predicting=torch.from_numpy(predicting),
        predictors=torch.from_numpy(predictors),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        sampler_logprobs=torch.from_numpy(np.concatenate(logprobs).astype(np.float32)),
        sequence=torch.from_numpy(np.repeat(owners, [len(at) for at in sampled])),
        tokens=sum(segment.n_tokens for segment in segments),
        expert_ids=expert_ids,
    )


Ints = npt.NDArray[np.int64]


def _laid_out(inputs: Sequence[bytes], width: int, share: bool) -> tuple[list[Ints], Ints, Ints, Ints]:
    """Arrange the segments' tokens as a tree in depth-first order.

    Returns:
        The positions in the row of the tokens of each segment, and for each token of the row its parent (-1 without
        one), its depth and its id.
    """
    paths: list[Ints] = [np.empty(0, np.int64)] * len(inputs)
    parents, depths, tokens = [], [], []
    path, last, size = np.empty(0, np.int64), b"", 0
    for place in sorted(range(len(inputs)), key=inputs.__getitem__) if share else range(len(inputs)):
        rows = np.frombuffer(inputs[place], "u1").reshape(-1, width)
        ids = np.ascontiguousarray(rows[:, :4]).view(">u4")[:, 0].astype(np.int64)
        common = _common(last, inputs[place], width) if share else 0
        path = np.concatenate([path[:common], np.arange(size, size + len(ids) - common)])
        paths[place] = path
        parents.append(np.concatenate([[-1], path[:-1]])[common:])
        depths.append(np.arange(common, len(ids)))
        tokens.append(ids[common:])
        last, size = inputs[place], size + len(ids) - common
    return paths, np.concatenate(parents), np.concatenate(depths), np.concatenate(tokens)


class InvalidRoutingError(InvalidRolloutError):
    """A rollout has no expert ids, or its expert ids do not fit its tokens and this model."""


@dataclass(frozen=True, slots=True)
class RoutedShape:
    """The shape of a model's expert ids."""

    layers: int
    """Decoder layers, with experts and without."""
    routed: tuple[int, ...]
    """The numbers of the layers with experts."""
    experts: int
    """Experts of a layer."""
    top_k: int


def checked_ids(payload: bytes, segments: Sequence[Segment], shape: RoutedShape) -> ExpertIds:
    """Return the expert ids of a rollout's segments, ordered as in `schemas.expert_ids`. Raises InvalidRoutingError."""
    try:
        ids = unpacked_ids(payload)
    except ValueError as error:
        raise InvalidRoutingError(str(error)) from error
    rows = sum(routed_tokens(segment) for segment in segments)
    if ids.shape != (rows, shape.layers, shape.top_k):
        raise InvalidRoutingError(
            f"expert ids have the shape {list(ids.shape)} (tokens, layers, experts of a token), and the segments and "
            f"the model need {[rows, shape.layers, shape.top_k]}"
        )
    ordered = np.sort(ids[:, list(shape.routed)], axis=-1)
    if ordered.max(initial=0) >= shape.experts:
        raise InvalidRoutingError(f"expert id {ordered.max()} is not among the model's {shape.experts} experts")
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise InvalidRoutingError("a token is sent to one expert twice")
    # One type for each model, so that equal ids are equal bytes.
    return ids.astype("u1" if shape.experts <= 256 else "<u2", copy=False)
