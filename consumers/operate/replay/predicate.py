"""`--where`: an expression over a record and its place, in Python's syntax, evaluated without Python's reach.

Names: `record` with the fields of its schema, `kind` (the name of its schema), `topic`, `partition`, `offset`,
`timestamp` (ms), `key` and `headers`. What cannot be compared, such as the reward of a failed rollout with a number, is
no match, as NULL is in SQL; nor is a record that cannot be decoded or has no such field. A field that no record of the
chosen topics has is an error before anything is read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any

from simpleeval import AttributeDoesNotExist, EvalWithCompoundTypes, FeatureNotAvailable, InvalidExpression

from tidemill.consumers.operate.replay.raw import RawRecord, topic_of
from tidemill.schemas import records
from tidemill.schemas.catalogue import CATALOGUE
from tidemill.schemas.records import Record

FUNCTIONS = {"len": len, "abs": abs, "min": min, "max": max, "str": str, "float": float}
TEXT = frozenset({"startswith", "endswith", "lower", "upper"})
NAMES = frozenset({"record", "kind", "topic", "partition", "offset", "timestamp", "key", "headers"})
CONSTANTS = {"True": True, "False": False, "None": None}


class FilterError(ValueError):
    """An expression that cannot be used; the message says why."""


class Filter:
    """Decides about records by one expression.

    Args:
        expression: for instance `record.reward > 0.5 and record.mode == "train"`.
        topics: names of the topics that it is asked about.

    Raises:
        FilterError: it is no expression, uses what is not allowed, or names a field that no record there has.
    """

    def __init__(self, expression: str, topics: Iterable[str]) -> None:
        self._expression = expression
        self._parsed = _parsed(expression, _record_fields(topics))
        self._evaluator = EvalWithCompoundTypes(functions=dict(FUNCTIONS), allowed_attrs=_ALLOWED)

    def keeps(self, raw: RawRecord, record: Record | None) -> bool:
        """Whether the expression holds of a record, None where it cannot be read.

        Raises FilterError when it cannot be computed for it.
        """
        self._evaluator.names = CONSTANTS | _names(raw, record)
        try:
            return bool(self._evaluator.eval(self._expression, previously_parsed=self._parsed))
        except (AttributeDoesNotExist, FeatureNotAvailable, TypeError, LookupError):
            # What the expression may name was settled when it was parsed: here the record just has no such value.
            return False
        except (InvalidExpression, ArithmeticError, ValueError) as error:
            raise FilterError(f"--where {self._expression!r}: {error}, at {raw}") from error


def _names(raw: RawRecord, record: Record | None) -> dict[str, Any]:
    return {
        "record": record,
        "kind": None if record is None else type(record).__name__,
        "topic": raw.topic,
        "partition": raw.partition,
        "offset": raw.offset,
        "timestamp": raw.timestamp_ms,
        "key": _text(raw.key),
        "headers": {name: _text(value) for name, value in raw.headers},
    }


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _allowed() -> dict[type | None, Any]:
    found = [kind for kind in vars(records).values() if isinstance(kind, type)]
    allowed: dict[type | None, Any] = {kind: {f.name for f in fields(kind)} for kind in found if is_dataclass(kind)}
    texts: list[type] = [str, *(kind for kind in found if issubclass(kind, StrEnum))]
    return allowed | {kind: TEXT for kind in texts}


_ALLOWED = _allowed()
_ANY_FIELD = frozenset[str]().union(*_ALLOWED.values())


def _record_fields(topics: Iterable[str]) -> dict[str, list[str]]:
    """Fields of the records of some topics, each with the kinds that have it."""
    found: dict[str, list[str]] = {}
    for kind in dict.fromkeys(kind for name in topics for kind in CATALOGUE[topic_of(name)].values):
        for entry in fields(kind):
            found.setdefault(entry.name, []).append(kind.__name__)
    return found


def _parsed(expression: str, known: dict[str, list[str]]) -> ast.stmt:
    try:
        tree = ast.parse(expression.strip(), mode="exec")
    except (SyntaxError, ValueError) as error:
        raise FilterError(f"--where {expression!r} is no expression: {error}") from error
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Expr):
        raise FilterError(f"--where {expression!r}: give one expression, for instance record.reward > 0.5")
    for node in ast.walk(tree.body[0]):
        problem = _problem(node, known)
        if problem:
            raise FilterError(f"--where {expression!r}: {problem}")
    return tree.body[0]


def _problem(node: ast.AST, known: dict[str, list[str]]) -> str:
    """What is wrong with a part of an expression; empty when nothing is."""
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
