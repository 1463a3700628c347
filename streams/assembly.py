"""Group assembly as a pure state machine: rollouts and ticks of one partition in, groups and rejections out.

Invariants:

- the outcome is a function of the partition's log prefix alone: no wall clock, no randomness except group ids as seeds;
- a group closes once, by size or by event-time deadline; a later record is a duplicate or late, and a group has no more
  rollouts than its size, late ones included;
- members are a set keyed by rollout_id, so that a record delivered twice changes nothing;
- entries that are newer than their head give the same outputs: older versions wrote such states.

The state has open groups, closed groups, and the decided position of the partition. Each entry is one kind byte and an
Avro body. A group is written again for each new rollout; therefore the bytes of its members are cached.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from tidemill.schemas.avro_code import write_long
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import to_us
from tidemill.schemas.log.client_settings import MAX_RECORD_BYTES
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.record_class import record
from tidemill.schemas.records import MOST_REWARD, CloseReason, Group, GroupMember, Mode, Rollout, RolloutStatus, Tick
from tidemill.streams.config import StreamSettings
from tidemill.streams.machine import OneTopicMachine, OutputRecord
from tidemill.streams.state import NO_IDENTIFIER, EntryBytes, MachineState, StateBytes, StateError, TimedEntries

MEMBER_BYTES = 64
"""Most bytes of a member of a group, without its rollout_id."""


@record(frozen=True, slots=True)
class GroupHeader:
    """The fields in which all rollouts of a group must agree."""

    task_id: str
    run_id: str
    environment: str
    mode: Mode
    group_size: int
    deadline_at: int

    @classmethod
    def of(cls, rollout: Rollout) -> GroupHeader:
        return cls(
            rollout.task_id, rollout.run_id, rollout.environment, rollout.mode, rollout.group_size, rollout.deadline_at
        )


@record(frozen=True, slots=True)
class Member:
    """One rollout of an open group: its position, and its entry in the group record."""

    rollout_id: str
    index: int
    offset: int
    timestamp_us: int
    status: RolloutStatus
    reward: float | None
    success: bool | None
    sampled_tokens: int
    version_min: int
    version_max: int


@dataclass(slots=True)
class OpenGroup:
    """A group that waits for members."""

    key: str
    """Its group_id."""
    partition: int
    header: GroupHeader
    members: dict[str, Member] = field(default_factory=dict)
    packed: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False)
    """Cached bytes of its members."""
    begun: bytes = field(default=b"", compare=False, repr=False)
    """Cached bytes that precede those of its members."""

    @property
    def due_at(self) -> int:
        """Deadline, at which the group closes."""
        return self.header.deadline_at


@record(slots=True)
class DoneGroup:
    """The marker of a closed group: its rollouts, and the partition's clock when it closed."""

    key: str
    """Its group_id."""
    partition: int
    closed_clock_us: int
    rollout_ids: set[str]
    ttl_us: int
    """A setting; not written to the state."""

    @property
    def due_at(self) -> int:
        """Event time, microseconds, at which the marker is deleted."""
        return self.closed_clock_us + self.ttl_us


Entry = OpenGroup | DoneGroup


@record(slots=True)
class AssemblyHead:
    """Position up to which a partition is decided: the state includes all records up to `offset`, at `clock_us`."""

    partition: int
    offset: int = -1
    clock_us: int = 0


@record(frozen=True, slots=True)
class _OpenBytes:
    partition: int
    header: GroupHeader
    members: list[Member]


@record(frozen=True, slots=True)
class _DoneBytes:
    partition: int
    closed_clock_us: int
    rollout_ids: list[str]


_END = write_long(0)
"""The end of an Avro array."""
_MEMBER, _OPEN, _DONE = StateBytes(Member), StateBytes(_OpenBytes), StateBytes(_DoneBytes)


class GroupBytes(EntryBytes[Entry, AssemblyHead]):
    """The bytes of group assembly's entries.

    Args:
        ttl_us: how long a closed group is remembered, microseconds.
    """

    def __init__(self, ttl_us: int) -> None:
        super().__init__({}, AssemblyHead)
        self._ttl_us = ttl_us

    def encode(self, entry: Entry) -> bytes:
        if isinstance(entry, DoneGroup):
            return _DONE.write(_DoneBytes(entry.partition, entry.closed_clock_us, sorted(entry.rollout_ids)), b"d")
        packed = entry.packed
        for name in entry.members.keys() - packed.keys():
            packed[name] = _MEMBER.write(entry.members[name])
        # The members are an Avro array: one block with their count, then the end.
        entry.begun = entry.begun or _OPEN.write(_OpenBytes(entry.partition, entry.header, []), b"o").removesuffix(_END)
        count = write_long(len(packed)) if packed else b""
        return b"".join((entry.begun, count, *(packed[name] for name in sorted(packed)), _END))

    def decode(self, key: str, data: bytes) -> Entry:
        """Return the entry of `encode`d bytes. Raises StateError."""
        match data[:1]:
            case b"o":
                group = _OPEN.read(data, 1)
                return OpenGroup(key, group.partition, group.header, {m.rollout_id: m for m in group.members})
            case b"d":
                done = _DONE.read(data, 1)
                return DoneGroup(key, done.partition, done.closed_clock_us, set(done.rollout_ids), self._ttl_us)
            case kind:
                raise StateError(f"a group begins with b'o' or b'd', not {kind!r}")


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
                # Otherwise the marker would grow with each record, and at last would not fit into one.
                if len(group.rollout_ids) >= rollout.group_size:
                    return f"its group is closed and has {len(group.rollout_ids)} rollouts already"
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
        closed = Group(
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
        self._outputs.append(OutputRecord(Topic.GROUPS, closed.group_id, closed, self._partition))


def broken_contract(key: bytes | None, rollout: Rollout) -> str:
    """Return why a rollout cannot be assembled; empty if it can. `key` is the record's key."""
    if key != rollout.group_id.encode():
        return f"the key {key!r} is not the group_id {rollout.group_id!r}"
    if not rollout.group_id or not rollout.rollout_id or rollout.group_id.startswith(NO_IDENTIFIER):
        return f"group_id {rollout.group_id!r} or rollout_id {rollout.rollout_id!r} is not an identifier"
    if not 0 <= rollout.index < rollout.group_size:
        return f"index {rollout.index} is outside a group of {rollout.group_size}"
    named = f"{rollout.group_id}{rollout.task_id}{rollout.run_id}{rollout.environment}"
    n_bytes = len(named.encode()) + rollout.group_size * (MEMBER_BYTES + len(rollout.rollout_id.encode()))
    if n_bytes > MAX_RECORD_BYTES // 2:
        return f"a group of {rollout.group_size} rollouts with identifiers of this length does not fit into a record"
    if rollout.status is RolloutStatus.FAILED:
        return "" if rollout.reward is None else "a failed rollout has a reward; a failure is never a reward"
    # This form of the comparison rejects NaN too.
    if rollout.reward is None or not abs(rollout.reward) <= MOST_REWARD:
        return f"a completed rollout needs a reward within ±{MOST_REWARD:g}, not {rollout.reward}"
    return ""
