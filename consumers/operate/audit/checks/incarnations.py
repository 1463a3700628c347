"""Version numbers are compared within one life of them only."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.consumers.operate.audit.model_facts import named
from tidemill.consumers.operate.trace.place import Place
from tidemill.schemas.records import OnlineBatch, RolloutStatus, TrainStep


def _find(case: Case) -> Iterator[Finding]:
    facts = case.facts
    batches = {batch.place: batch.record for batch in facts.online.batches}
    for step in facts.model.steps:
        for name, incarnation in _trained(facts, batches, step.record):
            if _differ(step.record.incarnation, incarnation):
                what = f"step {step.record.step} of incarnation {step.record.incarnation} trained on {name}"
                yield Finding(step.place, f"{what}, sampled in incarnation {incarnation}")
    yield from _versions(facts)


def _differ(one: str, other: str) -> bool:
    """A record from before there were incarnations can be of any."""
    return bool(one and other and one != other)


def _trained(facts: Facts, batches: dict[Place, OnlineBatch], step: TrainStep) -> Iterator[tuple[str, str]]:
    for reference in step.inputs:
        place = named(reference)
        group, batch = facts.model.group_at.get(place), batches.get(place)
        for member in group.record.members if group is not None else ():
            rollout = facts.played.rollouts.get(member.rollout_id)
            said = rollout.at(member.partition, member.offset) if rollout is not None else None
            if said is not None and said.status is RolloutStatus.COMPLETED:
                yield f"rollout {member.rollout_id}", said.incarnation
        for one in batch.members if batch is not None else ():
            served = facts.online.served_at_place.get(Place(one.topic, one.partition, one.offset))
            if served is not None:
                yield f"interaction {one.interaction_id}", served.incarnation


def _versions(facts: Facts) -> Iterator[Finding]:
    lives = {step.record.version: step.record.incarnation for step in facts.model.steps}
    manifests = {(m.record.branch, m.record.version): m.record.incarnation for m in facts.model.manifests}
    for standing in facts.model.manifests:
        manifest = standing.record
        parent = "" if manifest.parent is None else manifests.get((manifest.branch, manifest.parent), "")
        for other, of in ((parent, "its parent"), (lives.get(manifest.version, ""), "its step")):
            if _differ(manifest.incarnation, other):
                what = f"version {manifest.version} of incarnation {manifest.incarnation}, {of} of {other}"
                yield Finding(standing.place, what)


CHECK = Check(
    "incarnations",
    "no step trained on what was sampled in another life of the version numbers, and every version is of its parent's",
    _find,
)
