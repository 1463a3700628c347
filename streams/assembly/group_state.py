"""What group assembly remembers, and its bytes: open groups, closed groups, and how far a partition was decided.

Each value is one kind byte and an Avro body, and names the partition that it belongs to. Invariant: `decode` of
`encode` is the same state, and bytes that are not a state raise `StateError`.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field, fields
from typing import Any

import cattrs
import fastavro

from tidemill.schemas.records import Mode, Rollout, RolloutStatus

HEAD_KEY = "\x00head/"


class StateError(ValueError):
    """Bytes of the state topic that are no state of this version."""


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Member:
    """What is kept of one rollout of an open group: where it lies, and what the group record says of it."""

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


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group that waits for members."""

    partition: int
    header: GroupHeader
    members: dict[str, Member] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DoneGroup:
    """The marker of a closed group: who is accounted for, and the partition's clock when it closed."""

    partition: int
    closed_clock_us: int
    rollout_ids: set[str]


@dataclass(frozen=True, slots=True)
class Head:
    """How far a partition was decided: everything up to `offset` is in the state, at event time `clock_us`."""

    partition: int
    offset: int
    clock_us: int


State = OpenGroup | DoneGroup | Head


def _schema(name: str, *fields: tuple[str, Any]) -> Any:  # noqa: ANN401 - a parsed Avro schema
    document = {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields]}
    return fastavro.parse_schema(document)


_HEADER = {
    "type": "record",
    "name": "GroupHeader",
    "fields": [
        {"name": name, "type": kind}
        for name, kind in (
            ("task_id", "string"),
            ("run_id", "string"),
            ("environment", "string"),
            ("mode", "string"),
            ("group_size", "long"),
            ("deadline_at", "long"),
        )
    ],
}
_MEMBER = {
    "type": "record",
    "name": "Member",
    "fields": [
        {"name": name, "type": kind}
        for name, kind in (
            ("rollout_id", "string"),
            ("index", "long"),
            ("offset", "long"),
            ("timestamp_us", "long"),
            ("status", "string"),
            ("reward", ["null", "double"]),
            ("success", ["null", "boolean"]),
            ("sampled_tokens", "long"),
            ("version_min", "long"),
            ("version_max", "long"),
        )
    ],
}
_STRINGS = {"type": "array", "items": "string"}
_OPEN = _schema(
    "OpenGroup", ("partition", "long"), ("header", _HEADER), ("members", {"type": "array", "items": _MEMBER})
)
_DONE = _schema("DoneGroup", ("partition", "long"), ("closed_clock_us", "long"), ("rollout_ids", _STRINGS))
_HEAD = _schema("Head", ("partition", "long"), ("offset", "long"), ("clock_us", "long"))
_KINDS: dict[bytes, Any] = {b"o": _OPEN, b"d": _DONE, b"h": _HEAD}
_CONVERTER = cattrs.Converter()
_HEADER_FIELDS = tuple(f.name for f in fields(GroupHeader))
_MEMBER_FIELDS = tuple(f.name for f in fields(Member))


def head_key(partition: int) -> str:
    """Key of a partition's head; no group id begins with its first character."""
    return f"{HEAD_KEY}{partition}"


def encode(state: State) -> bytes:
    """The bytes of a state."""
    match state:
        case OpenGroup():
            members = [_flat(state.members[name], _MEMBER_FIELDS) for name in sorted(state.members)]
            header = _flat(state.header, _HEADER_FIELDS)
            return _write(b"o", {"partition": state.partition, "header": header, "members": members})
        case DoneGroup():
            body = {"partition": state.partition, "closed_clock_us": state.closed_clock_us}
            return _write(b"d", {**body, "rollout_ids": sorted(state.rollout_ids)})
        case Head():
            return _write(b"h", {"partition": state.partition, "offset": state.offset, "clock_us": state.clock_us})


def _flat(record: GroupHeader | Member, names: tuple[str, ...]) -> dict[str, Any]:
    # dataclasses.asdict copies deeply and costs ten times as much; this runs once a record.
    return {name: getattr(record, name) for name in names}


def _write(kind: bytes, body: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    buffer.write(kind)
    fastavro.schemaless_writer(buffer, _KINDS[kind], body)
    return buffer.getvalue()


def decode(data: bytes) -> State:
    """The state of `encode`d bytes. Raises StateError."""
    schema = _KINDS.get(data[:1])
    if schema is None:
        raise StateError(f"a state begins with one of {sorted(_KINDS)}, not {data[:1]!r}")
    try:
        body = fastavro.schemaless_reader(io.BytesIO(data[1:]), schema, None)
        return _structure(data[:1], body)
    except Exception as error:  # hostile bytes raise whatever fastavro trips over; one clear error leaves
        raise StateError(f"unreadable state: {type(error).__name__}: {error}") from error


def _structure(kind: bytes, body: Any) -> State:  # noqa: ANN401 - fastavro's answer
    if kind == b"h":
        return _CONVERTER.structure(body, Head)
    if kind == b"d":
        return DoneGroup(body["partition"], body["closed_clock_us"], set(body["rollout_ids"]))
    members = {m["rollout_id"]: _CONVERTER.structure(m, Member) for m in body["members"]}
    return OpenGroup(body["partition"], _CONVERTER.structure(body["header"], GroupHeader), members)
