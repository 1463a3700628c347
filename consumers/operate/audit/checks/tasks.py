"""What was played was asked for."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.schemas.catalogue import Topic


def _find(case: Case) -> Iterator[Finding]:
    facts = case.facts
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
    yield from _rollouts(facts)


def _rollouts(facts: Facts) -> Iterator[Finding]:
    for rollout in facts.played.rollouts.values():
        task, place = facts.played.tasks.get(rollout.task_id), rollout.attempts[0].place
        if place in facts.letters:
            continue
        if task is None:
            yield Finding(place, f"rollout {rollout.rollout_id} is of task {rollout.task_id}, which was never issued")
            continue
        said = (rollout.group_id, rollout.group_size, rollout.mode, rollout.deadline_at)
        if said != (task.group_id, task.group_size, task.mode, task.deadline_at):
            yield Finding(place, f"rollout {rollout.rollout_id} disagrees with its task at {task.place}: {said}")
        elif not 0 <= rollout.index < task.group_size:
            yield Finding(place, f"rollout {rollout.rollout_id} is number {rollout.index} of {task.group_size}")


CHECK = Check(
    "tasks",
    "every rollout that was taken, sampled or written belongs to a task that was issued, as the task says",
    _find,
)
