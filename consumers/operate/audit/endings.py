"""The state of each rollout, from its task to its one ending, by the log alone. Pure.

A rollout is queued by its task, dispatched when a worker takes it, running from its first turn, scored (or failed) when
its record is written, and grouped when group assembly puts it into a group. It ends when a step trains on its group or
gives a reason for leaving it out. A held-out rollout ends in its group, a failed one as failed once a group counts it,
and one that came after its group had closed ends as late. A trainer takes the oldest group first: a rollout that waits
for the trainer is lost when steps pass its group over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tidemill.consumers.operate import RecordAt
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.report import AuditRules, Finding
from tidemill.consumers.operate.audit.run_facts import TRAINED, IssuedTask, ModelFacts, PlayedRollout
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.records import CloseReason, Group, GroupMember, Mode, RolloutStatus, rollout_id, rollout_index

OF_COPIES = frozenset({"duplicate", "replayed"})
"""Why a trainer leaves out a group that is in the log a second time; the rollouts end with the first group."""
STEPS_AHEAD = 2
"""Steps that have to pass a group over: its rollouts may have come to the trainer a moment after a younger group's."""


class RolloutState(StrEnum):
    """The state of a rollout."""

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
    """Its time is up, and no record ends it."""
    UNKNOWN = "unknown"
    """The records that would tell are past the log's retention."""


OPEN = frozenset(RolloutState(name) for name in ("queued", "dispatched", "running", "scored", "grouped"))


@dataclass(frozen=True, slots=True)
class RolloutEnding:
    """One ending of a rollout."""

    state: RolloutState
    reason: str
    place: Position
    """The record that ends it."""


@dataclass(frozen=True, slots=True)
class RolloutLife:
    """One rollout: its state, and its endings."""

    rollout_id: str
    state: RolloutState
    reason: str
    place: Position
    """Its newest record."""
    endings: tuple[RolloutEnding, ...] = ()
    """Every ending; in a sound log there is at most one."""


_Membership = tuple[Position, GroupMember]
"""A group that counts a rollout, and its entry there."""


def rollout_lives(facts: Facts, rules: AuditRules) -> Iterator[RolloutLife]:
    """Every rollout that was issued, played or grouped, once."""
    memberships: defaultdict[str, list[_Membership]] = defaultdict(list)
    for group in facts.model.groups:
        for member in group.record.members:
            memberships[member.rollout_id].append((group.place, member))
    grouped = _Grouped(facts, rules)
    seen: set[tuple[str, int | None]] = {(of.group_id, of.index) for of in facts.played.rollouts.values()}
    for rollout in facts.played.rollouts.values():
        of = memberships.pop(rollout.rollout_id, [])
        yield grouped.life(rollout.rollout_id, of, rollout) if of else _ungrouped(facts, rules, rollout)
    # The rest was put into a group, and its own record is gone.
    for name, of in memberships.items():
        seen.add((facts.model.group_at[of[0][0]].record.group_id, rollout_index(name)))
        yield grouped.life(name, of, None)
    for task in facts.played.tasks.values():
        for index in range(task.group_size):
            if (task.group_id, index) not in seen:
                yield _unplayed(facts, rules, task, index)


def is_overdue(facts: Facts, rules: AuditRules, deadline_at: int) -> bool:
    """Whether a record with a deadline cannot arrive any more."""
    return rules.ended or rules.complete or facts.clock_us > deadline_at + rules.grace_us


def _unplayed(facts: Facts, rules: AuditRules, task: IssuedTask, index: int) -> RolloutLife:
    """A rollout without a result."""
    name = rollout_id(task.group_id, index)
    dispatch = facts.played.dispatched.get(task.task_id)
    state, place = RolloutState.QUEUED, task.place
    if dispatch is not None and index in dispatch[1]:
        state, place = RolloutState.DISPATCHED, dispatch[0]
    if name in facts.played.turns:
        state, place = RolloutState.RUNNING, facts.played.turns[name].place
    if facts.is_truncated(Topic.ROLLOUTS):
        return RolloutLife(name, RolloutState.UNKNOWN, "", place)
    if is_overdue(facts, rules, task.deadline_at):
        return RolloutLife(name, RolloutState.LOST, f"{state.value}, its time is up, and it has no result", place)
    return RolloutLife(name, state, "", place)


def _ungrouped(facts: Facts, rules: AuditRules, rollout: PlayedRollout) -> RolloutLife:
    """A rollout with a result that no group counts."""
    place = rollout.records[0].place
    letters = [facts.letters[one.place] for one in rollout.records if one.place in facts.letters]
    if letters:
        ending = RolloutEnding(RolloutState.REJECTED, letters[0], place)
        return RolloutLife(rollout.rollout_id, ending.state, ending.reason, place, (ending,))
    if is_overdue(facts, rules, rollout.deadline_at):
        reason = "it has a result, its time is up, and no group counts it"
        return RolloutLife(rollout.rollout_id, RolloutState.LOST, reason, place)
    return RolloutLife(rollout.rollout_id, RolloutState.SCORED, "", place)


class _Grouped:
    """Rollouts that a group counts."""

    def __init__(self, facts: Facts, rules: AuditRules) -> None:
        self._model: ModelFacts = facts.model
        self._open = RolloutState.GROUPED
        if rules.complete and rules.last_step is not None and len(facts.model.steps) >= rules.last_step:
            self._open = RolloutState.UNUSED
        self._trained: defaultdict[int, list[tuple[RecordAt[Group], int]]] = defaultdict(list)
        """By partition: the groups that were trained, in the order of the log, with their first step."""
        for place in sorted(self._model.group_at, key=lambda at: (at.partition, at.offset)):
            steps = [step.record.step for step, reason in self._model.uses.get(place, ()) if reason == TRAINED]
            if steps:
                self._trained[place.partition].append((self._model.group_at[place], steps[0]))

    def life(self, rollout_id: str, of: list[_Membership], rollout: PlayedRollout | None) -> RolloutLife:
        """The state of a rollout that groups count; `rollout` is None where its own record is gone."""
        endings = tuple(dict.fromkeys(end for place, member in of for end in self._endings(place, member, rollout)))
        if endings:
            return RolloutLife(rollout_id, endings[0].state, endings[0].reason, endings[0].place, endings)
        place = of[0][0]
        if self._is_passed_over(place):
            reason = "steps trained on younger groups behind its own"
            return RolloutLife(rollout_id, RolloutState.LOST, reason, place)
        return RolloutLife(rollout_id, self._open, "", place)

    def _is_passed_over(self, place: Position) -> bool:
        """Whether steps trained on younger groups after a place, and not on the group there."""
        age, steps = self._model.group_at[place].record.closed_at, set[int]()
        for group, step in reversed(self._trained[place.partition]):
            if group.place.offset < place.offset or len(steps) >= STEPS_AHEAD:
                break
            if group.record.closed_at > age:
                steps.add(step)
        return len(steps) >= STEPS_AHEAD

    def _endings(self, place: Position, member: GroupMember, rollout: PlayedRollout | None) -> Iterator[RolloutEnding]:
        group = self._model.group_at[place]
        copies = self._model.groups_of[group.record.group_id]
        # A second record of a group ends no rollout a second time.
        first = next(one.place for one in copies if one.digest == group.digest)
        at_once = None
        if group.record.closed_by is CloseReason.LATE:
            at_once = RolloutState.LATE
        elif member.status is RolloutStatus.FAILED:
            at_once = RolloutState.FAILED
        elif group.record.mode is Mode.EVAL:
            at_once = RolloutState.EVALUATED
        if at_once is RolloutState.FAILED:
            failures = [one.failure for one in (rollout.records if rollout else ()) if one.failure]
            # The text after the kind of a failure is about one rollout, and counts go by kind.
            yield RolloutEnding(at_once, failures[0].split(":")[0] if failures else "its record is gone", first)
        elif at_once is not None:
            yield RolloutEnding(at_once, "", first)
        for step, reason in self._model.uses.get(place, ()):
            if reason in OF_COPIES and place != first:
                continue
            if reason == TRAINED and at_once is not RolloutState.FAILED:
                yield RolloutEnding(RolloutState.TRAINED, "", step.place)
            elif at_once is None:
                yield RolloutEnding(RolloutState.EXCLUDED, reason, step.place)


@dataclass(frozen=True, slots=True)
class AuditedRun:
    """A run whose log was read whole."""

    facts: Facts
    rules: AuditRules
    lives: Sequence[RolloutLife]


Find = Callable[[AuditedRun], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """One condition on a log."""

    name: str
    holds: str
    """The condition, in a sentence."""
    find: Find
    """The offenders, in the order of the log where there is one."""


def check(name: str, holds: str) -> Callable[[Find], AuditCheck]:
    """Make a check of a function that finds its offenders."""
    return lambda find: AuditCheck(name, holds, find)
