"""What a step says that it read is there, and its counts are those of what it read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.consumers.operate.audit.model_facts import named, references
from tidemill.consumers.operate.trace.place import Place
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.records import (
    CloseReason,
    Group,
    GroupMember,
    Mode,
    OnlineBatch,
    OnlineMember,
    RolloutStatus,
    StepExclusion,
    StepInput,
    TrainStep,
)

BOUND = "policy_lag_bound"
Trained = GroupMember | OnlineMember


@dataclass(frozen=True, slots=True)
class _Read:
    """The groups and online batches of the log, by place."""

    facts: Facts
    batches: dict[Place, OnlineBatch]

    def at(self, place: Place) -> Group | OnlineBatch | None:
        group = self.facts.model.group_at.get(place)
        return self.batches.get(place) if group is None else group.record


def _find(case: Case) -> Iterator[Finding]:
    read = _Read(case.facts, {batch.place: batch.record for batch in case.facts.online.batches})
    for step in case.facts.model.steps:
        for problem in (*_references(read, step.record), *_counts(read, step.record)):
            yield Finding(step.place, f"step {step.record.step}: {problem}")


def _references(read: _Read, step: TrainStep) -> Iterator[str]:
    for reference in references(step):
        place = named(reference)
        if not read.facts.is_kept(place) or place.topic == Topic.INTERACTIONS:
            continue
        problem = _problem(reference, read.at(place))
        if problem:
            yield f"{'input' if isinstance(reference, StepInput) else 'exclusion'} at {place}: {problem}"


def _problem(reference: StepInput | StepExclusion, found: Group | OnlineBatch | None) -> str:
    name = found.group_id if isinstance(found, Group) else found.batch_id if found is not None else None
    if found is None or name != reference.group_id:
        return f"{reference.group_id} is not there; there is {name or 'nothing of the run'}"
    if isinstance(reference, StepExclusion):
        n = len(found.members)
        return "" if reference.rollouts == n else f"counts {reference.rollouts} rollouts, it has {n}"
    if isinstance(found, Group) and (found.mode is Mode.EVAL or found.closed_by is CloseReason.LATE):
        return f"{reference.group_id} must not be trained: {found.mode.value}, closed by {found.closed_by.value}"
    return ""


def _counts(read: _Read, step: TrainStep) -> Iterator[str]:
    found = [read.at(named(place)) for place in step.inputs]
    if any(one is None for one in found):
        return
    trained = [member for one in found if one is not None for member in _trained(one, step)]
    tokens = sum(member.sampled_tokens for member in trained)
    counted = sum(count.tokens for count in step.lag)
    if (step.rollouts, step.tokens, counted) != (len(trained), tokens, tokens):
        yield (
            f"counts {step.rollouts} rollouts, {step.tokens} tokens and the lag of {counted}; its inputs have "
            f"{len(trained)} rollouts and {tokens} tokens"
        )
        return
    yield from _lag(step, trained)
    bound = step.metrics.get(BOUND)
    simulated = all(isinstance(member, GroupMember) for member in trained)
    if simulated and bound is not None and any(count.lag > bound for count in step.lag):
        yield f"trained tokens {max(count.lag for count in step.lag)} versions behind; the bound is {bound:g}"


def _lag(step: TrainStep, trained: list[Trained]) -> Iterator[str]:
    if not trained or not step.lag:
        return
    stated = (min(count.lag for count in step.lag), max(count.lag for count in step.lag))
    parent = step.parent_version
    held = (parent - max(m.version_max for m in trained), parent - min(m.version_min for m in trained))
    if stated != held:
        yield f"records policy lag {stated[0]} to {stated[1]}; its inputs were sampled {held[0]} to {held[1]} behind"


def _trained(found: Group | OnlineBatch, step: TrainStep) -> list[Trained]:
    if isinstance(found, Group):
        return [m for m in found.members if m.status is RolloutStatus.COMPLETED and m.reward is not None]
    excluded = {one.group_id for one in step.exclusions if one.topic == Topic.INTERACTIONS}
    kept: list[Trained] = []
    seen: set[str] = set()
    for member in found.members:
        # A reward that stands in a batch twice counts once; corrections stand beside it.
        if member.interaction_id not in excluded and (member.correction or member.interaction_id not in seen):
            kept.append(member)
        if not member.correction:
            seen.add(member.interaction_id)
    return kept


CHECK = Check(
    "inputs",
    "what a step trained on or left out lies where it says, and its rollouts, tokens and policy lag are those of its "
    "inputs, within the bound",
    _find,
)
