"""Group assembly as a pure state machine: rollouts and ticks of one partition in, groups and rejections out.

Invariants:

- the outcome is a function of the partition's log prefix alone: no wall clock, no randomness except group ids as seeds;
- a group closes once, by size or by event-time deadline; a later record is a duplicate or late;
- members are a set keyed by rollout_id, so that a record delivered twice changes nothing;
- entries that are newer than their head give the same outputs: older versions wrote such states.
"""

from __future__ import annotations

import math
import random

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import to_us
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import CloseReason, Group, GroupMember, Rollout, RolloutStatus, Tick
from tidemill.streams.assembly.group_state import (
    AssemblyHead,
    DoneGroup,
    Entry,
    GroupBytes,
    GroupHeader,
    Member,
    OpenGroup,
)
from tidemill.streams.config import StreamSettings
from tidemill.streams.machine import OneTopicMachine, OutputRecord
from tidemill.streams.state import NO_IDENTIFIER, MachineState, TimedEntries

REWARD_LIMIT = 1e15
"""Rewards beyond this limit are invalid: their sums would overflow or lose every smaller reward of the group."""


class GroupAssembler(OneTopicMachine[Entry, AssemblyHead]):
    """The state machine for the groups of one partition of the rollouts topic."""

    def __init__(
        self, partition: int, run_id: str, settings: StreamSettings, state: MachineState | None = None
    ) -> None:
        """Raises StateError."""
        self._partition, self._run_id, self._settings = partition, run_id, settings
        self._done_ttl_us = to_us(settings.done_ttl_s)
        store = TimedEntries(state, GroupBytes(self._done_ttl_us), lambda entry: isinstance(entry, OpenGroup))
        super().__init__(store, AssemblyHead(partition))

    def decide(self, located: ConsumedRecord) -> str:
        match located.record:
            case Rollout() as rollout:
                problem = broken_contract(located.key, rollout)
                return self._admit(located, rollout) if not problem and rollout.run_id == self._run_id else problem
            case Tick():
                return ""
            case None:
                return located.error
            case other:
                return f"{type(other).__name__} is not a record of this topic"

    def fall_due(self) -> None:
        """Close the groups whose deadline has passed; delete those that closed more than `done_ttl_s` ago."""
        for entry in self._store.due(self._head.clock_us):
            if isinstance(entry, OpenGroup):
                self._close(entry, CloseReason.DEADLINE)
            else:
                self._store.forget(entry)

    def _admit(self, located: ConsumedRecord, rollout: Rollout) -> str:
        """Add a rollout to its group. Return the reason if that is impossible, otherwise an empty string."""
        name, group = rollout.rollout_id, self._store.get(rollout.group_id)
        member = Member(
            rollout_id=name,
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
        header = GroupHeader.of(rollout)
        if isinstance(group, DoneGroup):
            if name not in group.rollout_ids:
                group.rollout_ids.add(name)
                self._store.save(group)
                self._emit(OpenGroup(group.key, self._partition, header, {name: member}), CloseReason.LATE)
            return ""
        if group is None:
            group = OpenGroup(rollout.group_id, self._partition, header)
        elif name in group.members:
            return ""
        elif header != group.header:
            return f"its header {header} differs from that of the earlier rollouts of its group, {group.header}"
        for other in group.members.values():
            if other.index == rollout.index:
                return f"index {rollout.index} of the group is taken by rollout {other.rollout_id!r}"
        group.members[name] = member
        if len(group.members) == header.group_size:
            self._close(group, CloseReason.SIZE)
        else:
            self._store.save(group)
            # A group that opens after its deadline closes at once.
            self.fall_due()
        return ""

    def _close(self, group: OpenGroup, reason: CloseReason) -> None:
        done = DoneGroup(group.key, self._partition, self._head.clock_us, set(group.members), self._done_ttl_us)
        self._store.save(done)
        self._emit(group, reason)

    def _emit(self, group: OpenGroup, reason: CloseReason) -> None:
        members = [group.members[name] for name in sorted(group.members)]
        completed = [member.reward for member in members if member.reward is not None]
        mean = math.fsum(completed) / len(completed) if len(completed) >= self._settings.min_completed else None
        if self._settings.shuffle_rewards:
            random.Random(group.key).shuffle(completed)
        drawn = iter(completed)
        rewards = [None if member.reward is None else next(drawn) for member in members]
        times = [member.timestamp_us for member in members]
        header = group.header
        record = Group(
            group_id=group.key,
            task_id=header.task_id,
            run_id=header.run_id,
            environment=header.environment,
            mode=header.mode,
            closed_by=reason,
            expected_size=header.group_size,
            members=[
                GroupMember(
                    rollout_id=member.rollout_id,
                    topic=Topic.ROLLOUTS.value,
                    partition=group.partition,
                    offset=member.offset,
                    status=member.status,
                    reward=reward,
                    advantage=None if reward is None or mean is None else reward - mean,
                    success=member.success,
                    sampled_tokens=member.sampled_tokens,
                    version_min=member.version_min,
                    version_max=member.version_max,
                )
                for member, reward in zip(members, rewards, strict=True)
            ],
            mean_reward=mean,
            opened_at=min(times),
            closed_at=self._head.clock_us if reason is CloseReason.DEADLINE else max(times),
            rewards_shuffled=self._settings.shuffle_rewards,
        )
        # A group is written to the partition with the number of its rollouts' partition.
        self._outputs.append(OutputRecord(Topic.GROUPS, record.group_id, record, self._partition))


def broken_contract(key: bytes | None, rollout: Rollout) -> str:
    """Return why a rollout cannot be assembled; empty if it can. `key` is the record's key."""
    if key != rollout.group_id.encode():
        return f"the key {key!r} is not the group_id {rollout.group_id!r}"
    if not rollout.group_id or not rollout.rollout_id or rollout.group_id.startswith(NO_IDENTIFIER):
        return f"group_id {rollout.group_id!r} or rollout_id {rollout.rollout_id!r} is not an identifier"
    if not 0 <= rollout.index < rollout.group_size:
        return f"index {rollout.index} is outside a group of {rollout.group_size}"
    if rollout.status is RolloutStatus.FAILED:
        return "" if rollout.reward is None else "a failed rollout has a reward; a failure is never a reward"
    # This form of the comparison rejects NaN too.
    if rollout.reward is None or not abs(rollout.reward) <= REWARD_LIMIT:
        return f"a completed rollout needs a reward within ±{REWARD_LIMIT:g}, not {rollout.reward}"
    return ""
