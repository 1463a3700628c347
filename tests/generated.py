"""Hypothesis strategies for record classes: any value of each field's type."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from tidemill.schemas.avro_code import write_long

LONG = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
PLAIN = {
    int: LONG,
    str: TEXT,
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=40),
}


Own = Callable[[str, Any], st.SearchStrategy | None]
"""Returns a strategy for a field's name and type, or None for the usual one."""
KEY, VALUE = "a map's key", "a map's value"
"""The names by which `Own` is asked for the strategies of a map."""


def values_of(hint: Any, own: Own = lambda _name, _hint: None, name: str = "") -> st.SearchStrategy:
    """Return a strategy for values of a type; `name` is that of a field with this type."""
    if (chosen := own(name, hint)) is not None:
        return chosen
    origin, parts = get_origin(hint), get_args(hint)
    if origin is types.UnionType:
        return st.none() | values_of(parts[0], own, name)
    if origin in (list, tuple):
        return st.lists(values_of(parts[0], own), max_size=3).map(origin)
    if origin in (dict, Mapping):
        return st.dictionaries(values_of(str, own, KEY), values_of(parts[1], own, VALUE), max_size=3)
    if issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    return records_of(hint, own) if is_dataclass(hint) else PLAIN[hint]


def records_of(kind: type, own: Own = lambda _name, _hint: None) -> st.SearchStrategy:
    """Return a strategy for records of a class."""
    hints = get_type_hints(kind)
    return st.builds(kind, **{each.name: values_of(hints[each.name], own, each.name) for each in fields(kind)})


def damaged(data: st.DataObject, body: bytes) -> bytes:
    """Replace up to three consecutive bytes of `body` by an Avro long or by other bytes."""
    place = data.draw(st.integers(0, len(body) - 1))
    put = data.draw(st.binary(max_size=3) | (LONG | st.integers(-2, 130)).map(write_long))
    return body[:place] + put + body[place + data.draw(st.integers(0, 3)) :]
