"""The entries of group assembly and their bytes: open groups, closed groups, and how far a partition is decided.

Each entry is one kind byte and an Avro body. Invariant: `decode` of `encode` is the same entry, and bytes that are none
raise `StateError`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.schemas.avro_code import write_long
from tidemill.schemas.record_class import record
from tidemill.schemas.records import Mode, Rollout, RolloutStatus
from tidemill.streams.state import StateBytes, StateError


@record(frozen=True, slots=True)
class GroupHeader:
    """What every rollout of a group must agree on."""

    task_id: str
    run_id: str
    environment: str
    mode: Mode
    group_size: int
    deadline_at: int

    @classmethod
    def of(cls, rollout: Rollout) -> GroupHeader:
        """The header that a rollout carries."""
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
    """The bytes of its members, once they were made: a group is written again with each of them."""
    begun: bytes = field(default=b"", compare=False, repr=False)
    """The bytes before those of its members, once they were made."""

    @property
    def due_at(self) -> int:
        """It closes at its deadline."""
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
    """A setting, and not written."""

    @property
    def due_at(self) -> int:
        """When it is forgotten."""
        return self.closed_clock_us + self.ttl_us


@record(frozen=True, slots=True)
class AssemblyHead:
    """How far a partition was decided: everything up to `offset` is in the state, at event time `clock_us`."""

    partition: int
    offset: int
    clock_us: int


@record(frozen=True, slots=True)
class _BeginBytes:
    """The bytes of an open group begin with these; its members follow, as an Avro array of one block."""

    partition: int
    header: GroupHeader


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


_BEGIN, _MEMBER, _OPEN, _DONE = (
    StateBytes(_BeginBytes),
    StateBytes(Member),
    StateBytes(_OpenBytes),
    StateBytes(_DoneBytes),
)
_HEAD = StateBytes(AssemblyHead)
encode_head, decode_head = _HEAD.write, _HEAD.read


def encode(entry: OpenGroup | DoneGroup) -> bytes:
    """The bytes of an entry."""
    if isinstance(entry, DoneGroup):
        return _DONE.write(_DoneBytes(entry.partition, entry.closed_clock_us, sorted(entry.rollout_ids)), b"d")
    packed = entry.packed
    for name in entry.members.keys() - packed.keys():
        packed[name] = _MEMBER.write(entry.members[name])
    entry.begun = entry.begun or _BEGIN.write(_BeginBytes(entry.partition, entry.header), b"o")
    if not packed:
        return entry.begun + write_long(0)
    return b"".join((entry.begun, write_long(len(packed)), *(packed[name] for name in sorted(packed)), write_long(0)))


def decode(key: str, data: bytes, ttl_us: int) -> OpenGroup | DoneGroup:
    """The entry of `encode`d bytes; `ttl_us` is how long a closed group is remembered. Raises StateError."""
    match data[:1]:
        case b"o":
            group = _OPEN.read(data, 1)
            return OpenGroup(key, group.partition, group.header, {m.rollout_id: m for m in group.members})
        case b"d":
            done = _DONE.read(data, 1)
            return DoneGroup(key, done.partition, done.closed_clock_us, set(done.rollout_ids), ttl_us)
        case kind:
            raise StateError(f"a group begins with b'o' or b'd', not {kind!r}")
