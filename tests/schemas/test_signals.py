"""The table of legal values: every kind has a row, and other values are reported."""

from __future__ import annotations

import math

import pytest

from tidemill.schemas.records import SignalKind
from tidemill.schemas.signals import LEGAL, check

GOOD = {
    SignalKind.THUMB: (1, -1),
    SignalKind.EDIT_KEPT_SOON: (0, 0.5, 1),
    SignalKind.EDIT_KEPT_LATER: (0, 0.5, 1),
    SignalKind.RETRY: (1,),
    SignalKind.UNDO: (1,),
    SignalKind.ABANDONMENT: (1,),
    SignalKind.SENTIMENT: (-1, 0, 0.3, 1),
    SignalKind.LATENCY: (0.001, 12.5, 86_400),
    SignalKind.TOOL_ERROR: (1,),
    SignalKind.EDIT_MADE: (0, 1),
    SignalKind.QUESTION_ASKED: (0, 1),
}
BAD = {
    SignalKind.THUMB: (0, 0.5, 2),
    SignalKind.EDIT_KEPT_SOON: (-0.01, 1.01),
    SignalKind.EDIT_KEPT_LATER: (-0.01, 1.01),
    SignalKind.RETRY: (0, 2),
    SignalKind.UNDO: (0, -1),
    SignalKind.ABANDONMENT: (0, 0.5),
    SignalKind.SENTIMENT: (-1.01, 1.01),
    SignalKind.LATENCY: (0, -1, 86_401),
    SignalKind.TOOL_ERROR: (0, 3),
    SignalKind.EDIT_MADE: (0.5, -1),
    SignalKind.QUESTION_ASKED: (0.5, 2),
}


@pytest.mark.parametrize("kind", list(SignalKind))
def test_each_kind_takes_its_values_and_no_other(kind: SignalKind):
    assert [check(kind, value) for value in GOOD[kind]] == [""] * len(GOOD[kind])
    for value in (*BAD[kind], math.nan, math.inf, -math.inf, 1e308):
        assert kind.value in check(kind, value)
        assert str(LEGAL[kind]) in check(kind, value)


def test_the_text_of_an_error_names_what_is_legal():
    assert check(SignalKind.THUMB, 3) == "a signal of kind 'thumb' has the value 1 or -1, not 3"
    assert check(SignalKind.LATENCY, 0) == "a signal of kind 'latency' has the value above 0 to 86400, not 0"
