"""Expert ids of rollouts, checked before they are trained by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidemill.schemas.expert_ids import ExpertIds, unpacked_ids
from tidemill.schemas.records import Segment
from tidemill.trainer.batch import InvalidRolloutError, routed_tokens


class InvalidRoutingError(InvalidRolloutError):
    """A rollout has no expert ids, or none that its tokens can be routed by with this model."""


@dataclass(frozen=True, slots=True)
class RoutedShape:
    """What expert ids of a model look like."""

    layers: int
    """Decoder layers, with experts and without."""
    routed: tuple[int, ...]
    """The numbers of those with experts."""
    experts: int
    """Of a layer."""
    top_k: int


def checked_ids(payload: bytes, segments: Sequence[Segment], shape: RoutedShape) -> ExpertIds:
    """The expert ids of a rollout's segments, as `schemas.expert_ids` orders them. Raises InvalidRoutingError."""
    try:
        ids = unpacked_ids(payload)
    except ValueError as error:
        raise InvalidRoutingError(str(error)) from error
    rows = sum(routed_tokens(segment) for segment in segments)
    if ids.shape != (rows, shape.layers, shape.top_k):
        raise InvalidRoutingError(
            f"expert ids of {list(ids.shape)} tokens, layers and experts a token, and the segments and the model need "
            f"{[rows, shape.layers, shape.top_k]}"
        )
    ordered = np.sort(ids[:, list(shape.routed)], axis=-1)
    if ordered.max(initial=0) >= shape.experts:
        raise InvalidRoutingError(f"expert id {ordered.max()} is not among the model's {shape.experts} experts")
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise InvalidRoutingError("a token is sent to one expert twice")
    # One type a model, so that equal ids are equal bytes.
    return ids.astype("u1" if shape.experts <= 256 else "<u2", copy=False)
