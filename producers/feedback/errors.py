"""What can go wrong with a signal: it is bad, there is no room for it, or the log did not take it."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.schemas.log.producer import DeliveryError
from tidemill.schemas.records import Feedback


class BadFeedback(ValueError):
    """A signal that cannot be one. `field` names the argument that is wrong; the message says what to do."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class NotServed(BadFeedback):
    """The interaction was not served to this user: its token is forged, altered, or another user's."""


class FeedbackQueueFull(TimeoutError):
    """There was no room within the deadline: the signal was not taken, and may be sent again."""


class LogUnreachable(ConnectionError):
    """No broker answered within the deadline: the signal was not taken, and may be sent again."""


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """A signal that the log did not acknowledge, and why."""

    event: Feedback
    reason: str


class FeedbackNotDelivered(DeliveryError):
    """Signals that the log did not acknowledge. Each may have been written all the same: send it with the same
    `event_id`, and it counts once. `failed` holds the newest of them."""

    def __init__(self, message: str, failed: tuple[FailedEvent, ...] = ()) -> None:
        super().__init__(message)
        self.failed = failed
