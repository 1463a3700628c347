"""What a comparison tells a person, and a script."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tidemill.consumers.operate.replay.differences import Difference, DifferenceKind, OutputComparison

SHOWN_FIELDS = 12


def comparison_lines(found: OutputComparison, there: str, here: str, show: int) -> list[str]:
    """Counts, then the first record that differs with its fields, then the next ones by name.

    `there` and `here` name the sides; `show` is how many records are named.
    """
    lines = [f"identical: {found.identical} of {found.total}"]
    counts = {
        "changed": found.count(DifferenceKind.CHANGED),
        f"only in {there}": found.count(DifferenceKind.ONLY_THERE),
        f"only in {here}": found.count(DifferenceKind.ONLY_HERE),
    }
    told = [f"{what}: {number}" for what, number in counts.items() if number]
    if told:
        lines.append(", ".join(told))
    repeated = {there: found.repeated_there, here: found.repeated_here}
    lines += [f"repeated in {side}, byte for byte: {number}" for side, number in repeated.items() if number]
    for number, difference in enumerate(found.differences[:show]):
        label = "first difference" if number == 0 else "then"
        lines.append(f"{label}: {_what(difference, there, here)}")
        if number == 0:
            lines += field_lines(difference)
    return lines


def field_lines(difference: Difference) -> list[str]:
    """One line a field that differs."""
    shown = [f"  {field.path}: {field.there} -> {field.here}" for field in difference.fields[:SHOWN_FIELDS]]
    more = len(difference.fields) - len(shown)
    return [*shown, *([f"  and {more} more fields"] if more > 0 else [])]


def _what(difference: Difference, there: str, here: str) -> str:
    match difference.kind:
        case DifferenceKind.CHANGED:
            equal = "" if difference.fields else ", equal in every field: written with another schema"
            return f"{difference.name} changed, {there} {difference.there}, {here} {difference.here}{equal}"
        case DifferenceKind.ONLY_THERE:
            return f"{difference.name} is only in {there}, {difference.there}"
        case DifferenceKind.ONLY_HERE:
            return f"{difference.name} is only in {here}, {difference.here}"


def comparison_document(found: OutputComparison, show: int) -> dict[str, Any]:
    """A comparison as JSON values, with the first `show` differences."""
    return {
        "there": found.there,
        "here": found.here,
        "identical": found.identical,
        "total": found.total,
        **{kind.value: found.count(kind) for kind in DifferenceKind},
        "repeated_there": found.repeated_there,
        "repeated_here": found.repeated_here,
        "first": None if found.first is None else asdict(found.first),
        "differences": [asdict(difference) for difference in found.differences[:show]],
    }
