"""Nothing is trained twice."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.consumers.operate.audit.model_facts import named
from tidemill.consumers.operate.trace.place import Place
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.records import RolloutStatus, StepInput


def _find(case: Case) -> Iterator[Finding]:
    before: dict[str, Place] = {}
    for step in case.facts.model.steps:
        for reference in step.record.inputs:
            for name in _names(case.facts, reference):
                if name in before:
                    yield Finding(step.place, f"{name} was trained before, by {before[name]}")
                before.setdefault(name, step.place)


def _names(facts: Facts, reference: StepInput) -> list[str]:
    if reference.topic == Topic.ONLINE_BATCHES:
        return [f"online batch {reference.group_id}"]
    group = facts.model.group_at.get(named(reference))
    if group is None:
        return [f"group {reference.group_id}"]
    completed = [member for member in group.record.members if member.status is RolloutStatus.COMPLETED]
    return [f"rollout {member.rollout_id}" for member in completed]


CHECK = Check("trained_once", "no rollout and no online batch was trained by two steps, nor by one step twice", _find)
