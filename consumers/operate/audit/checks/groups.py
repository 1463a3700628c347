"""Groups say what their rollouts say, and are whole."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.copies import Standing
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.consumers.operate.trace.place import Place
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.records import CloseReason, Group, GroupMember


def _find(case: Case) -> Iterator[Finding]:
    for group in case.facts.model.groups:
        for problem in (*_size(case.facts, group), *_members(case.facts, group.record), *_rewards(group.record)):
            yield Finding(group.place, f"group {group.record.group_id}: {problem}")
        yield from _copies(case.facts, group)


def _size(facts: Facts, standing: Standing[Group]) -> Iterator[str]:
    group, n = standing.record, len(standing.record.members)
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
    kept = [m for m in group.members if facts.is_kept(Place(Topic.ROLLOUTS.value, m.partition, m.offset))]
    found = {member.rollout_id: _own(facts, group, member) for member in kept}
    for member in kept:
        problem = found[member.rollout_id]
        if isinstance(problem, str):
            yield problem
    rewards = [found[member.rollout_id] for member in kept]
    # Rewards that were permuted are those of the group, whoever has them.
    given = [one for one in rewards if not isinstance(one, str)]
    if len(given) == len(group.members) and group.rewards_shuffled:
        stated = [member.reward for member in group.members]
        if sorted(given, key=_order) != sorted(stated, key=_order):
            yield f"its rewards {stated} are not those of its rollouts, {given}"


def _order(reward: float | None) -> tuple[bool, float]:
    return reward is not None, reward or 0.0


def _own(facts: Facts, group: Group, member: GroupMember) -> float | str | None:
    """The reward of a member's rollout, or what is wrong with the member."""
    place = f"{member.topic}[{member.partition}]@{member.offset}"
    rollout = facts.played.rollouts.get(member.rollout_id)
    said = rollout.at(member.partition, member.offset) if rollout is not None else None
    if rollout is None or said is None or member.topic != Topic.ROLLOUTS:
        return f"no rollout {member.rollout_id} lies at {place}"
    if (rollout.group_id, rollout.mode) != (group.group_id, group.mode):
        return f"rollout {member.rollout_id} is of group {rollout.group_id}, {rollout.mode.value}"
    stated = (member.status, member.success, member.sampled_tokens, member.version_min, member.version_max)
    held = (said.status, said.success, said.sampled_tokens, said.version_min, said.version_max)
    if stated != held:
        return f"member {member.rollout_id} is told as {stated}, its rollout at {place} says {held}"
    if member.reward != said.reward and not group.rewards_shuffled:
        return f"member {member.rollout_id} has reward {member.reward}, its rollout at {place} says {said.reward}"
    return said.reward


def _rewards(group: Group) -> Iterator[str]:
    rewards = [member.reward for member in group.members if member.reward is not None]
    mean = group.mean_reward
    if mean is not None and (not rewards or not _equal(mean, math.fsum(rewards) / len(rewards))):
        yield f"mean reward {mean}, and its rewards are {rewards}"
    for member in group.members:
        wanted = None if member.reward is None or mean is None else member.reward - mean
        both = member.advantage is not None and wanted is not None
        if (member.advantage is None) != (wanted is None) or (both and not _equal(member.advantage, wanted)):
            yield f"member {member.rollout_id} has advantage {member.advantage}, not {wanted}"
            return


def _equal(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def _copies(facts: Facts, group: Standing[Group]) -> Iterator[Finding]:
    """A group stands there again byte for byte or not at all; stragglers are told one by one."""
    if group.record.closed_by is CloseReason.LATE:
        return
    first = next(
        one for one in facts.model.groups_of[group.record.group_id] if one.record.closed_by is not CloseReason.LATE
    )
    if first.digest != group.digest:
        yield Finding(group.place, f"group {group.record.group_id} stands at {first.place} with other contents")


CHECK = Check(
    "groups",
    "every group is closed for the reason it gives, its members are rollouts that lie where it says with the rewards "
    "it says, its advantages follow from them, and a second record of it is the same byte for byte",
    _find,
)
