"""The one decision of the second act that is a person's: which version users meet first."""

from __future__ import annotations

from tidemill.compose.config import TidemillSettings
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import GateDecision, GateVerdict


def promote_first(settings: TidemillSettings, version: int, decided_by: str) -> None:
    """Give everyone `version`. Raises DeliveryError when the log refuses."""
    run = settings.run
    decision = GateDecision(
        run_id=run.run_id,
        branch=run.branch,
        verdict=GateVerdict.PROMOTE,
        version=version,
        reason="the version that users meet first",
        decided_by=decided_by,
        numbers={},
        at=now_us(),
    )
    with RecordProducer(settings.kafka, "tidemill-demo") as producer:
        producer.send_acked(Topic.GATE, [(run.branch, decision)])
