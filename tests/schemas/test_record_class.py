"""A record class behaves as a dataclass."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import field
from typing import ClassVar

import pytest

from tidemill.schemas.record_class import record
from tidemill.schemas.records import Tick


@record(frozen=True, slots=True)
class FrozenPart:
    """A frozen one."""

    name: str
    size: int = 1


@record(slots=True)
class OpenWhole:
    """One that changes."""

    parts: list[FrozenPart] = field(default_factory=list)
    kind: ClassVar[str] = "whole"

    @property
    def size(self) -> int:
        """Of all parts."""
        return sum(part.size for part in self.parts)


def test_it_is_a_dataclass():
    whole = OpenWhole([FrozenPart("a"), FrozenPart("b", 2)])
    assert [each.name for each in dataclasses.fields(FrozenPart)] == ["name", "size"]
    assert dataclasses.asdict(whole) == {"parts": [{"name": "a", "size": 1}, {"name": "b", "size": 2}]}
    assert dataclasses.replace(whole.parts[1], name="c") == FrozenPart("c", 2) != FrozenPart("c")
    assert hash(FrozenPart("a")) == hash(FrozenPart("a", 1)) and repr(FrozenPart("a")) == "FrozenPart(name='a', size=1)"
    assert (whole.size, OpenWhole.kind, OpenWhole.__doc__) == (3, "whole", "One that changes.")
    match whole.parts[0]:
        case FrozenPart(name, size=1):
            assert name == "a"


def test_a_default_is_made_for_each():
    first, second = OpenWhole(), OpenWhole()
    first.parts.append(FrozenPart("a"))
    assert second.parts == []


def test_only_a_frozen_one_refuses_changes():
    with pytest.raises(AttributeError):
        FrozenPart("a").name = "b"  # type: ignore[misc]
    whole = OpenWhole()
    whole.parts = [FrozenPart("a")]
    assert whole.size == 1
    with pytest.raises(AttributeError):
        whole.other = 1  # type: ignore[attr-defined]


def test_it_is_copied_and_pickled():
    tick = Tick("w", 5)
    assert copy.deepcopy(tick) == copy.copy(tick) == pickle.loads(pickle.dumps(tick)) == tick


def test_options_that_it_does_not_have_are_refused():
    with pytest.raises(TypeError, match="hidden"):

        @record(slots=True)
        class Refused:
            hidden: int = field(default=0, repr=False)

    with pytest.raises(TypeError, match="Derived: a record has no base class"):

        @record(frozen=True, slots=True)
        class Derived(FrozenPart):
            more: int = 0
