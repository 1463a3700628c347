"""The rules of an audit, and the state of each rollout, from its task to its one ending, by the log alone. Pure.

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

from tidemill.consumers.operate.audit.facts import TRAINED, Facts, RecordAt
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.records import (
    CloseReason,
    Group,
    GroupMember,
    Mode,
    Rollout,
    RolloutStatus,
    rollout_id,
    rollout_index,
)

MINUTE_US = 60_000_000
OF_COPIES = frozenset({"duplicate", "replayed"})
"""Why a trainer leaves out a group that is in the log a second time; the rollouts end with the first group."""
STEPS_AHEAD = 2
"""Steps that have to pass a group over: its rollouts may have come to the trainer a moment after a younger group's."""


@dataclass(frozen=True, slots=True)
class AuditRules:
    """The settings that separate a fault from work that is under way."""

    run_id: str
    ended: bool = False
    """No worker plays rollouts any more: a rollout without a result is lost, also before its deadline."""
    complete: bool = False
    """The run is over: everything that is still open is a fault, groups that wait for the trainer included."""
    last_step: int | None = None
    """The last step of the run, where it is known: groups that are left after it are no fault."""
    allow_truncated: bool = False
    """Records that are past a topic's retention are no fault, and checks that need them are left out."""
    grace_us: int = 10 * MINUTE_US
    """How long after its deadline, in event time, a record may still arrive."""
    horizon_us: int = 48 * 60 * MINUTE_US
    """How long after it was served an interaction may wait for its end."""


class RolloutState(StrEnum):
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
    played, grouped = facts.played, _Grouped(facts, rules)
    memberships: defaultdict[str, list[_Membership]] = defaultdict(list)
    for group in facts.model.groups:
        for member in group.record.members:
            memberships[member.rollout_id].append((group.place, member))
    seen: set[tuple[str, int | None]] = set()
    for name, records in played.rollouts.items():
        of, rollout, place = memberships.pop(name, []), records[0].record, records[0].place
        seen.add((rollout.group_id, rollout.index))
        letters = [facts.letters[one.place] for one in records if one.place in facts.letters]
        if of:
            yield grouped.life(name, of, records)
        elif letters:
            ending = RolloutEnding(RolloutState.REJECTED, letters[0], place)
            yield RolloutLife(name, ending.state, ending.reason, place, (ending,))
        elif is_overdue(facts, rules, rollout.deadline_at):
            reason = "it has a result, its time is up, and no group counts it"
            yield RolloutLife(name, RolloutState.LOST, reason, place)
        else:
            yield RolloutLife(name, RolloutState.SCORED, "", place)
    # The rest was put into a group, and its own record is gone.
    for name, of in memberships.items():
        seen.add((facts.model.group_at[of[0][0]].record.group_id, rollout_index(name)))
        yield grouped.life(name, of, ())
    for at in played.tasks.values():
        task = at.record
        for index in range(task.group_size):
            if (task.group_id, index) in seen:
                continue
            name, state, place = rollout_id(task.group_id, index), RolloutState.QUEUED, at.place
            dispatch = played.dispatched.get(task.task_id)
            if dispatch is not None and index in dispatch[1]:
                state, place = RolloutState.DISPATCHED, dispatch[0]
            if name in played.turns:
                state, place = RolloutState.RUNNING, played.turns[name].place
            reason = ""
            if facts.is_truncated(Topic.ROLLOUTS):
                state = RolloutState.UNKNOWN
            elif is_overdue(facts, rules, task.deadline_at):
                state, reason = RolloutState.LOST, f"{state.value}, its time is up, and it has no result"
            yield RolloutLife(name, state, reason, place)


def is_overdue(facts: Facts, rules: AuditRules, deadline_at: int) -> bool:
    """Whether a record with a deadline cannot arrive any more."""
    return rules.ended or rules.complete or facts.clock_us > deadline_at + rules.grace_us


class _Grouped:
    """Rollouts that a group counts."""

    def __init__(self, facts: Facts, rules: AuditRules) -> None:
        self._model = facts.model
        self._open = RolloutState.GROUPED
        if rules.complete and rules.last_step is not None and len(facts.model.steps) >= rules.last_step:
            self._open = RolloutState.UNUSED
        self._trained: defaultdict[int, list[tuple[RecordAt[Group], int]]] = defaultdict(list)
        """By partition: the groups that were trained, in the order of the log, with their first step."""
        for place in sorted(self._model.group_at, key=lambda at: (at.partition, at.offset)):
            steps = [step.record.step for step, reason in self._model.uses.get(place, ()) if reason == TRAINED]
            if steps:
                self._trained[place.partition].append((self._model.group_at[place], steps[0]))

    def life(self, rollout_id: str, of: list[_Membership], records: Sequence[RecordAt[Rollout]]) -> RolloutLife:
        """The state of a rollout that groups count, whose own records may be gone."""
        failures = [one.record.failure for one in records if one.record.failure]
        # The text after the kind of a failure is about one rollout, and counts go by kind.
        failure = failures[0].split(":")[0] if failures else "its record is gone"
        endings = tuple(dict.fromkeys(end for place, member in of for end in self._endings(place, member, failure)))
        if endings:
            return RolloutLife(rollout_id, endings[0].state, endings[0].reason, endings[0].place, endings)
        place, passed_over = of[0][0], set[int]()
        for group, step in reversed(self._trained[place.partition]):
            if group.place.offset < place.offset or len(passed_over) >= STEPS_AHEAD:
                break
            if group.record.closed_at > self._model.group_at[place].record.closed_at:
                passed_over.add(step)
        if len(passed_over) >= STEPS_AHEAD:
            return RolloutLife(rollout_id, RolloutState.LOST, "steps trained on younger groups behind its own", place)
        return RolloutLife(rollout_id, self._open, "", place)

    def _endings(self, place: Position, member: GroupMember, failure: str) -> Iterator[RolloutEnding]:
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
        if at_once is not None:
            yield RolloutEnding(at_once, failure if at_once is RolloutState.FAILED else "", first)
        for step, reason in self._model.uses.get(place, ()):
            if reason in OF_COPIES and place != first:
                continue
            if reason == TRAINED and at_once is not RolloutState.FAILED:
                yield RolloutEnding(RolloutState.TRAINED, "", step.place)
            elif at_once is None:
                yield RolloutEnding(RolloutState.EXCLUDED, reason, step.place)


@dataclass(frozen=True, slots=True)
class Finding:
    place: Position | None
    """The record that shows the fault; None where no record of the log does."""
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}" if self.place else self.what


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
