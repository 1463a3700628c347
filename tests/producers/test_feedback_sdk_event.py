"""A report is checked at once: a valid one becomes the right record, an invalid one is refused with a reason."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.producers.feedback_support import FORGER, PRODUCT, pseudonym, token
from tidemill.producers.feedback.event import BadFeedback, FeedbackMaker, NotServed, check_source
from tidemill.schemas.records import Feedback, SignalKind
from tidemill.schemas.signals import LEGAL, Between

MAKER = FeedbackMaker(PRODUCT)
NOW = 1_800_000_000_000_000
SIGNAL = {"interaction": token(), "kind": "thumb", "value": 1, "user": "ann"}


class NoOffset(tzinfo):
    """A time zone that knows no offset: as useless as none."""

    def utcoffset(self, _moment: datetime | None) -> None:
        return None


def make(now_us: int = NOW, **changed: Any) -> Feedback:
    return MAKER.make("test", now_us, **{**SIGNAL, **changed})


def test_a_valid_report_becomes_the_right_record():
    record = make(event_id="e-1", corrects="e-0", observed_at=NOW - 5)
    assert record == Feedback("e-1", "i-1", pseudonym(), SignalKind.THUMB, 1.0, NOW - 5, "test", "e-0")
    assert isinstance(record.value, float)
    assert make().observed_at == NOW


@pytest.mark.parametrize("kind", list(SignalKind))
def test_every_kind_can_be_reported(kind: SignalKind):
    legal = LEGAL[kind]
    value = legal.high if isinstance(legal, Between) else legal.values[0]
    for given_kind in (kind, kind.value):
        assert make(kind=given_kind, value=value).kind is kind


def test_a_user_who_was_not_named_when_served_is_not_named_in_feedback():
    assert make(interaction=token(user=None), user=None).user_id == ""
    with pytest.raises(NotServed):
        make(interaction=token(user=None), user="ann")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("kind", "thumbs", "'thumbs' is none of thumb, edit_kept_soon"),
        ("kind", "x" * 10_000, "is none of"),
        ("kind", None, "is none of"),
        ("value", 0, "the value 1 or -1, not 0"),
        ("value", 7, "the value 1 or -1, not 7"),
        ("value", math.nan, "not nan"),
        ("value", math.inf, "not inf"),
        ("value", 10**400, "too large"),
        ("value", "1", "is a number, not str"),
        ("value", True, "is a number, not bool"),
        ("value", None, "is missing"),
        ("user", "", "1 to 512 bytes, not 0"),
        ("user", "u" * 600, "1 to 512 bytes, not 600"),
        ("user", 7, "a user id is a string, not int"),
        ("event_id", "", "an event id is 1 to 128"),
        ("event_id", "a/b", "an event id is 1 to 128"),
        ("event_id", "\x00tick/0", "an event id is 1 to 128"),
        ("event_id", "e" * 129, "an event id is 1 to 128"),
        ("event_id", "e\n", "an event id is 1 to 128"),
        ("event_id", 5, "an event id is 1 to 128"),
        ("corrects", "a b", "an event id is 1 to 128"),
        ("observed_at", NOW + 60_000_001, "60 s ahead of now"),
        ("observed_at", NOW // 1_000_000, "signals are taken for 2,592,000 s"),
        ("observed_at", -(10**30), "signals are taken for"),
        pytest.param("observed_at", 10**400, "has too many digits", id="observed_at-400 digits"),
        ("observed_at", datetime(2026, 1, 1), "needs its time zone"),
        ("observed_at", datetime(2026, 1, 1, tzinfo=NoOffset()), "needs its time zone"),
        ("observed_at", 1.5, "not float"),
        ("observed_at", True, "not bool"),
    ],
)
def test_an_error_names_its_field(field: str, value: object, said: str):
    with pytest.raises(BadFeedback, match=said) as refused:
        make(**{field: value})
    assert refused.value.field == field
    assert len(str(refused.value)) < 400
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    "changed",
    [
        {"user": "bob"},
        {"user": None},
        {"interaction": token(product=FORGER)},
        {"interaction": token("i-2", "bob")},
        {"interaction": "i-2" + token()[3:]},
        {"interaction": "i-1"},
        {"interaction": ""},
        {"interaction": token() + "x" * 10**6},
        {"interaction": None},
    ],
)
def test_a_user_cannot_vote_on_an_answer_that_was_not_served_to_them(changed: dict[str, Any]):
    with pytest.raises(NotServed) as refused:
        make(**changed)
    assert refused.value.field == "interaction"


def test_an_event_does_not_correct_itself():
    with pytest.raises(BadFeedback, match="cannot correct itself"):
        make(event_id="e", corrects="e")


def test_a_withdrawal_has_no_value():
    record = make(value=None, corrects="e-0")
    assert record.value is None and record.corrects == "e-0"


def test_times_at_the_limits_are_accepted():
    for moment in (NOW + 60_000_000, NOW - round(PRODUCT.max_feedback_age_s * 1e6)):
        assert make(observed_at=moment).observed_at == moment


def test_a_datetime_is_its_moment_in_any_zone():
    moment = datetime(2027, 1, 15, 7, 59, 59, 250_001, tzinfo=UTC)
    elsewhere = moment.astimezone(timezone(timedelta(hours=5, minutes=30)))
    times = {make(observed_at=when).observed_at for when in (moment, elsewhere)}
    assert times == {1_799_999_999_250_001}


@given(st.sampled_from(["ann", "bob"]), st.sampled_from([1, -1]), st.integers(NOW - 10**9, NOW))
def test_the_same_signal_has_the_same_event_id_and_another_has_another(user: str, value: int, at: int):
    signal: dict[str, Any] = {"interaction": token(user=user), "user": user, "value": value, "observed_at": at}
    first = make(**signal)
    assert make(NOW + 7, **{**signal, "kind": SignalKind.THUMB, "value": float(value)}) == first
    others: list[dict[str, Any]] = [
        {"value": -value},
        {"kind": "sentiment"},
        {"observed_at": at - 1},
        {"interaction": token("i-2", user)},
        {"user": None, "interaction": token(user=None)},
        {"corrects": "e-0"},
    ]
    ids = {make(**{**signal, **other}).event_id for other in others}
    assert len(ids) == len(others) and first.event_id not in ids


@pytest.mark.parametrize("source", ["", "a" * 65, "a b", "a/b", "é"])
def test_a_source_has_a_plain_name(source: str):
    with pytest.raises(ValueError, match="letters, digits"):
        check_source(source)
