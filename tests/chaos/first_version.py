"""The one decision of a run that is a person's: which version users meet first."""

from __future__ import annotations

from tidemill.compose.config import TidemillSettings
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.producer import RecordProducer
from tidemill.schemas.records import GateDecision, GateVerdict

OPERATOR = "chaos"


def promote_first(settings: TidemillSettings) -> None:
    """Give everyone version 0."""
    run = settings.run
    decision = GateDecision(
        run_id=run.run_id,
        branch=run.branch,
        verdict=GateVerdict.PROMOTE,
        version=0,
        reason="the version that users meet first",
        decided_by=OPERATOR,
        numbers={},
        at=now_us(),
    )
    with RecordProducer(settings.kafka, "chaos-operator") as producer:
        producer.send_acked(Topic.GATE, [(run.branch, decision)])
