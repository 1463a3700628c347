"""The record of one answer: what was asked and sampled, for whom, in which arm, under which versions. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tidemill.producers.replica_client import ReplicaIdentity
from tidemill.producers.rollout_claim import OVERHEAD_BYTES, segment_bytes
from tidemill.producers.router.canary import Lot
from tidemill.producers.router.transcribe import BadAnswer, Collected
from tidemill.schemas.claim import digest, store_claim
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import RunSettings
from tidemill.schemas.records import Interaction, Segment

ABANDONED = "abandoned"
"""The client went away before the end."""
FAILED = "failed"
"""The answer broke off for the replica's sake, or cannot be believed."""


@dataclass(frozen=True, slots=True)
class Served:
    """The circumstances of one answer."""

    interaction_id: str
    user_id: str
    session_id: str
    lot: Lot
    consent: bool
    trainable: bool
    """Whether the logprobs are those of the distribution that sampled the tokens."""
    identity: ReplicaIdentity


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds from the request's arrival, and when the answer was complete in microseconds since the epoch."""

    first_token_ms: float
    latency_ms: float
    served_at: int


def interaction(
    run: RunSettings, served: Served, collected: Collected, finish_reason: str, times: Times
) -> tuple[Interaction, str]:
    """The record, and what is wrong with the tokens: an answer that cannot be believed is recorded as failed, without
    sampled tokens."""
    problem = ""
    try:
        segment = collected.segment(served.trainable)
    except BadAnswer as error:
        problem, finish_reason = str(error), FAILED
        segment = collected.segment(trainable=False)
    versions = [span.version for span in segment.spans]
    sampled = sum(span.end - span.start for span in segment.spans)
    made = Interaction(
        interaction_id=served.interaction_id,
        run_id=run.run_id,
        branch=run.branch,
        user_id=served.user_id,
        session_id=served.session_id,
        arm=served.lot.arm.value,
        propensity=served.lot.propensity,
        consent=served.consent,
        segments=[segment],
        claim=None,
        prompt_tokens=len(collected.prompt),
        sampled_tokens=sampled,
        version_min=min(versions, default=-1),
        version_max=max(versions, default=-1),
        replica_id=served.identity.replica_id,
        region=served.identity.region,
        finish_reason=finish_reason,
        first_token_ms=times.first_token_ms,
        latency_ms=times.latency_ms,
        served_at=times.served_at,
        incarnation=collected.incarnation,
    )
    return made, problem


class InteractionClaims:
    """Claim check for interactions: one too large for the log leaves its bytes in the object store.

    The claimed bytes are the whole record, so that `schemas.claim.claimed_interaction` gives it back as it was; their
    name is their digest, so that a repeated store is the same object.
    """

    def __init__(self, root: str, run_id: str, limit_bytes: int, codec: Codec) -> None:
        self._root = f"{root.rstrip('/')}/{run_id}/claims"
        self._limit_bytes, self._codec = limit_bytes, codec

    def checked(self, made: Interaction) -> Interaction:
        """The interaction as it goes to the log: itself, or without segments and with a claim."""
        if OVERHEAD_BYTES + sum(segment_bytes(segment) for segment in made.segments) <= self._limit_bytes:
            return made
        payload = self._codec.encode(made)
        no_segments: list[Segment] = []
        return replace(made, segments=no_segments, claim=store_claim(self._root, digest(payload), payload))
