"""The entries of group assembly and their bytes: open groups, closed groups, and how far a partition is decided.

Each entry is one kind byte and an Avro body. Invariant: `decode` of `encode` is the same entry, and bytes that are none
raise `StateError`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import fastavro
import msgspec

from tidemill.schemas.records import Mode, Rollout, RolloutStatus
from tidemill.streams.state import StateError, read_avro, record_schema, write_avro


class GroupHeader(NamedTuple):
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


@dataclass(slots=True)
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
    packed: bytes = field(default=b"", compare=False, repr=False)
    """Its bytes, once they were made: a group is written again with each of its members."""


@dataclass(slots=True)
class OpenGroup:
    """A group that waits for members."""

    key: str
    """Its group_id."""
    partition: int
    header: GroupHeader
    members: dict[str, Member] = field(default_factory=dict)
    packed: bytes = field(default=b"", compare=False, repr=False)
    """The bytes of partition and header, once they were made."""
    awaited: ClassVar[bool] = True
    """Its group record follows."""

    @property
    def due_at(self) -> int:
        """It closes at its deadline."""
        return self.header.deadline_at


@dataclass(slots=True)
class DoneGroup:
    """The marker of a closed group: its rollouts, and the partition's clock when it closed."""

    key: str
    """Its group_id."""
    partition: int
    closed_clock_us: int
    rollout_ids: set[str]
    ttl_us: int
    """A setting, and not written."""
    awaited: ClassVar[bool] = False
    """It is only forgotten when it falls due."""

    @property
    def due_at(self) -> int:
        """When it is forgotten."""
        return self.closed_clock_us + self.ttl_us


@dataclass(frozen=True, slots=True)
class AssemblyHead:
    """How far a partition was decided: everything up to `offset` is in the state, at event time `clock_us`."""

    partition: int
    offset: int
    clock_us: int


_HEADER = record_schema(
    "GroupHeader",
    task_id="string",
    run_id="string",
    environment="string",
    mode="string",
    group_size="long",
    deadline_at="long",
)
_MEMBER = record_schema(
    "Member",
    rollout_id="string",
    index="long",
    offset="long",
    timestamp_us="long",
    status="string",
    reward=["null", "double"],
    success=["null", "boolean"],
    sampled_tokens="long",
    version_min="long",
    version_max="long",
)
_OPEN: Any = fastavro.parse_schema(
    record_schema("OpenGroup", partition="long", header=_HEADER, members={"type": "array", "items": _MEMBER})
)
_BEGIN: Any = fastavro.parse_schema(record_schema("OpenGroup", partition="long", header=_HEADER))
_ONE: Any = fastavro.parse_schema(_MEMBER)
_COUNT: Any = fastavro.parse_schema(record_schema("Count", count="long"))
_END_OF_ARRAY = b"\0"
_DONE: Any = fastavro.parse_schema(
    record_schema(
        "DoneGroup", partition="long", closed_clock_us="long", rollout_ids={"type": "array", "items": "string"}
    )
)
_HEAD: Any = fastavro.parse_schema(record_schema("Head", partition="long", offset="long", clock_us="long"))


def encode(entry: OpenGroup | DoneGroup) -> bytes:
    """The bytes of an entry."""
    match entry:
        case OpenGroup():
            if not entry.packed:
                begin = {"partition": entry.partition, "header": entry.header._asdict()}
                entry.packed = b"o" + write_avro(_BEGIN, begin)
            members = [entry.members[name] for name in sorted(entry.members)]
            for member in members:
                if not member.packed:
                    member.packed = write_avro(_ONE, member)
            # An Avro array of one block, which `_OPEN` reads.
            count = write_avro(_COUNT, {"count": len(members)}) if members else b""
            return b"".join((entry.packed, count, *(member.packed for member in members), _END_OF_ARRAY))
        case DoneGroup():
            body = {"partition": entry.partition, "closed_clock_us": entry.closed_clock_us}
            return b"d" + write_avro(_DONE, {**body, "rollout_ids": sorted(entry.rollout_ids)})


def decode(key: str, data: bytes, ttl_us: int) -> OpenGroup | DoneGroup:
    """The entry of `encode`d bytes; `ttl_us` is how long a closed group is remembered. Raises StateError."""
    try:
        match data[:1]:
            case b"o":
                body = read_avro(_OPEN, data[1:])
                members = {m["rollout_id"]: msgspec.convert(m, Member) for m in body["members"]}
                header = body["header"]
                header["mode"] = Mode(header["mode"])
                return OpenGroup(key, body["partition"], GroupHeader(**header), members)
            case b"d":
                body = read_avro(_DONE, data[1:])
                return DoneGroup(key, body["partition"], body["closed_clock_us"], set(body["rollout_ids"]), ttl_us)
    except StateError:
        raise
    except (msgspec.ValidationError, ValueError) as error:  # an unknown mode is a ValueError
        raise StateError(f"unreadable group: {type(error).__name__}: {error}") from error
    raise StateError(f"a group begins with b'o' or b'd', not {data[:1]!r}")


def encode_head(head: AssemblyHead) -> bytes:
    """The bytes of a head."""
    return write_avro(_HEAD, head)


def decode_head(data: bytes) -> AssemblyHead:
    """The head of `encode_head`'s bytes. Raises StateError."""
    return AssemblyHead(**read_avro(_HEAD, data))
