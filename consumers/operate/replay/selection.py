"""The operator's selection of records to replay, and the parsers of the command line's options.

Every condition narrows the selection: a record is replayed if it is in one of the topics, within the offsets and the
times, belongs to one of the steps, versions or groups if any are named, and matches the `--where` expression.

`--where` is an expression over a record and its position, in Python syntax, with only a few functions. Names:
`record` with the fields of its schema, `kind` (the name of its schema), `topic`, `partition`, `offset`, `timestamp`
(ms), `key` and `headers`. Values that cannot be compared, such as the reward of a failed rollout with a number, do not
match, as NULL in SQL; a record that cannot be decoded or has no such field does not match either. A field that no
record of the selected topics has is an error before anything is read.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from typing import Any

from simpleeval import AttributeDoesNotExist, EvalWithCompoundTypes, FeatureNotAvailable, InvalidExpression

from tidemill.consumers.operate.replay.records import READ_COMMITTED, RawRecord, topic_of
from tidemill.schemas import records
from tidemill.schemas.catalogue import CATALOGUE
from tidemill.schemas.records import Record


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets [start, end) of one partition of a topic, or of each; None means the partition's own bound."""

    topic: str
    partition: int | None
    start: int | None
    end: int | None


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Numbers first to last, both included."""

    first: int
    last: int

    def __contains__(self, number: int) -> bool:
        return self.first <= number <= self.last

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}..{self.last}"


@dataclass(frozen=True, slots=True)
class Selection:
    topics: tuple[str, ...] = ()
    """Without prefix, in the order of the catalogue. Empty: the topics that contain the steps, versions or groups."""
    from_ms: int | None = None
    to_ms: int | None = None
    """Record times [from, to), milliseconds since the Unix epoch."""
    offsets: tuple[OffsetRange, ...] = ()
    steps: tuple[NumberRange, ...] = ()
    versions: tuple[NumberRange, ...] = ()
    groups: tuple[str, ...] = ()
    where: str = ""
    run_id: str = ""
    """The run to which the steps and versions belong."""
    isolation: str = READ_COMMITTED

    def __post_init__(self) -> None:
        for name in (*self.topics, *(r.topic for r in self.offsets)):
            topic_of(name)
        if not (self.topics or self.offsets or self.names_records):
            raise ValueError("no records are selected: give --topic, --offsets, --step, --version or --group")
        if self.from_ms is not None and self.to_ms is not None and self.from_ms >= self.to_ms:
            raise ValueError(
                f"the range of times is empty: {utc_text(self.from_ms)} is not before {utc_text(self.to_ms)}"
            )

    @property
    def names_records(self) -> bool:
        """Whether it names steps, versions or groups."""
        return bool(self.steps or self.versions or self.groups)

    def in_times(self, timestamp_ms: int) -> bool:
        after = self.from_ms is None or timestamp_ms >= self.from_ms
        return after and (self.to_ms is None or timestamp_ms < self.to_ms)

    def ranges_of(self, topic: str, partition: int) -> list[OffsetRange]:
        """Return the ranges that apply to a partition; none if the topic is selected without offsets."""
        return [r for r in self.offsets if r.topic == topic and r.partition in (None, partition)]

    def within(self, topic: str, partition: int, offset: int) -> bool:
        """Whether an offset is in one of the ranges that apply to its partition, or no ranges apply."""
        ranges = self.ranges_of(topic, partition)
        return not ranges or any(
            (r.start is None or offset >= r.start) and (r.end is None or offset < r.end) for r in ranges
        )

    def digest(self, prefix: str) -> str:
        """Return the sha256 of the selection and the prefix: commands with equal selections have equal digests."""
        return hashlib.sha256(json.dumps([prefix, asdict(self)], sort_keys=True).encode()).hexdigest()


def offset_range(text: str) -> OffsetRange:
    """Parse an offset range: `rollouts/3=100:200` is [100, 200) of partition 3; `rollouts=100:` is every partition.

    Raises ValueError.
    """
    match = re.fullmatch(r"([^/=]+)(?:/(\d+))?=(\d*):(\d*)", text)
    if match is None:
        raise ValueError(f"--offsets {text!r}: expected TOPIC[/PARTITION]=FROM:TO, for instance rollouts/3=100:200")
    topic, partition, start, end = match.groups()
    topic_of(topic)
    found = OffsetRange(
        topic, int(partition) if partition else None, int(start) if start else None, int(end) if end else None
    )
    if found.start is not None and found.end is not None and found.start >= found.end:
        raise ValueError(f"--offsets {text!r}: the range is empty, its end is not included")
    return found


def span(text: str) -> NumberRange:
    """Parse `7`, `v7`, or `7..9` with both ends included. Raises ValueError."""
    match = re.fullmatch(r"v?(\d+)(?:\.\.v?(\d+))?", text)
    if match is None:
        raise ValueError(f"{text!r}: expected a number, or a range such as 7..9")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise ValueError(f"{text!r}: the range is empty")
    return NumberRange(first, last)


def utc_text(timestamp_ms: int) -> str:
    """Format a record's time as ISO 8601, UTC, in milliseconds; as their number if no date has it, since a record may
    have any time."""
    try:
        moment = datetime.fromtimestamp(timestamp_ms / 1_000, UTC)
    except (ValueError, OverflowError):
        return f"{timestamp_ms} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


FUNCTIONS = {"len": len, "abs": abs, "min": min, "max": max, "str": str, "float": float}
TEXT = frozenset({"startswith", "endswith", "lower", "upper"})
NAMES = frozenset({"record", "kind", "topic", "partition", "offset", "timestamp", "key", "headers"})
CONSTANTS = {"True": True, "False": False, "None": None}


class Filter:
    """Selects records by one expression.

    Args:
        expression: for example `record.reward > 0.5 and record.mode == "train"`.
        topics: names of the topics whose records it is applied to.

    Raises:
        ValueError: not an expression, a forbidden construct, or a field that no record of these topics has.
    """

    def __init__(self, expression: str, topics: Iterable[str]) -> None:
        self._expression = expression
        known = {entry.name for name in topics for kind in CATALOGUE[topic_of(name)].values for entry in fields(kind)}
        try:
            tree = ast.parse(expression.strip(), mode="exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"--where {expression!r} is no expression: {error}") from error
        if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Expr):
            raise ValueError(f"--where {expression!r}: give one expression, for instance record.reward > 0.5")
        self._parsed = tree.body[0]
        for node in ast.walk(self._parsed):
            problem = _problem(node, known)
            if problem:
                raise ValueError(f"--where {expression!r}: {problem}")
        self._evaluator = EvalWithCompoundTypes(functions=dict(FUNCTIONS), allowed_attrs=_ALLOWED)

    def keeps(self, raw: RawRecord, record: Record | None) -> bool:
        """Whether the expression is true for a record; `record` is None if it cannot be decoded.

        Raises ValueError if the expression cannot be computed for it.
        """
        self._evaluator.names = CONSTANTS | {
            "record": record,
            "kind": None if record is None else type(record).__name__,
            "topic": raw.topic,
            "partition": raw.partition,
            "offset": raw.offset,
            "timestamp": raw.timestamp_ms,
            "key": _text(raw.key),
            "headers": {name: _text(value) for name, value in raw.headers},
        }
        try:
            return bool(self._evaluator.eval(self._expression, previously_parsed=self._parsed))
        except (AttributeDoesNotExist, FeatureNotAvailable, TypeError, LookupError):
            # The names were checked when the expression was parsed: this record just has no such value.
            return False
        except (InvalidExpression, ArithmeticError, ValueError) as error:
            raise ValueError(f"--where {self._expression!r}: {error}, at {raw}") from error


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


_KINDS = [kind for kind in vars(records).values() if isinstance(kind, type)]
_ALLOWED: dict[type | None, Any] = {
    **{kind: {f.name for f in fields(kind)} for kind in _KINDS if is_dataclass(kind)},
    **{kind: TEXT for kind in (str, *_KINDS) if issubclass(kind, str)},
}
"""Fields that an expression may name, by the type of their owner."""
_ANY_FIELD = frozenset[str]().union(*_ALLOWED.values())


def _problem(node: ast.AST, known: set[str]) -> str:
    """Return the fault in a part of an expression; empty if there is none."""
    if isinstance(node, ast.Name) and node.id not in NAMES and node.id not in FUNCTIONS:
        return f"no name {node.id!r}; there are {', '.join(sorted(NAMES))}, and functions {', '.join(FUNCTIONS)}"
    if isinstance(node, ast.Attribute):
        of_record = isinstance(node.value, ast.Name) and node.value.id == "record"
        if of_record and node.attr not in known:
            return f"no record of these topics has a field {node.attr!r}; there are {', '.join(sorted(known))}"
        if node.attr not in _ANY_FIELD:
            return f"nothing has a field {node.attr!r}"
    if not isinstance(node, _PARTS):
        return f"{type(node).__name__} is not allowed"
    return ""


_PARTS = (
    ast.Expr, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.IfExp, ast.Call, ast.Attribute, ast.Subscript,
    ast.Slice, ast.List, ast.Tuple, ast.Name, ast.Constant, ast.Load, ast.boolop, ast.unaryop, ast.operator, ast.cmpop,
)  # fmt: skip
