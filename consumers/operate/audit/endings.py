"""The rules of an audit, and the state of each rollout, from its task to its one ending, from the log alone. Pure.

A rollout is queued by its task, dispatched when a worker takes it, running from its first turn, scored (or failed) when
its record is written, and grouped when group assembly puts it into a group. It ends when a step trains on its group or
excludes the group with a reason. A held-out rollout ends in its group, a failed one as failed when a group counts it,
and one that arrived after its group had closed ends as late. A trainer takes the oldest group first: a rollout that
waits for the trainer is lost if steps skip its group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

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
"""Reasons of a trainer to exclude a group that is in the log a second time; its rollouts end with the first group."""
STEPS_AHEAD = 2
"""Steps that must skip a group before it counts as lost: a younger group may reach the trainer just before it."""


@dataclass(frozen=True, slots=True)
class AuditRules:
    """The settings that separate a fault from work that is under way."""

    run_id: str
    ended: bool = False
    """The workers have stopped: a rollout without a result is lost, also before its deadline."""
    complete: bool = False
    """The run has ended: everything that is still open is a fault, including groups that wait for the trainer."""
    last_step: int | None = None
    """The last step of the run, if it is known: groups that remain after it are no fault."""
    allow_truncated: bool = False
    """Records that retention has deleted are no fault, and checks that need them are skipped."""
    grace_us: int = 10 * MINUTE_US
    """How long after its deadline, in event time, a record may still arrive."""
    horizon_us: int = 48 * 60 * MINUTE_US
    """How long after it was served an interaction may remain without an end."""


class RolloutState(StrEnum):
    QUEUED = "queued"
    DISPATCHED = "dispatched"
    RUNNING = "running"
    SCORED = "scored"
    """It has a result, but no group counts it yet."""
    GROUPED = "grouped"
    """It waits for the trainer."""
    TRAINED = "trained"
    EVALUATED = "evaluated"
    EXCLUDED = "excluded"
    FAILED = "failed"
    LATE = "late"
    UNUSED = "unused"
    """It still waited for the trainer after the last step of the run."""
    REJECTED = "rejected"
    """Group assembly could not use it: it is a dead letter."""
    LOST = "lost"
    """No record ended it in time."""
    UNKNOWN = "unknown"
    """Retention has deleted the records that would show its state."""


OPEN = frozenset(RolloutState(name) for name in ("queued", "dispatched", "running", "scored", "grouped"))


RolloutEnding = tuple[RolloutState, str, Position]
"""A state that ends a rollout, its reason, and the record that ends it."""


@dataclass(frozen=True, slots=True)
class RolloutLife:
    rollout_id: str
    state: RolloutState
    reason: str
    place: Position
    """Its newest record."""
    endings: tuple[RolloutEnding, ...] = ()
    """Every ending; in a correct log there is at most one."""


class AuditedRun(Facts):
    """A run whose whole log was read: its facts, and the rules by which they are checked."""

    def __init__(self, rules: AuditRules) -> None:
        super().__init__(rules.run_id)
        self.rules = rules

    @cached_property
    def lives(self) -> tuple[RolloutLife, ...]:
        """Every rollout that was issued, played or grouped, once. Valid after all records were observed."""
        return tuple(_lives(self))

    @cached_property
    def trained(self) -> defaultdict[int, list[tuple[RecordAt[Group], int]]]:
        """By partition: the groups that were trained on, in the order of the log, with their first step."""
        found = defaultdict(list)
        for place in sorted(self.group_at, key=lambda at: (at.partition, at.offset)):
            steps = [step.record.step for step, reason in self.uses.get(place, ()) if reason == TRAINED]
            if steps:
                found[place.partition].append((self.group_at[place], steps[0]))
        return found

    def is_overdue(self, deadline_at: int) -> bool:
        """Whether a record with a deadline cannot arrive any more."""
        return self.rules.ended or self.rules.complete or self.clock_us > deadline_at + self.rules.grace_us


_Membership = tuple[Position, GroupMember]
"""A group that counts a rollout, and its entry there."""


def _lives(run: AuditedRun) -> Iterator[RolloutLife]:
    memberships: defaultdict[str, list[_Membership]] = defaultdict(list)
    for group in run.groups:
        for member in group.record.members:
            memberships[member.rollout_id].append((group.place, member))
    seen: set[tuple[str, int | None]] = set()
    for name, records in run.rollouts.items():
        of, rollout, place = memberships.pop(name, []), records[0].record, records[0].place
        seen.add((rollout.group_id, rollout.index))
        letters = [run.letters[one.place] for one in records if one.place in run.letters]
        if of:
            yield _grouped_life(run, name, of, records)
        elif letters:
            ending = (RolloutState.REJECTED, letters[0], place)
            yield RolloutLife(name, *ending, (ending,))
        elif run.may_be_deleted((Topic.GROUPS, place.partition), rollout.finished_at):
            yield RolloutLife(name, RolloutState.UNKNOWN, "", place)
        elif run.is_overdue(rollout.deadline_at):
            reason = "it has a result, its deadline has passed, and no group counts it"
            yield RolloutLife(name, RolloutState.LOST, reason, place)
        else:
            yield RolloutLife(name, RolloutState.SCORED, "", place)
    # The other rollouts are in a group, and their own records are gone.
    for name, of in memberships.items():
        seen.add((run.group_at[of[0][0]].record.group_id, rollout_index(name)))
        yield _grouped_life(run, name, of, ())
    for at in run.tasks.values():
        task = at.record
        if at.place in run.letters and task.task_id not in run.dispatched:
            # The workers refused the task: it is a dead letter, and none of its rollouts is played.
            continue
        for index in range(task.group_size):
            if (task.group_id, index) in seen:
                continue
            name, state, place = rollout_id(task.group_id, index), RolloutState.QUEUED, at.place
            dispatch = run.dispatched.get(task.task_id)
            if dispatch is not None and index in dispatch[1]:
                state, place = RolloutState.DISPATCHED, dispatch[0]
            if name in run.turns:
                state, place = RolloutState.RUNNING, run.turns[name].place
            reason = ""
            if run.is_truncated(Topic.ROLLOUTS):
                state = RolloutState.UNKNOWN
            elif run.is_overdue(task.deadline_at):
                state, reason = RolloutState.LOST, f"{state.value}, its deadline has passed, and it has no result"
            yield RolloutLife(name, state, reason, place)


def _grouped_life(
    run: AuditedRun, rollout_id: str, of: list[_Membership], records: Sequence[RecordAt[Rollout]]
) -> RolloutLife:
    """Return the state of a rollout that groups count; its own records may be gone."""
    failures = [one.record.failure for one in records if one.record.failure]
    # The text after the kind of a failure is about one rollout; counts are by kind.
    failure = failures[0].split(":")[0] if failures else "its record is gone"
    endings = tuple(dict.fromkeys(end for place, member in of for end in _endings(run, place, member, failure)))
    if endings:
        return RolloutLife(rollout_id, *endings[0], endings)
    place, passed_over = of[0][0], set[int]()
    for group, step in reversed(run.trained[place.partition]):
        if group.place.offset < place.offset or len(passed_over) >= STEPS_AHEAD:
            break
        if group.record.closed_at > run.group_at[place].record.closed_at:
            passed_over.add(step)
    if len(passed_over) >= STEPS_AHEAD:
        return RolloutLife(rollout_id, RolloutState.LOST, "steps trained on younger groups behind its own", place)
    rules = run.rules
    over = rules.complete and rules.last_step is not None and len(run.steps) >= rules.last_step
    return RolloutLife(rollout_id, RolloutState.UNUSED if over else RolloutState.GROUPED, "", place)


def _endings(run: AuditedRun, place: Position, member: GroupMember, failure: str) -> Iterator[RolloutEnding]:
    group = run.group_at[place]
    copies = run.groups_of[group.record.group_id]
    # A second record of a group does not end its rollouts again.
    first = next(one.place for one in copies if one.digest == group.digest)
    at_once = None
    if group.record.closed_by is CloseReason.LATE:
        at_once = RolloutState.LATE
    elif member.status is RolloutStatus.FAILED:
        at_once = RolloutState.FAILED
    elif group.record.mode is Mode.EVAL:
        at_once = RolloutState.EVALUATED
    if at_once is not None:
        yield at_once, failure if at_once is RolloutState.FAILED else "", first
    for step, reason in run.uses.get(place, ()):
        if reason in OF_COPIES and place != first:
            continue
        if reason == TRAINED and at_once is not RolloutState.FAILED:
            yield RolloutState.TRAINED, "", step.place
        elif at_once is None:
            yield RolloutState.EXCLUDED, reason, step.place


@dataclass(frozen=True, slots=True)
class Finding:
    place: Position | None
    """The record that shows the fault; None if no record of the log does."""
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}" if self.place else self.what


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    holds: str
    """The condition on a log that was checked, in a sentence."""
    offenders: int
    first: Finding | None

    @property
    def passed(self) -> bool:
        return self.offenders == 0


Find = Callable[[AuditedRun], Iterator[Finding]]
AuditCheck = Callable[[AuditedRun], CheckResult]


def check(name: str, holds: str) -> Callable[[Find], AuditCheck]:
    """Make a check from a function that finds the offenders, in the order of the log if there is one."""

    def of(find: Find) -> AuditCheck:
        def run_check(run: AuditedRun) -> CheckResult:
            findings = find(run)
            first = next(findings, None)
            return CheckResult(name, holds, (first is not None) + sum(1 for _ in findings), first)

        return run_check

    return of
