"""Packing: rollouts of the log become rows of tokens for the model.

A row is one forward pass: the segments of whole rollouts end to end, position ids starting again at each segment. A
rollout is never split over rows, so that per-rollout quantities need one row only. Packing is first-fit in the order
given, so that the same rollouts in the same order give the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.schemas.records import Interaction, Rollout, Segment

Trajectory = Rollout | Interaction
"""What a policy sampled and a step can train on."""


class InvalidRolloutError(ValueError):
    """A rollout or an interaction whose token arrays contradict each other or themselves."""


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row of L tokens, T of them sampled and to be trained."""

    input_ids: Tensor
    """i8[1, L]."""
    position_ids: Tensor
    """i8[1, L], starting at 0 with each segment."""
    lengths: tuple[int, ...]
    """Tokens of each segment; they sum to L."""
    predictors: Tensor
    """i8[T]: where in the row the token before each sampled token is, whose output predicts it."""
    targets: Tensor
    """i8[T]: the sampled token ids."""
    sampler_logprobs: Tensor
    """f4[T]."""
    sequence: Tensor
    """i8[T]: the rollout of each sampled token, by its place in the batch."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A rollout's arrays, before they have a place in a row."""

    index: int
    segments: tuple[Segment, ...]
    tokens: int


def pack(rollouts: Sequence[Trajectory], row_tokens: int, vocab_size: int) -> list[Row]:
    """Rows of at most `row_tokens` tokens holding `rollouts`; a longer rollout has a row of its own.

    Raises InvalidRolloutError for a rollout that fails `check`.
    """
    for rollout in rollouts:
        check(rollout, vocab_size)
    pieces = [_piece(index, rollout.segments) for index, rollout in enumerate(rollouts)]
    return [_row(members) for members in _first_fit(pieces, row_tokens)]


def check(rollout: Trajectory, vocab_size: int) -> None:
    """Raise InvalidRolloutError unless the arrays have their lengths, token ids lie in the vocabulary, and version
    spans cover exactly the sampled tokens, of which there is at least one."""
    for place, segment in enumerate(rollout.segments):
        problem = _segment_problem(segment, vocab_size)
        if problem:
            raise InvalidRolloutError(f"{_name(rollout)}, segment {place}: {problem}")
    if not any(segment.mask().any() for segment in rollout.segments):
        raise InvalidRolloutError(f"{_name(rollout)}: no sampled token")


def token_versions(segment: Segment) -> npt.NDArray[np.int64]:
    """i8[n_tokens]: the weight version of each sampled token, -1 elsewhere."""
    versions = np.full(segment.n_tokens, -1, np.int64)
    for span in segment.spans:
        versions[span.start : span.end] = span.version
    return versions


def sampled_versions(rollout: Trajectory) -> npt.NDArray[np.int64]:
    """i8[T]: the weight version of each sampled token of a rollout, in order."""
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
        return "the loss mask holds values other than 0 and 1"
    if n and mask[0]:
        return "its first token is marked as sampled, and has nothing before it to be predicted from"
    logprobs = segment.sampled_logprobs()[mask == 1]
    if not np.isfinite(logprobs).all() or (logprobs > 0).any():
        return "the logprob of a sampled token is not a finite number at most 0"
    return "" if _spans_cover(segment, mask) else "version spans do not cover exactly the sampled tokens"


def _spans_cover(segment: Segment, mask: npt.NDArray[np.uint8]) -> bool:
    ordered = all(0 <= span.start < span.end <= segment.n_tokens for span in segment.spans)
    apart = all(a.end <= b.start for a, b in zip(segment.spans, segment.spans[1:], strict=False))
    return ordered and apart and bool(np.array_equal(token_versions(segment) >= 0, mask == 1))


def _piece(index: int, segments: Iterable[Segment]) -> _Piece:
    kept = tuple(segment for segment in segments if segment.mask().any())
    return _Piece(index, kept, sum(segment.n_tokens for segment in kept))


def _first_fit(pieces: Sequence[_Piece], row_tokens: int) -> list[list[_Piece]]:
    rows: list[list[_Piece]] = []
    room: list[int] = []
    for piece in pieces:
        place = next((i for i, left in enumerate(room) if piece.tokens <= left), None)
        if place is None:
            rows.append([piece])
            room.append(row_tokens - piece.tokens)
        else:
            rows[place].append(piece)
            room[place] -= piece.tokens
    return rows


def _row(pieces: Sequence[_Piece]) -> Row:
    segments = [segment for piece in pieces for segment in piece.segments]
    owners = [piece.index for piece in pieces for _ in piece.segments]
    lengths = tuple(segment.n_tokens for segment in segments)
    ids = np.concatenate([segment.ids() for segment in segments]).astype(np.int64)
    sampled = np.flatnonzero(np.concatenate([segment.mask() for segment in segments]))
    logprobs = np.concatenate([segment.sampled_logprobs() for segment in segments])[sampled]
    return Row(
        input_ids=torch.from_numpy(ids)[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        lengths=lengths,
        predictors=torch.from_numpy(sampled - 1),
        targets=torch.from_numpy(ids[sampled]),
        sampler_logprobs=torch.from_numpy(logprobs.astype(np.float32)),
        sequence=torch.from_numpy(np.repeat(owners, lengths)[sampled].astype(np.int64)),
    )
