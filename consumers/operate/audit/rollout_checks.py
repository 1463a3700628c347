"""Checks of rollouts: each was asked for, ends once, is trained once, and is in its group as it was written."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tidemill.consumers.operate.audit.endings import OPEN, AuditedRun, RolloutState, check
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.report import Finding
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.records import CloseReason, Group, GroupMember, RolloutStatus, StepInput


@check("tasks", "every rollout that was taken, sampled or written belongs to a task that was issued, as the task says")
def tasks(run: AuditedRun) -> Iterator[Finding]:
    """Find rollouts without a task, and rollouts that disagree with theirs."""
    facts = run.facts
    if facts.is_truncated(Topic.TASKS):
        return
    for task_id, (place, indexes) in facts.played.dispatched.items():
        task = facts.played.tasks.get(task_id)
        if task is None or not all(0 <= index < task.group_size for index in indexes):
            what = "no such task was issued" if task is None else f"it has {task.group_size} rollouts"
            yield Finding(place, f"a worker took rollouts {sorted(indexes)} of task {task_id}: {what}")
    for rollout_id, sampled in facts.played.turns.items():
        if sampled.task_id not in facts.played.tasks:
            yield Finding(sampled.place, f"rollout {rollout_id} is of task {sampled.task_id}, which was never issued")
    for rollout in facts.played.rollouts.values():
        task, place = facts.played.tasks.get(rollout.task_id), rollout.records[0].place
        if place in facts.letters:
            continue
        if task is None:
            yield Finding(place, f"rollout {rollout.rollout_id} is of task {rollout.task_id}, which was never issued")
            continue
        stated = (rollout.group_id, rollout.group_size, rollout.mode, rollout.deadline_at)
        if stated != (task.group_id, task.group_size, task.mode, task.deadline_at):
            yield Finding(place, f"rollout {rollout.rollout_id} disagrees with its task at {task.place}: {stated}")
        elif not 0 <= rollout.index < task.group_size:
            yield Finding(place, f"rollout {rollout.rollout_id} is number {rollout.index} of {task.group_size}")


@check(
    "endings",
    "every rollout that was asked for has one end: trained, evaluated, excluded with a reason, failed with a reason, "
    "late or rejected, or it is on its way within its time",
)
def endings(run: AuditedRun) -> Iterator[Finding]:
    """Find rollouts that are lost, left open, or ended more than once."""
    for life in run.lives:
        if life.state is RolloutState.LOST:
            yield Finding(life.place, f"rollout {life.rollout_id} is lost: {life.reason}")
        elif run.rules.complete and life.state in OPEN:
            yield Finding(life.place, f"rollout {life.rollout_id} is still {life.state.value}, and the run is over")
        elif len(life.endings) > 1 and any(end.state is not RolloutState.TRAINED for end in life.endings):
            told = " and ".join(f"{end.state.value} {end.reason}".strip() + f" ({end.place})" for end in life.endings)
            yield Finding(life.endings[1].place, f"rollout {life.rollout_id} ended more than once: {told}")


@check("trained_once", "no rollout and no online batch was trained by two steps, nor by one step twice")
def trained_once(run: AuditedRun) -> Iterator[Finding]:
    """Find records that were trained twice."""
    before: dict[str, Position] = {}
    for step in run.facts.model.steps:
        for reference in step.record.inputs:
            for name in _trained_by(run.facts, reference):
                if name in before:
                    yield Finding(step.place, f"{name} was trained before, by {before[name]}")
                before.setdefault(name, step.place)


def _trained_by(facts: Facts, reference: StepInput) -> list[str]:
    """The names of everything that one input of a step stands for."""
    if reference.topic == Topic.ONLINE_BATCHES:
        return [f"online batch {reference.group_id}"]
    group = facts.model.group_at.get(Position.of(reference))
    if group is None:
        return [f"group {reference.group_id}"]
    completed = [member for member in group.record.members if member.status is RolloutStatus.COMPLETED]
    return [f"rollout {member.rollout_id}" for member in completed]


@check(
    "groups",
    "every group is closed for the reason it gives, its members are rollouts that lie where it says with the rewards "
    "it says, its advantages follow from them, and its second record is the same byte for byte",
)
def groups(run: AuditedRun) -> Iterator[Finding]:
    """Find groups that disagree with their task or their rollouts, and groups with two contents."""
    for at in run.facts.model.groups:
        group = at.record
        for problem in (*_size(run.facts, group), *_members(run.facts, group), *_advantages(group)):
            yield Finding(at.place, f"group {group.group_id}: {problem}")
        # A group of one late rollout is written for each such rollout.
        if group.closed_by is not CloseReason.LATE:
            copies = run.facts.model.groups_of[group.group_id]
            first = next(one for one in copies if one.record.closed_by is not CloseReason.LATE)
            if first.digest != at.digest:
                yield Finding(at.place, f"group {group.group_id} stands at {first.place} with other contents")


def _size(facts: Facts, group: Group) -> Iterator[str]:
    n = len(group.members)
    match group.closed_by:
        case CloseReason.SIZE if n != group.expected_size:
            yield f"closed as complete with {n} of {group.expected_size} rollouts"
        case CloseReason.DEADLINE if not 0 < n < group.expected_size:
            yield f"closed by its deadline with {n} of {group.expected_size} rollouts"
        case CloseReason.LATE if n != 1:
            yield f"a late group holds one straggler, not {n}"
    task = facts.played.tasks.get(group.task_id)
    if task is not None and (task.group_id, task.group_size) != (group.group_id, group.expected_size):
        yield f"task {task.task_id} asked for {task.group_size} rollouts of group {task.group_id}"
    if task is not None and group.closed_by is CloseReason.DEADLINE and group.closed_at < task.deadline_at:
        yield f"closed by its deadline at {group.closed_at}, before the deadline {task.deadline_at}"
    names = [member.rollout_id for member in group.members]
    if names != sorted(set(names)):
        yield "its members are not in order, each once"


def _members(facts: Facts, group: Group) -> Iterator[str]:
    rewards: list[float | None] = []
    for member in group.members:
        if facts.is_kept(Position(Topic.ROLLOUTS.value, member.partition, member.offset)):
            found = _reward_of(facts, group, member)
            if isinstance(found, str):
                yield found
            else:
                rewards.append(found)
    # Shuffled rewards are the same rewards in another order.
    if group.rewards_shuffled and len(rewards) == len(group.members):
        stated = [member.reward for member in group.members]
        if sorted(rewards, key=_none_first) != sorted(stated, key=_none_first):
            yield f"its rewards {stated} are not those of its rollouts, {rewards}"


def _none_first(reward: float | None) -> tuple[bool, float]:
    return reward is not None, reward or 0.0


def _reward_of(facts: Facts, group: Group, member: GroupMember) -> float | str | None:
    """The reward of a member's rollout, or the member's fault as text."""
    place = f"{member.topic}[{member.partition}]@{member.offset}"
    rollout = facts.played.rollouts.get(member.rollout_id)
    record = rollout.at(member.partition, member.offset) if rollout is not None else None
    if rollout is None or record is None or member.topic != Topic.ROLLOUTS:
        return f"no rollout {member.rollout_id} lies at {place}"
    if (rollout.group_id, rollout.mode) != (group.group_id, group.mode):
        return f"rollout {member.rollout_id} is of group {rollout.group_id}, {rollout.mode.value}"
    stated = (member.status, member.success, member.sampled_tokens, member.version_min, member.version_max)
    held = (record.status, record.success, record.sampled_tokens, record.version_min, record.version_max)
    if stated != held:
        return f"member {member.rollout_id} is told as {stated}, its rollout at {place} says {held}"
    if member.reward != record.reward and not group.rewards_shuffled:
        return f"member {member.rollout_id} has reward {member.reward}, its rollout at {place} says {record.reward}"
    return record.reward


def _advantages(group: Group) -> Iterator[str]:
    rewards = [member.reward for member in group.members if member.reward is not None]
    mean = group.mean_reward
    if mean is not None and (not rewards or not _equal(mean, math.fsum(rewards) / len(rewards))):
        yield f"mean reward {mean}, and its rewards are {rewards}"
    for member in group.members:
        wanted = None if member.reward is None or mean is None else member.reward - mean
        if not _equal(member.advantage, wanted):
            yield f"member {member.rollout_id} has advantage {member.advantage}, not {wanted}"
            return


def _equal(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


CHECKS = (tasks, endings, trained_once, groups)
