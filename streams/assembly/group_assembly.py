"""Group assembly as a pure state machine: rollouts and ticks of one partition in, groups and rejections out.

Invariants:

- the outcome is a function of the partition's log prefix alone: no wall clock, no randomness but the group's id;
- a group closes once, by size or by event-time deadline; whatever comes after is a duplicate or a late record;
- members are a set keyed by rollout_id, so that a record delivered twice changes nothing;
- `Changes` written in their order (states, then the head, then what is forgotten) can be cut off anywhere: going on
  from the head that was written, over the states that were written, gives the same outputs.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import CloseReason, Group, GroupMember, Rollout, RolloutStatus, Tick
from tidemill.streams.assembly import group_state
from tidemill.streams.assembly.group_state import DoneGroup, GroupHeader, Head, Member, OpenGroup, State
from tidemill.streams.machine import Changes, Emit, Output, Rejected

NOT_BEGUN = -1
REWARD_LIMIT = 1e15
"""Rewards beyond are broken ones: sums of them would overflow or lose every smaller reward of the group."""


@dataclass(frozen=True, slots=True)
class AssemblyRules:
    """The settings that decide outcomes."""

    run_id: str
    done_ttl_us: int
    min_completed: int = 1
    shuffle_rewards: bool = False


Decision = Group | Rejected


class GroupAssembler:
    """The groups of one partition of the rollouts topic."""

    def __init__(self, partition: int, rules: AssemblyRules, states: Iterable[tuple[str, State]] = ()) -> None:
        self._partition = partition
        self._rules = rules
        self._offset = NOT_BEGUN
        self._clock_us = 0
        self._open: dict[str, OpenGroup] = {}
        self._done: dict[str, DoneGroup] = {}
        self._deadlines: list[tuple[int, str]] = []
        self._expiries: list[tuple[int, str]] = []
        self._changed: set[str] = set()
        self._forgotten: dict[str, None] = {}
        for key, state in states:
            self._restore(key, state)

    def next_offset(self, topic: Topic = Topic.ROLLOUTS) -> int:
        """The first offset that is not decided yet."""
        return self._offset + 1

    def clock_us(self, topic: Topic = Topic.ROLLOUTS) -> int:
        """Event time: the newest record timestamp seen, microseconds."""
        return self._clock_us

    @property
    def open_groups(self) -> int:
        """Groups that wait for members."""
        return len(self._open)

    def next_deadline_us(self) -> int | None:
        """The earliest deadline among open groups."""
        while self._deadlines and not self._waits_until(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def observe(self, located: ConsumedRecord) -> list[Output]:
        """Decide one record; a record at or below the head was decided before and gives nothing."""
        if located.offset <= self._offset:
            return []
        self._offset = located.offset
        self._clock_us = max(self._clock_us, located.timestamp_ms * 1_000)
        overdue = self._close_overdue()
        self._forget_expired()
        return [self._output(decision) for decision in (*overdue, *self._admit(located))]

    def _output(self, decision: Decision) -> Output:
        # A group lies in the partition with the number of its rollouts' partition.
        if isinstance(decision, Group):
            return Emit(Topic.GROUPS, decision.group_id, decision, self._partition)
        return decision

    def take_changes(self) -> Changes:
        """What changed since the last call."""
        states: dict[str, State] = {k: self._open.get(k) or self._done[k] for k in sorted(self._changed)}
        head = Head(self._partition, self._offset, self._clock_us)
        forgotten = list(self._forgotten)
        self._forgotten.clear()
        self._changed.clear()
        encoded = {key: group_state.encode(state) for key, state in states.items()}
        heads = {group_state.head_key(self._partition): group_state.encode(head)}
        return Changes(encoded, heads, forgotten)

    def _waits_until(self, deadline_us: int, group_id: str) -> bool:
        group = self._open.get(group_id)
        return group is not None and group.header.deadline_at == deadline_us

    def _restore(self, key: str, state: State) -> None:
        match state:
            case Head():
                self._offset, self._clock_us = state.offset, state.clock_us
            case OpenGroup():
                self._open[key] = state
                heapq.heappush(self._deadlines, (state.header.deadline_at, key))
            case DoneGroup():
                self._mark_done(key, state)

    def _mark_done(self, group_id: str, done: DoneGroup) -> None:
        self._done[group_id] = done
        heapq.heappush(self._expiries, (done.closed_clock_us + self._rules.done_ttl_us, group_id))

    def _admit(self, located: ConsumedRecord) -> list[Decision]:
        match located.record:
            case Tick():
                return []
            case Rollout() as rollout:
                return self._admit_rollout(located, rollout)
            case None:
                return [Rejected(located, located.error)]
            case other:
                return [Rejected(located, f"{type(other).__name__} is no record of this topic")]

    def _admit_rollout(self, located: ConsumedRecord, rollout: Rollout) -> list[Decision]:
        problem = broken_contract(located.key, rollout)
        if problem:
            return [Rejected(located, problem)]
        if rollout.run_id != self._rules.run_id:
            return []
        if rollout.group_id in self._done:
            return self._late(located, rollout)
        return self._join(located, rollout)

    def _late(self, located: ConsumedRecord, rollout: Rollout) -> list[Decision]:
        done = self._done[rollout.group_id]
        if rollout.rollout_id in done.rollout_ids:
            return []
        done.rollout_ids.add(rollout.rollout_id)
        self._changed.add(rollout.group_id)
        member = _member(located, rollout)
        straggler = OpenGroup(self._partition, GroupHeader.of(rollout), {member.rollout_id: member})
        return [self._record(rollout.group_id, straggler, CloseReason.LATE)]

    def _join(self, located: ConsumedRecord, rollout: Rollout) -> list[Decision]:
        header = GroupHeader.of(rollout)
        group = self._open.get(rollout.group_id) or OpenGroup(self._partition, header)
        if rollout.rollout_id in group.members:
            return []
        problem = _disagreement(group, header, rollout)
        if problem:
            return [Rejected(located, problem)]
        if rollout.group_id not in self._open:
            self._forgotten.pop(rollout.group_id, None)
            self._open[rollout.group_id] = group
            heapq.heappush(self._deadlines, (header.deadline_at, rollout.group_id))
        group.members[rollout.rollout_id] = _member(located, rollout)
        self._changed.add(rollout.group_id)
        if len(group.members) == header.group_size:
            return [self._close(rollout.group_id, CloseReason.SIZE)]
        # A group that opens past its deadline has no other record to wait for.
        return [*self._close_overdue()]

    def _close_overdue(self) -> list[Group]:
        groups = []
        while (deadline := self.next_deadline_us()) is not None and deadline <= self._clock_us:
            groups.append(self._close(heapq.heappop(self._deadlines)[1], CloseReason.DEADLINE))
        return groups

    def _close(self, group_id: str, reason: CloseReason) -> Group:
        group = self._open.pop(group_id)
        record = self._record(group_id, group, reason)
        self._mark_done(group_id, DoneGroup(self._partition, self._clock_us, set(group.members)))
        self._changed.add(group_id)
        return record

    def _forget_expired(self) -> None:
        while self._expiries and self._expiries[0][0] <= self._clock_us:
            _, group_id = heapq.heappop(self._expiries)
            del self._done[group_id]
            self._changed.discard(group_id)
            self._forgotten[group_id] = None

    def _record(self, group_id: str, group: OpenGroup, reason: CloseReason) -> Group:
        members = [group.members[name] for name in sorted(group.members)]
        rewards = _rewards(group_id, members, self._rules.shuffle_rewards)
        mean = _mean(rewards, self._rules.min_completed)
        times = [member.timestamp_us for member in members]
        header = group.header
        return Group(
            group_id=group_id,
            task_id=header.task_id,
            run_id=header.run_id,
            environment=header.environment,
            mode=header.mode,
            closed_by=reason,
            expected_size=header.group_size,
            members=[_reference(m, group.partition, r, mean) for m, r in zip(members, rewards, strict=True)],
            mean_reward=mean,
            opened_at=min(times),
            closed_at=self._clock_us if reason is CloseReason.DEADLINE else max(times),
            rewards_shuffled=self._rules.shuffle_rewards,
        )


def broken_contract(key: bytes | None, rollout: Rollout) -> str:
    """Why a rollout cannot be assembled; empty when it can. `key` is the record's key."""
    if key != rollout.group_id.encode():
        return f"the key {key!r} is not the group_id {rollout.group_id!r}"
    if not rollout.group_id or not rollout.rollout_id or rollout.group_id.startswith(group_state.HEAD_KEY):
        return f"group_id {rollout.group_id!r} or rollout_id {rollout.rollout_id!r} is no identifier"
    if not 0 <= rollout.index < rollout.group_size:
        return f"index {rollout.index} is outside a group of {rollout.group_size}"
    return _broken_reward(rollout)


def _broken_reward(rollout: Rollout) -> str:
    if rollout.status is RolloutStatus.FAILED:
        return "" if rollout.reward is None else "a failed rollout has a reward; a failure is never a reward"
    # Written so that a NaN fails as well.
    if rollout.reward is None or not abs(rollout.reward) <= REWARD_LIMIT:
        return f"a completed rollout needs a reward within ±{REWARD_LIMIT:g}, not {rollout.reward}"
    return ""


def _disagreement(group: OpenGroup, header: GroupHeader, rollout: Rollout) -> str:
    if header != group.header:
        return f"it disagrees with the earlier rollouts of its group: {header} against {group.header}"
    holders = [m.rollout_id for m in group.members.values() if m.index == rollout.index]
    if holders:
        return f"index {rollout.index} of the group is taken by rollout {holders[0]!r}"
    return ""


def _member(located: ConsumedRecord, rollout: Rollout) -> Member:
    return Member(
        rollout_id=rollout.rollout_id,
        index=rollout.index,
        offset=located.offset,
        timestamp_us=located.timestamp_ms * 1_000,
        status=rollout.status,
        reward=rollout.reward,
        success=rollout.success,
        sampled_tokens=rollout.sampled_tokens,
        version_min=rollout.version_min,
        version_max=rollout.version_max,
    )


def _rewards(group_id: str, members: Sequence[Member], shuffle: bool) -> list[float | None]:
    """The members' rewards, in their order; None where a member failed. Shuffled among the completed on request."""
    if not shuffle:
        return [member.reward for member in members]
    completed = [member.reward for member in members if member.reward is not None]
    random.Random(group_id).shuffle(completed)
    drawn = iter(completed)
    return [None if member.reward is None else next(drawn) for member in members]


def _mean(rewards: Sequence[float | None], min_completed: int) -> float | None:
    completed = [reward for reward in rewards if reward is not None]
    return math.fsum(completed) / len(completed) if len(completed) >= min_completed else None


def _reference(member: Member, partition: int, reward: float | None, mean: float | None) -> GroupMember:
    return GroupMember(
        rollout_id=member.rollout_id,
        topic=Topic.ROLLOUTS.value,
        partition=partition,
        offset=member.offset,
        status=member.status,
        reward=reward,
        advantage=None if reward is None or mean is None else reward - mean,
        success=member.success,
        sampled_tokens=member.sampled_tokens,
        version_min=member.version_min,
        version_max=member.version_max,
    )
