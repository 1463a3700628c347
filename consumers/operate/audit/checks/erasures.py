"""Nobody is trained on who demanded to be erased."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.consumers.operate.audit.model_facts import named
from tidemill.schemas.catalogue import Topic


def _find(case: Case) -> Iterator[Finding]:
    erasures = case.facts.online.erasures
    batches = {batch.place: batch.record for batch in case.facts.online.batches} if erasures else {}
    for step in case.facts.model.steps if batches else ():
        excluded = {one.group_id for one in step.record.exclusions if one.topic == Topic.INTERACTIONS}
        for reference in step.record.inputs:
            batch = batches.get(named(reference))
            for member in batch.members if batch is not None else ():
                at = erasures.get(member.user_id)
                # The demand may have been on its way to the trainer.
                known = at is not None and at + case.rules.grace_us < step.record.started_at
                if at is None or not known or member.interaction_id in excluded:
                    continue
                served = case.facts.online.served.get(member.interaction_id)
                if served is None or served.served_at <= at:
                    what = f"step {step.record.step} trained on interaction {member.interaction_id} of user"
                    yield Finding(step.place, f"{what} {member.user_id}, who had demanded to be erased")


CHECK = Check("erasures", "no step trained on a user's answers after he had demanded to be erased", _find)
