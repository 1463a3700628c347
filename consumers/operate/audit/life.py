"""The life of each rollout, from being queued to its one end, as the topics tell it. Pure.

A rollout is queued by its task, dispatched when a worker takes it, running from its first turn, scored (or failed) when
it is written, and grouped when group assembly puts it into a group. It ends when a step trains on its group or says why
not; a held-out one ends in its group, a failed one as failed once a group counts it, and a straggler as late. One that
waits for the trainer is lost when steps pass its group over, since a trainer takes the oldest group first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.model_facts import TRAINED
from tidemill.consumers.operate.audit.passed_over import PassedOver
from tidemill.consumers.operate.audit.rollout_facts import RolloutFacts, TaskFacts, rollout_name
from tidemill.consumers.operate.audit.rules import AuditRules
from tidemill.consumers.operate.trace.place import Place
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.records import CloseReason, GroupMember, Mode, RolloutStatus

OF_COPIES = frozenset({"duplicate", "replayed"})
"""Why a trainer passes over a group that stands in the log again; the rollouts end with the one before."""


class State(StrEnum):
    """Where a rollout is in its life."""

    QUEUED = "queued"
    DISPATCHED = "dispatched"
    RUNNING = "running"
    SCORED = "scored"
    """It has a result, and no group counts it yet."""
    GROUPED = "grouped"
    """It waits for the trainer."""
    TRAINED = "trained"
    EVALUATED = "evaluated"
    EXCLUDED = "excluded"
    FAILED = "failed"
    LATE = "late"
    UNUSED = "unused"
    """It waited for the trainer when that had taken the last step of the run."""
    REJECTED = "rejected"
    """Group assembly could not use it: it is a dead letter."""
    LOST = "lost"
    """Its time is up, and nothing says what became of it."""
    UNKNOWN = "unknown"
    """What would tell is past the log's retention."""


OPEN = frozenset({State.QUEUED, State.DISPATCHED, State.RUNNING, State.SCORED, State.GROUPED})


@dataclass(frozen=True, slots=True)
class Ending:
    """One end of a rollout."""

    state: State
    reason: str
    place: Place
    """The record that ends it."""


@dataclass(frozen=True, slots=True)
class Life:
    """One rollout."""

    rollout_id: str
    state: State
    reason: str
    place: Place
    """The newest record of its life."""
    endings: tuple[Ending, ...] = ()
    """All of them; a sound log has one at most."""


def lives(facts: Facts, rules: AuditRules) -> Iterator[Life]:
    """Every rollout that was asked for, played or grouped, once."""
    members, passed = _memberships(facts), PassedOver(facts.model)
    taken = {(rollout.group_id, rollout.index) for rollout in facts.played.rollouts.values()}
    for rollout in facts.played.rollouts.values():
        yield _played(facts, rules, rollout, members.pop(rollout.rollout_id, []), passed)
    # What is left was put into a group, and its own record is gone.
    for rollout_id, of in members.items():
        group_id = facts.model.group_at[of[0][0]].record.group_id
        taken.add((group_id, _index_of(rollout_id)))
        yield _grouped(facts, rules, rollout_id, of, None, passed)
    for task in facts.played.tasks.values():
        for index in range(task.group_size):
            if (task.group_id, index) not in taken:
                yield _unplayed(facts, rules, task, index)


_Memberships = list[tuple[Place, GroupMember]]


def _memberships(facts: Facts) -> dict[str, _Memberships]:
    found: dict[str, _Memberships] = {}
    for group in facts.model.groups:
        for member in group.record.members:
            found.setdefault(member.rollout_id, []).append((group.place, member))
    return found


def _index_of(rollout_id: str) -> int:
    tail = rollout_id.rpartition("/")[2]
    return int(tail) if tail.isdigit() else -1


def _played(facts: Facts, rules: AuditRules, rollout: RolloutFacts, of: _Memberships, passed: PassedOver) -> Life:
    if of:
        return _grouped(facts, rules, rollout.rollout_id, of, rollout, passed)
    place = rollout.attempts[0].place
    letters = [facts.letters[one.place] for one in rollout.attempts if one.place in facts.letters]
    if letters:
        ending = Ending(State.REJECTED, letters[0], place)
        return Life(rollout.rollout_id, State.REJECTED, letters[0], place, (ending,))
    if is_overdue(facts, rules, rollout.deadline_at):
        reason = "it has a result, its time is up, and no group counts it"
        return Life(rollout.rollout_id, State.LOST, reason, place)
    return Life(rollout.rollout_id, State.SCORED, "", place)


def _grouped(
    facts: Facts,
    rules: AuditRules,
    rollout_id: str,
    of: _Memberships,
    rollout: RolloutFacts | None,
    passed: PassedOver,
) -> Life:
    endings = tuple(dict.fromkeys(end for place, member in of for end in _endings(facts, place, member, rollout)))
    if endings:
        return Life(rollout_id, endings[0].state, endings[0].reason, endings[0].place, endings)
    place = of[0][0]
    if passed.by_steps(place):
        return Life(rollout_id, State.LOST, "steps trained on younger groups behind its own", place)
    over = rules.complete and rules.last_step is not None and len(facts.model.steps) >= rules.last_step
    return Life(rollout_id, State.UNUSED if over else State.GROUPED, "", place)


def _endings(facts: Facts, place: Place, member: GroupMember, rollout: RolloutFacts | None) -> Iterator[Ending]:
    group = facts.model.group_at[place].record
    copies = facts.model.groups_of[group.group_id]
    first = next(one.place for one in copies if one.digest == facts.model.group_at[place].digest)
    uses = [use for use in facts.model.uses.get(place, ()) if not (use.reason in OF_COPIES and place != first)]
    at_once = _ends_in_group(group.closed_by, group.mode, member)
    if at_once is not None:
        reason = _failure(rollout) if at_once is State.FAILED else ""
        # A group that stands there again ends nobody again.
        yield Ending(at_once, reason, first)
    for use in uses:
        trained = use.reason == TRAINED
        if trained and at_once is not State.FAILED:
            yield Ending(State.TRAINED, "", use.step.place)
        elif at_once is None:
            yield Ending(State.EXCLUDED, use.reason, use.step.place)


def _ends_in_group(closed_by: CloseReason, mode: Mode, member: GroupMember) -> State | None:
    if closed_by is CloseReason.LATE:
        return State.LATE
    if member.status is RolloutStatus.FAILED:
        return State.FAILED
    return State.EVALUATED if mode is Mode.EVAL else None


def _failure(rollout: RolloutFacts | None) -> str:
    failed = [one.failure for one in (rollout.attempts if rollout else ()) if one.failure]
    # What comes after the kind of failure is of this one alone, and counts go by kind.
    return failed[0].split(":")[0] if failed else "its record is gone"


def _unplayed(facts: Facts, rules: AuditRules, task: TaskFacts, index: int) -> Life:
    name = rollout_name(task.group_id, index)
    dispatch = facts.played.dispatched.get(task.task_id)
    state, place = State.QUEUED, task.place
    if dispatch is not None and index in dispatch[1]:
        state, place = State.DISPATCHED, dispatch[0]
    if name in facts.played.turns:
        state, place = State.RUNNING, facts.played.turns[name].place
    if facts.is_truncated(Topic.ROLLOUTS):
        return Life(name, State.UNKNOWN, "", place)
    if is_overdue(facts, rules, task.deadline_at):
        return Life(name, State.LOST, f"{state.value}, its time is up, and it has no result", place)
    return Life(name, state, "", place)


def is_overdue(facts: Facts, rules: AuditRules, deadline_at: int) -> bool:
    """Whether nothing can be on its way any more that had to come by a time."""
    return rules.ended or rules.complete or facts.clock_us > deadline_at + rules.grace_us
