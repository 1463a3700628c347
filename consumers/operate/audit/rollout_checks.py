"""Checks of rollouts and of answers to users: each ends once and is used once, as it was written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from tidemill.consumers.operate.audit.endings import OPEN, AuditedRun, Finding, RolloutState, check
from tidemill.consumers.operate.audit.facts import Facts, RecordAt
from tidemill.schemas import records as r
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import Position


@check("tasks", "every rollout that was dispatched, sampled or written belongs to an issued task and agrees with it")
def tasks(run: AuditedRun) -> Iterator[Finding]:
    if run.is_truncated(Topic.TASKS):
        return
    tasks = {name: at.record for name, at in run.tasks.items()}
    for task_id, (place, indexes) in run.dispatched.items():
        task = tasks.get(task_id)
        if task is None or not all(0 <= index < task.group_size for index in indexes):
            what = "no such task was issued" if task is None else f"it has {task.group_size} rollouts"
            yield Finding(place, f"a worker took rollouts {sorted(indexes)} of task {task_id}: {what}")
    for name, turn in run.turns.items():
        if turn.record.task_id not in tasks:
            yield Finding(turn.place, f"rollout {name} is of task {turn.record.task_id}, which was never issued")
    for name, records in run.rollouts.items():
        rollout, place = records[0].record, records[0].place
        task = tasks.get(rollout.task_id)
        if place in run.letters:
            continue
        if task is None:
            yield Finding(place, f"rollout {name} is of task {rollout.task_id}, which was never issued")
            continue
        stated = (rollout.group_id, rollout.group_size, rollout.mode, rollout.deadline_at)
        if stated != (task.group_id, task.group_size, task.mode, task.deadline_at):
            at = run.tasks[rollout.task_id].place
            yield Finding(place, f"rollout {name} disagrees with its task at {at}: {stated}")
        elif not 0 <= rollout.index < task.group_size:
            yield Finding(place, f"rollout {name} is number {rollout.index} of {task.group_size}")


@check(
    "endings",
    "every requested rollout has one end: trained, evaluated, excluded with a reason, failed with a reason, "
    "late or rejected; or its deadline has not passed yet",
)
def endings(run: AuditedRun) -> Iterator[Finding]:
    for life in run.lives:
        if life.state is RolloutState.LOST:
            yield Finding(life.place, f"rollout {life.rollout_id} is lost: {life.reason}")
        elif run.rules.complete and life.state in OPEN:
            yield Finding(life.place, f"rollout {life.rollout_id} is still {life.state.value}, and the run is over")
        elif len(life.endings) > 1 and any(state is not RolloutState.TRAINED for state, _, _ in life.endings):
            ended = " and ".join(f"{state.value} {reason}".strip() + f" ({at})" for state, reason, at in life.endings)
            yield Finding(life.endings[1][2], f"rollout {life.rollout_id} ended more than once: {ended}")


@check("trained_once", "no rollout and no online batch was trained by two steps, nor by one step twice")
def trained_once(run: AuditedRun) -> Iterator[Finding]:
    before: dict[str, Position] = {}
    for step in run.steps:
        for reference in step.record.inputs:
            group = run.group_at.get(Position.of(reference))
            if reference.topic == Topic.ONLINE_BATCHES:
                names = [f"online batch {reference.group_id}"]
            elif group is None:
                names = [f"group {reference.group_id}"]
            else:
                completed = (m for m in group.record.members if m.status is r.RolloutStatus.COMPLETED)
                names = [f"rollout {member.rollout_id}" for member in completed]
            for name in names:
                if name in before:
                    yield Finding(step.place, f"{name} was trained before, by {before[name]}")
                before.setdefault(name, step.place)


@check(
    "groups",
    "every group has the size that its closing reason requires, its members are rollouts at the recorded positions "
    "with the recorded rewards, its advantages follow from them, and its repeated records are equal byte for byte",
)
def groups(run: AuditedRun) -> Iterator[Finding]:
    for at in run.groups:
        group = at.record
        for problem in (*_size(run, group), *_members(run, group), *_advantages(group)):
            yield Finding(at.place, f"group {group.group_id}: {problem}")
        # A group of one late rollout is written for each such rollout.
        if group.closed_by is not r.CloseReason.LATE:
            copies = run.groups_of[group.group_id]
            first = next(one for one in copies if one.record.closed_by is not r.CloseReason.LATE)
            if first.digest != at.digest:
                yield Finding(at.place, f"group {group.group_id} is at {first.place} with other contents")


def _size(facts: Facts, group: r.Group) -> Iterator[str]:
    n = len(group.members)
    match group.closed_by:
        case r.CloseReason.SIZE if n != group.expected_size:
            yield f"closed as complete with {n} of {group.expected_size} rollouts"
        case r.CloseReason.DEADLINE if not 0 < n < group.expected_size:
            yield f"closed by its deadline with {n} of {group.expected_size} rollouts"
        case r.CloseReason.LATE if n != 1:
            yield f"a late group holds one rollout, not {n}"
    at = facts.tasks.get(group.task_id)
    task = None if at is None else at.record
    if task is not None and (task.group_id, task.group_size) != (group.group_id, group.expected_size):
        yield f"task {task.task_id} asked for {task.group_size} rollouts of group {task.group_id}"
    if task is not None and group.closed_by is r.CloseReason.DEADLINE and group.closed_at < task.deadline_at:
        yield f"closed by its deadline at {group.closed_at}, before the deadline {task.deadline_at}"
    names = [member.rollout_id for member in group.members]
    if names != sorted(set(names)):
        yield "its members are not in order, each once"


def _members(facts: Facts, group: r.Group) -> Iterator[str]:
    rewards: list[float | None] = []
    for member in group.members:
        if not facts.is_kept(Position(Topic.ROLLOUTS.value, member.partition, member.offset)):
            continue
        name, place = member.rollout_id, f"{member.topic}[{member.partition}]@{member.offset}"
        record = facts.record_of(name, member)
        if record is None:
            yield f"no rollout {name} is at {place}"
            continue
        stated = (member.status, member.success, member.sampled_tokens, member.version_min, member.version_max)
        held = (record.status, record.success, record.sampled_tokens, record.version_min, record.version_max)
        if (record.group_id, record.mode) != (group.group_id, group.mode):
            yield f"rollout {name} is of group {record.group_id}, {record.mode.value}"
        elif stated != held:
            yield f"member {name} is recorded with {stated}, its rollout at {place} has {held}"
        elif member.reward != record.reward and not group.rewards_shuffled:
            yield f"member {name} has reward {member.reward}, its rollout at {place} has {record.reward}"
        else:
            rewards.append(record.reward)
    # Shuffled rewards are the same rewards in another order.
    shuffled = [member.reward for member in group.members]
    if group.rewards_shuffled and len(rewards) == len(shuffled) and Counter(rewards) != Counter(shuffled):
        yield f"its rewards {shuffled} are not those of its rollouts, {rewards}"


def _advantages(group: r.Group) -> Iterator[str]:
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


@check(
    "interactions",
    "every answer that was served has one end of revision 0, a reward or an exclusion with its reason, unless its "
    "horizon has not passed or its user had it erased",
)
def interactions(run: AuditedRun) -> Iterator[Finding]:
    rules = run.rules
    for name, ends in run.ends.items():
        last = ends[-1]
        by_revision: dict[int, list[RecordAt[r.Outcome]]] = {}
        for end in ends:
            by_revision.setdefault(end.record.revision, []).append(end)
        for revision, same in by_revision.items():
            if len(same) > 1:
                what = f"interaction {name} has {len(same)} different outcomes of revision {revision}"
                yield Finding(same[1].place, what)
        for end in by_revision.get(0, ()):
            if (end.record.reward is None) == (not end.record.exclusion):
                yield Finding(end.place, f"the end of interaction {name} is neither a reward nor an exclusion")
        # An erasure removes the records of an interaction one by one.
        user_erased = last.record.user_id in run.erasures
        if user_erased or name in run.erased or run.is_truncated(Topic.OUTCOMES):
            continue
        if sorted(by_revision) != list(range(len(by_revision))):
            yield Finding(last.place, f"the revisions of interaction {name} are not numbered from 0 without a gap")
        place = Position(Topic.INTERACTIONS.value, last.record.partition, last.record.offset)
        if run.served and run.is_kept(place) and place not in run.served_at_place:
            yield Finding(last.place, f"interaction {name} ended, and {place} is no interaction")
    for name, answer in run.served.items():
        if run.ends.get(name) or answer.place in run.letters:
            continue
        if run.may_be_deleted((Topic.OUTCOMES, 0), answer.record.served_at):
            continue
        if rules.complete or run.clock_us > answer.record.served_at + rules.horizon_us + rules.grace_us:
            yield Finding(answer.place, f"interaction {name} was served and never ended")


@check(
    "batches",
    "online batches are numbered without a gap, their members are interactions of one version at the recorded "
    "positions, each in one batch, with the reward of its outcome",
)
def batches(run: AuditedRun) -> Iterator[Finding]:
    known: dict[str, RecordAt[r.OnlineBatch]] = {}
    batch_of: dict[str, RecordAt[r.OnlineBatch]] = {}
    following: Counter[str] = Counter()
    """Next number of each branch."""
    for at in run.batches:
        batch = at.record
        first = known.setdefault(batch.batch_id, at)
        if first is not at:
            if first.digest != at.digest:
                yield Finding(at.place, f"batch {batch.batch_id} is at {first.place} with other contents")
            continue
        expected = following[batch.branch]
        if batch.sequence != expected and not run.is_truncated(Topic.ONLINE_BATCHES):
            yield Finding(at.place, f"batch {batch.sequence} where number {expected} was expected")
        following[batch.branch] = batch.sequence + 1
        tokens = sum(member.sampled_tokens for member in batch.members)
        if tokens != batch.tokens:
            yield Finding(at.place, f"counts {batch.tokens} tokens, its members have {tokens}")
        for member in batch.members:
            problem = _problem(run, batch, member)
            if not member.correction:
                before = batch_of.setdefault(member.interaction_id, at)
                problem = problem or ("" if before is at else f"it is in the batch at {before.place} already")
            if problem:
                yield Finding(at.place, f"interaction {member.interaction_id}: {problem}")


def _problem(facts: Facts, batch: r.OnlineBatch, member: r.OnlineMember) -> str:
    if not member.correction and (member.version_min, member.version_max) != (batch.version, batch.version):
        return f"sampled under version {member.version_min} to {member.version_max}, the batch is of {batch.version}"
    if member.user_id in facts.erasures or member.interaction_id in facts.erased:
        return ""
    place = Position.of(member)
    answer = facts.served_at_place.get(place)
    if facts.is_kept(place) and (answer is None or answer.interaction_id != member.interaction_id):
        return f"it is not at {place}"
    rewards = [end.record.reward for end in facts.ends.get(member.interaction_id, ())]
    if rewards and not member.correction and member.reward not in rewards:
        return f"it has reward {member.reward}, its outcomes have {rewards}"
    return ""


@check("erasures", "no step trained on a user's answers after their erasure was requested")
def erasures(run: AuditedRun) -> Iterator[Finding]:
    for step in run.steps if run.erasures else ():
        excluded = {one.group_id for one in step.record.exclusions if one.topic == Topic.INTERACTIONS}
        for reference in step.record.inputs:
            batch = run.batch_at.get(Position.of(reference))
            for member in batch.members if batch is not None else ():
                at = _erasure_time(run, member)
                # The request may not have reached the trainer yet.
                known = at is not None and at + run.rules.grace_us < step.record.started_at
                if known and member.interaction_id not in excluded:
                    what = f"step {step.record.step} trained on interaction {member.interaction_id} of user"
                    yield Finding(step.place, f"{what} {member.user_id}, whose erasure had been requested")


def _erasure_time(run: AuditedRun, member: r.OnlineMember) -> int | None:
    """Return the time of the first request that asks to erase an answer; None if there is none.

    A user may return after an erasure and be erased again: the first request does not concern the answers after it.
    """
    requests = run.erasures.get(member.user_id, set())
    answer = run.served.get(member.interaction_id)
    if answer is not None:
        return min((at for at in requests if answer.record.served_at <= at), default=None)
    # The log no longer holds the answer, so that its time is unknown. Its tombstone was written after the request, and
    # the tombstone's time is in whole milliseconds: take the newest request that is not later.
    gone_at = run.erased.get(member.interaction_id)
    return max((at for at in requests if gone_at is None or at < gone_at + 1_000), default=None)


CHECKS = (tasks, endings, trained_once, groups)
ANSWER_CHECKS = (interactions, batches, erasures)
