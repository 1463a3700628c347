"""Conversion of a product's signal to a `Feedback` record, and the errors of signals.

Pure: the same signal with the same time makes the same record, so that a signal sent again has the same event id.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime, timedelta
from numbers import Real
from typing import Required, TypedDict

from tidemill.producers.product.settings import ProductSettings
from tidemill.producers.product.signing import BadToken, BadUserId, Pseudonyms, Signer
from tidemill.schemas import signals
from tidemill.schemas.clock import to_s, to_us
from tidemill.schemas.log.producer import DeliveryError
from tidemill.schemas.record_class import record
from tidemill.schemas.records import Feedback, SignalKind


class BadFeedback(ValueError):
    """Error of an invalid signal. `field` names the wrong argument; the message says what to do."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class NotServed(BadFeedback):
    """Error of an interaction that was not served to this user: its token is forged, altered, or another user's."""


class FeedbackQueueFull(TimeoutError):
    """Error of a queue without room within the deadline: the signal was not accepted, and may be sent again."""


class LogUnreachable(ConnectionError):
    """Error when no broker answered within the deadline, or the schema registry failed: the signal was not accepted,
    and may be sent again."""


@record(frozen=True, slots=True)
class FailedEvent:
    """A signal that the log did not acknowledge, with the reason."""

    event: Feedback
    reason: str


class FeedbackNotDelivered(DeliveryError):
    """Error of signals that the log did not acknowledge. Each may still have been written: send it again with the same
    `event_id`, and it counts once. `failed` contains the newest of them."""

    def __init__(self, message: str, failed: tuple[FailedEvent, ...] = ()) -> None:
        super().__init__(message)
        self.failed = failed


_EVENT_ID = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_SOURCE = re.compile(r"[A-Za-z0-9._:@-]{1,64}")
_KINDS = {kind.value: kind for kind in SignalKind}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class EventFields(TypedDict, total=False):
    """The keyword arguments of a signal."""

    user: Required[str | None]
    """The product's own id of the user who gave the signal; None if the answered request named no user."""
    event_id: str | None
    """A signal sent again with the same id counts once. None: derived from the other arguments, so that a caller that
    may send a signal again must give `event_id` or `observed_at`."""
    corrects: str | None
    """Event id of the signal that this one replaces."""
    observed_at: datetime | int | None
    """Time of the signal: an aware datetime or microseconds since the Unix epoch. None: now."""


class FeedbackMaker:
    """Checks signals and makes their records. Raises KeysMissing without the product's keys."""

    def __init__(self, product: ProductSettings) -> None:
        self._signer = Signer(product)
        self._pseudonyms = Pseudonyms(product)
        self._ahead_us = to_us(product.clock_skew_s)
        self._age_us = to_us(product.max_feedback_age_s)

    def make(
        self,
        source: str,
        now_us: int,
        interaction: str,
        kind: SignalKind | str,
        value: float | None,
        user: str | None,
        event_id: str | None = None,
        corrects: str | None = None,
        observed_at: datetime | int | None = None,
    ) -> Feedback:
        """Return the record of a signal; its arguments are those of `FeedbackProducer.send` and `EventFields`.

        Raises BadFeedback for a wrong field, `NotServed` for a token that was not issued to this user.
        """
        try:
            user_id = self._pseudonyms.of(user)
        except BadUserId as error:
            raise BadFeedback("user", str(error)) from error
        try:
            interaction_id = self._signer.verify(interaction, user_id)
        except BadToken as error:
            raise NotServed("interaction", str(error)) from error
        # Calling the enumeration takes five times as long.
        known = _KINDS.get(kind) if isinstance(kind, str) else None
        if known is None:
            raise BadFeedback("kind", f"{str(kind)[:40]!r} is none of {', '.join(_KINDS)}")
        if corrects is not None:
            _check_event_id("corrects", corrects)
        value = _value(known, value, corrects)
        at = now_us if observed_at is None else _microseconds(observed_at)
        if at > now_us + self._ahead_us:
            raise BadFeedback("observed_at", f"is {to_s(at - now_us):,.0f} s ahead of now: {_EXPECTED_TIME}")
        if at < now_us - self._age_us:
            raise BadFeedback(
                "observed_at",
                f"is {to_s(now_us - at):,.0f} s ago, and signals are taken for {to_s(self._age_us):,.0f} s "
                f"(product.max_feedback_age_s): {_EXPECTED_TIME}",
            )
        if event_id is None:  # the same for the same signal
            text = json.dumps([interaction_id, user_id, known.value, value, at, corrects])
            event_id = f"d-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
        else:
            _check_event_id("event_id", event_id)
        if corrects == event_id:
            raise BadFeedback("corrects", "an event cannot correct itself: give the event_id of an earlier one")
        return Feedback(event_id, interaction_id, user_id, known, value, at, source, corrects)


_EXPECTED_TIME = "is it an aware datetime, or microseconds since the Unix epoch, of a clock that is right?"


def check_source(source: str) -> str:
    """Return the name of a reporter if it is valid. Raises ValueError."""
    if not _SOURCE.fullmatch(source):
        raise ValueError(f"source {source!r}: 1 to 64 letters, digits, '.', '_', ':', '@' or '-' are allowed")
    return source


def _value(kind: SignalKind, value: float | None, corrects: str | None) -> float | None:
    if value is None:
        if corrects is None:
            raise BadFeedback("value", "is missing; only an event that withdraws another (`corrects`) has none")
        return None
    number = value
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise BadFeedback("value", f"is a number, not {type(value).__name__}")
        try:
            number = float(value)
        except OverflowError as error:
            raise BadFeedback("value", "is too large for a number of 64 bits") from error
    wrong = signals.check(kind, number)
    if wrong:
        raise BadFeedback("value", wrong)
    return number


def _check_event_id(field: str, event_id: str) -> None:
    if not isinstance(event_id, str) or not _EVENT_ID.fullmatch(event_id):
        raise BadFeedback(field, "an event id is 1 to 128 letters, digits, '.', '_', ':', '@' or '-'")


def _microseconds(moment: datetime | int) -> int:
    if isinstance(moment, datetime):
        if moment.utcoffset() is None:
            raise BadFeedback("observed_at", "a datetime needs its time zone: datetime.now(timezone.utc)")
        return (moment - _EPOCH) // timedelta(microseconds=1)
    if isinstance(moment, bool) or not isinstance(moment, int):
        raise BadFeedback("observed_at", f"is a datetime or an integer of microseconds, not {type(moment).__name__}")
    try:
        float(moment)
    except OverflowError as error:
        raise BadFeedback("observed_at", f"has too many digits: {_EXPECTED_TIME}") from error
    return moment
