"""What a replica says of its own lag on `staleness`: how many versions what it serves is behind what the log holds.

The record is the trainer's `Staleness` with stage "serve". Its one `LagCount` counts requests, not tokens: `tokens` is
the number of requests that were in flight when the version was served, 0 where none was or the version was refused.
Records of another stage are the trainer's and count trained tokens: every reader picks its stage.
"""

from __future__ import annotations

from tidemill.schemas.records import LagCount, Staleness, WeightAck

STAGE = "serve"


def serving_lag(ack: WeightAck, step: int, head: int) -> Staleness:
    """The lag that goes with an acknowledgement.

    Args:
        ack: what the replica just said.
        step: the optimizer step of the version that it speaks of.
        head: the newest version that the replica has seen in the log.
    """
    return Staleness(
        run_id=ack.run_id,
        replica_id=ack.replica_id,
        region=ack.region,
        stage=STAGE,
        step=step,
        version=ack.serving_version,
        lag=[LagCount(lag=max(0, head - ack.serving_version), tokens=ack.requests_in_flight)],
        at=ack.at,
    )
