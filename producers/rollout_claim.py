"""Claim check for rollouts: one too large for the log leaves its bytes in the object store.

What holds: the claimed bytes are the whole rollout, encoded as on the log, so that `schemas.claim.claimed_rollout`
gives back the record as it was; their name is their digest, so that a repeated store is the same object.
"""

from __future__ import annotations

from tidemill.producers.rollout import with_claim
from tidemill.schemas.claim import digest, store_claim
from tidemill.schemas.codec import Codec
from tidemill.schemas.records import Rollout, Segment

OVERHEAD_BYTES = 4096
"""More than the fields of a rollout beside its segments take."""
SPAN_BYTES = 30
"""More than one version span takes."""


class RolloutClaims:
    """Stores what is above the limit."""

    def __init__(self, root: str, run_id: str, limit_bytes: int, codec: Codec) -> None:
        self._root = f"{root.rstrip('/')}/{run_id}/claims"
        self._limit_bytes = limit_bytes
        self._codec = codec

    def checked(self, rollout: Rollout) -> Rollout:
        """The rollout as it goes to the log: itself, or without segments and with a claim."""
        if OVERHEAD_BYTES + sum(segment_bytes(segment) for segment in rollout.segments) <= self._limit_bytes:
            return rollout
        payload = self._codec.encode(rollout)
        return with_claim(rollout, store_claim(self._root, digest(payload), payload))


def segment_bytes(segment: Segment) -> int:
    """More than a segment takes on the log."""
    arrays = len(segment.token_ids) + len(segment.loss_mask) + len(segment.logprobs)
    return arrays + SPAN_BYTES * len(segment.spans)
