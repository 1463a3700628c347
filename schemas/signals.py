"""Legal values of a signal, by its kind: one table, which the edge and the join both use.

A value is legal if it is one of a few numbers, or in an interval; it is never NaN or infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.schemas.records import SignalKind

LONGEST_LATENCY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class OneOf:
    """A finite set of legal values."""

    values: tuple[float, ...]

    def holds(self, value: float) -> bool:
        """Return whether a value is one of them."""
        return value in self.values

    def __str__(self) -> str:
        return " or ".join(f"{value:g}" for value in self.values)


@dataclass(frozen=True, slots=True)
class Between:
    """An interval of legal values that includes its ends, except the lower one if `above` is set."""

    low: float
    high: float
    above: bool = False

    def holds(self, value: float) -> bool:
        """Return whether a value is in the interval; NaN never is."""
        return (value > self.low if self.above else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        return f"{'above' if self.above else 'from'} {self.low:g} to {self.high:g}"


HAPPENED = OneOf((1.0,))
YES_OR_NO = OneOf((0.0, 1.0))
SHARE = Between(0.0, 1.0)

LEGAL: Mapping[SignalKind, OneOf | Between] = {
    SignalKind.THUMB: OneOf((1.0, -1.0)),
    SignalKind.EDIT_KEPT_SOON: SHARE,
    SignalKind.EDIT_KEPT_LATER: SHARE,
    SignalKind.RETRY: HAPPENED,
    SignalKind.UNDO: HAPPENED,
    SignalKind.ABANDONMENT: HAPPENED,
    SignalKind.SENTIMENT: Between(-1.0, 1.0),
    SignalKind.LATENCY: Between(0.0, LONGEST_LATENCY_S, above=True),
    SignalKind.TOOL_ERROR: HAPPENED,
    SignalKind.EDIT_MADE: YES_OR_NO,
    SignalKind.QUESTION_ASKED: YES_OR_NO,
}


def check(kind: SignalKind, value: float) -> str:
    """Return what is wrong with a signal's value; an empty string if it is legal."""
    if math.isfinite(value) and LEGAL[kind].holds(value):
        return ""
    return f"a signal of kind {kind.value!r} has the value {LEGAL[kind]}, not {value:g}"
