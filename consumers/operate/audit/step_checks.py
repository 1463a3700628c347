"""Checks of steps: each was planned, read what it says that it read, and continues an earlier one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tidemill.consumers.operate.audit.endings import AuditedRun, check
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.report import Finding
from tidemill.consumers.operate.audit.run_facts import references
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.gate_decisions import GIVES_UP
from tidemill.schemas.log.consumed import Position
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
    StepPlan,
    TrainStep,
)

DECISIVE = ("parent_version", "inputs", "exclusions", "seed", "config_hash")
"""Fields in which a step equals its plan."""
BOUND = "policy_lag_bound"
TrainedMember = GroupMember | OnlineMember


@check(
    "plans",
    "every step was planned before it was taken, and was taken as it was planned last; a trainer that came back "
    "planned it anew only where the settings, the gate, or the loss of something that it reads to retention or an "
    "erasure stood against the first plan",
)
def plans(run: AuditedRun) -> Iterator[Finding]:
    """Find steps without a plan or against it, and plans that changed without a reason."""
    planned: dict[int, tuple[Position, StepPlan]] = {}
    taken: dict[int, Position] = {}
    inputs = _Inputs(run.facts, run.rules.grace_us)
    for at in run.facts.model.plans_and_steps:
        record, number, problem = at.record, at.record.step, ""
        place, plan = planned.get(number, (None, None))
        if isinstance(record, StepPlan):
            field = _difference(plan, record)
            if number in taken:
                problem = f"was planned after it was taken, at {taken[number]}"
            elif plan is not None and field and not inputs.is_outdated(plan, record):
                problem = f"was planned at {place} with other {field}, and nothing in the log stood against that plan"
            planned[number] = (at.place, record)
        else:
            field = _difference(plan, record)
            if field:
                problem = f"was taken with other {field} than {place} planned"
            elif plan is None and planned:
                # A run that was begun before there were plans has none for its first steps.
                problem = "was taken without a plan"
            taken[number] = at.place
        if problem:
            yield Finding(at.place, f"step {number} {problem}")


def _difference(plan: StepPlan | None, other: StepPlan | TrainStep) -> str:
    """The first field in which a plan and another record differ; empty for none."""
    fields = DECISIVE if plan is not None else ()
    return next((field for field in fields if getattr(plan, field) != getattr(other, field)), "")


class _Inputs:
    """The groups and online batches of a log, and whether they could still be read at a time.

    A place before its partition's beginning is gone, and so is one of a compacted topic that holds no record. Claimed
    bytes are in a store, of which the log says nothing.

    Args:
        grace_us: how much later a deletion may say that it was made, since clocks differ.
    """

    def __init__(self, facts: Facts, grace_us: int = 0) -> None:
        self.facts, self._grace_us = facts, grace_us
        self._batches: Mapping[Position, OnlineBatch] = {at.place: at.record for at in facts.online.batches}

    def at(self, place: Position) -> Group | OnlineBatch | None:
        """The group or batch at a place."""
        group = self.facts.model.group_at.get(place)
        return self._batches.get(place) if group is None else group.record

    def is_outdated(self, before: StepPlan, now: StepPlan) -> bool:
        """Whether a trainer that came back had to plan anew."""
        if before.trainer == now.trainer:
            return False
        # A trainer whose version was abandoned continues from another one.
        moved = before.parent_version != now.parent_version
        abandoned = moved and any(decision.record.verdict in GIVES_UP for decision in self.facts.model.decisions)
        return before.config_hash != now.config_hash or abandoned or self._lacks(before, now.at)

    def _lacks(self, plan: StepPlan, at: int) -> bool:
        """Whether an input of `plan` was gone by the time `at`, in microseconds; where only the beginning of the log
        shows that it is gone, by now."""
        excluded = {one.group_id for one in plan.exclusions if one.topic == Topic.INTERACTIONS}
        for place in map(Position.of, plan.inputs):
            found = self.at(place)
            places = [place]
            if isinstance(found, Group):
                places += [Position.of(m) for m in _with_reward(found)]
            elif found is not None:
                members = [member for member in found.members if member.interaction_id not in excluded]
                if any(self._is_answer_gone(member, at) for member in members):
                    return True
            if not all(map(self.facts.is_kept, places)):
                return True
        return False

    def _is_answer_gone(self, member: OnlineMember, at: int) -> bool:
        online, by = self.facts.online, at + self._grace_us
        erased_at = online.erased.get(member.interaction_id)
        if erased_at is not None:
            return erased_at <= by
        served = online.served_at_place.get(Position.of(member))
        if served is None:
            # Neither a tombstone nor a record is left: compaction removed both.
            return True
        return any(served.served_at <= asked <= by for asked in online.erasure_times.get(member.user_id, ()))


@check(
    "inputs",
    "what a step trained on or left out lies where it says, and its rollouts, tokens and policy lag are those of its "
    "inputs, within the bound",
)
def inputs(run: AuditedRun) -> Iterator[Finding]:
    """Find steps that disagree with the records that they name."""
    read = _Inputs(run.facts)
    for step in run.facts.model.steps:
        for problem in (*_references(read, step.record), *_counts(read, step.record)):
            yield Finding(step.place, f"step {step.record.step}: {problem}")


def _references(read: _Inputs, step: TrainStep) -> Iterator[str]:
    for reference in references(step):
        place = Position.of(reference)
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


def _counts(read: _Inputs, step: TrainStep) -> Iterator[str]:
    found = [read.at(Position.of(place)) for place in step.inputs]
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
    if trained and step.lag:
        lags = [count.lag for count in step.lag]
        parent = step.parent_version
        low, high = parent - max(m.version_max for m in trained), parent - min(m.version_min for m in trained)
        if (min(lags), max(lags)) != (low, high):
            yield f"records policy lag {min(lags)} to {max(lags)}; its inputs were sampled {low} to {high} behind"
    bound = step.metrics.get(BOUND)
    simulated = all(isinstance(member, GroupMember) for member in trained)
    if simulated and bound is not None and any(count.lag > bound for count in step.lag):
        yield f"trained tokens {max(count.lag for count in step.lag)} versions behind; the bound is {bound:g}"


def _with_reward(group: Group) -> list[GroupMember]:
    return [m for m in group.members if m.status is RolloutStatus.COMPLETED and m.reward is not None]


def _trained(found: Group | OnlineBatch, step: TrainStep) -> list[TrainedMember]:
    """The members of an input that a step trained on."""
    if isinstance(found, Group):
        return [*_with_reward(found)]
    excluded = {one.group_id for one in step.exclusions if one.topic == Topic.INTERACTIONS}
    kept: list[TrainedMember] = []
    seen: set[str] = set()
    for member in found.members:
        # A reward that is in a batch twice counts once; corrections are members beside it.
        if member.interaction_id not in excluded and (member.correction or member.interaction_id not in seen):
            kept.append(member)
        if not member.correction:
            seen.add(member.interaction_id)
    return kept


@check("steps", "the steps are numbered without a gap, and each starts from the weights that an earlier step made")
def steps(run: AuditedRun) -> Iterator[Finding]:
    """Find gaps in the steps, and steps that start from other weights than an earlier one made."""
    facts = run.facts
    start = (one.record.fingerprint for one in facts.model.manifests if one.record.version == 0)
    # None where the log does not say what the run starts from.
    made: dict[int, str | None] = {0: next(start, None)}
    expected = 1
    for at in facts.model.steps:
        step = at.record
        if expected == 1 and facts.is_truncated(Topic.STEPS):
            expected = step.step
            made[step.parent_version] = step.parent_fingerprint
        if step.step != expected:
            yield Finding(at.place, f"step {step.step} where step {expected} was expected")
        problem = _continues(step, made)
        if problem:
            yield Finding(at.place, f"step {step.step} {problem}")
        made.setdefault(step.version, step.fingerprint)
        expected = step.step + 1


def _continues(step: TrainStep, made: Mapping[int, str | None]) -> str:
    if step.version != step.step:
        return f"made version {step.version}; a step makes the version of its number"
    if step.parent_version not in made or step.parent_version >= step.version:
        return f"starts from version {step.parent_version}, which nothing before it made"
    parent = made[step.parent_version]
    if parent is not None and parent != step.parent_fingerprint:
        weights = step.parent_fingerprint
        return f"starts from weights {weights}, and version {step.parent_version} was made with {parent}"
    return ""


CHECKS = (plans, inputs, steps)
