"""The entries of group assembly and their bytes: open groups, closed groups, and the decided position of a partition.

Each entry is one kind byte and an Avro body. A group is written again for each new rollout; therefore the bytes of its
members are cached.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.schemas.avro_code import write_long
from tidemill.schemas.record_class import record
from tidemill.schemas.records import Mode, Rollout, RolloutStatus
from tidemill.streams.state import EntryBytes, StateBytes, StateError


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
        """Return the header of a rollout."""
        return cls(
            rollout.task_id,
            rollout.run_id,
            rollout.environment,
            rollout.mode,
            rollout.group_size,
            rollout.deadline_at,
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
        """Return the bytes of an entry."""
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
