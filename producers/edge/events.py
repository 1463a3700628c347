"""The gateway's events: the models of requests and answers, the rate limits, and the result of each event.

Types are strict: "1" is not a number, unknown keys are refused. The values of a signal are checked by the SDK's own
`FeedbackMaker`. Rate limits are token buckets that are given the time: in any span of `t` seconds a key gets at most
`burst + rate * t` tokens, and a key is forgotten after its bucket is full again.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictStr,
    ValidationError,
    model_validator,
)

from tidemill.producers.config import GatewaySettings
from tidemill.producers.edge.metrics import GatewayMetrics
from tidemill.producers.edge.problem import Problem, whole_seconds
from tidemill.producers.feedback.event import (
    BadFeedback,
    FeedbackMaker,
    FeedbackNotDelivered,
    FeedbackQueueFull,
    LogUnreachable,
    NotServed,
)
from tidemill.producers.feedback.queue import AwaitedDeliveries
from tidemill.schemas.clock import now_us
from tidemill.schemas.records import Feedback, SignalKind

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)

RETRY_AFTER_S = 2
ERRORS_TOLD = 5
NOT_ACKNOWLEDGED = "the log did not acknowledge the event: send it again with the same event_id, and it counts once"

TOKEN_EXAMPLE = "b1946ac92492d2347c6235b4d2611184.kWb2rJZ1eYQvJmQ0m2cZ4o3n5p6q7r8s9t0uAvBwCxD"
THUMB_EXAMPLE = {
    "interaction": TOKEN_EXAMPLE,
    "kind": "thumb",
    "value": 1,
    "user": "ann@example.com",
    "observed_at": "2026-03-01T12:00:00.250Z",
}
WITHDRAWAL_EXAMPLE = {
    "interaction": TOKEN_EXAMPLE,
    "kind": "thumb",
    "value": None,
    "user": "ann@example.com",
    "event_id": "click-1002",
    "corrects": "click-1001",
}


def _iso_text(value: object) -> object:
    """Check for ISO 8601 text: pydantic would read a bare number as seconds or milliseconds, by its size."""
    if isinstance(value, datetime):
        return value
    if not isinstance(value, str) or "T" not in value:
        raise ValueError("a time is text in ISO 8601 with a time zone, 2026-03-01T12:00:00Z")
    return value


class FeedbackIn(BaseModel):
    """One signal about one interaction."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    interaction: StrictStr = Field(max_length=256)
    """The interaction token that the router returned with the answer."""

    kind: SignalKind
    """The act of the user, or the observation of the product."""

    value: Annotated[float, Field(strict=True, allow_inf_nan=False)] | None = None
    """The value, with a meaning for each kind: a thumb is 1 or -1. Null withdraws the event named in `corrects`."""

    user: StrictStr | None = Field(max_length=512)
    """The product's own id of the user; null if the answered request named no user. Only its keyed hash is stored."""

    event_id: StrictStr | None = Field(default=None, max_length=128)
    """An event sent again with the same id counts once."""

    corrects: StrictStr | None = Field(default=None, max_length=128)
    """Event id of the signal that this one replaces."""

    observed_at: Annotated[AwareDatetime, BeforeValidator(_iso_text)] | None = None
    """The time of the event, ISO 8601 with a time zone."""

    @model_validator(mode="after")
    def _can_be_sent_again(self) -> Self:
        if self.event_id is None and self.observed_at is None:
            raise ValueError("give event_id or observed_at, so that the event can be sent again and counts once")
        return self


class BatchIn(BaseModel):
    """Several signals; each is accepted or refused on its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    events: list[Any] = Field(
        min_length=1, json_schema_extra={"items": {"$ref": "#/components/schemas/FeedbackIn"}, "type": "array"}
    )
    """The signals, each in the form of `/v1/feedback`."""


class AcceptedOut(BaseModel):
    """The log has the event."""

    event_id: str = Field(examples=["d-0a4d55a8d778e5022fab701977c5d840"])


class ItemOut(BaseModel):
    """The result of one event of a batch."""

    status: int = Field(examples=[202])
    """The status that `/v1/feedback` would return for this event alone."""
    event_id: str | None = Field(default=None, examples=["d-0a4d55a8d778e5022fab701977c5d840"])
    """The id of an event that could be read."""
    detail: str | None = None
    """The reason for a refusal."""
    retry_after_s: int | None = None
    """The time after which to send it again, if that can help."""


class BatchOut(BaseModel):
    """The result of each event, in the order of the request."""

    accepted: int
    results: list[ItemOut]


class TokenBuckets:
    """Buckets by key: each holds at most `burst` tokens and gets `rate` new ones per second."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate, self._burst = rate, float(burst)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str, count: int, now_s: float) -> float:
        """Take tokens and return 0 if there are enough; otherwise take none and return the seconds until there are.

        `now_s` is the time of any monotonic clock. Raises ValueError for more tokens than a full bucket holds.
        """
        if count > self._burst:
            raise ValueError(f"{count} tokens at once from buckets of {self._burst:g}")
        while self._buckets and self._tokens(oldest := next(iter(self._buckets)), now_s) >= self._burst:
            del self._buckets[oldest]
        tokens = self._tokens(key, now_s)
        if tokens < count:
            return (count - tokens) / self._rate
        self._buckets[key] = (tokens - count, now_s)
        self._buckets.move_to_end(key)
        return 0.0

    def _tokens(self, key: str, now_s: float) -> float:
        tokens, at = self._buckets.get(key, (self._burst, now_s))
        return min(self._burst, tokens + max(0.0, now_s - at) * self._rate)


class EventIntake:
    """Takes events of known callers. Used from one event loop."""

    def __init__(
        self, maker: FeedbackMaker, acknowledged: AwaitedDeliveries, settings: GatewaySettings, metrics: GatewayMetrics
    ) -> None:
        self._maker, self._acknowledged = maker, acknowledged
        self._settings, self._metrics = settings, metrics
        self._of_key = TokenBuckets(settings.key_rate, settings.key_burst)
        self._of_user = TokenBuckets(settings.user_rate, settings.user_burst)

    def charge(self, caller: str, events: int) -> None:
        """Count events against the caller's rate limit. Raises Problem 429."""
        wait = self._of_key.take(caller, events, time.monotonic()) if events else 0.0
        if wait:
            detail = f"the API key {caller!r} sends more than {self._settings.key_rate:g} events per second"
            raise Problem(429, detail, retry_after_s=wait)

    async def take(self, trees: Sequence[Any], caller: str) -> list[ItemOut]:
        """Check and write events; return their results, in order, after the log has answered or the time is over."""
        results: dict[int, ItemOut] = {}
        records: dict[int, Feedback] = {}
        for place, tree in enumerate(trees):
            try:
                records[place] = self._record(tree, caller)
            except Problem as problem:
                wait = None if problem.retry_after_s is None else whole_seconds(problem.retry_after_s)
                results[place] = ItemOut(status=problem.status, detail=problem.detail, retry_after_s=wait)
        reasons: list[str] = []
        if records:
            try:
                with self._metrics.acknowledged.time():
                    waited_s = self._settings.acknowledge_timeout_s
                    reasons = await self._acknowledged.deliver(list(records.values()), waited_s)
            except (FeedbackQueueFull, LogUnreachable, FeedbackNotDelivered, LookupError) as error:
                reasons = [str(error)] * len(records)
        if failed := next(filter(None, reasons), ""):
            log.warning("%d of %d events not acknowledged: %s", sum(map(bool, reasons)), len(records), failed)
        for (place, record), reason in zip(records.items(), reasons, strict=True):
            again: dict[str, Any] = {"detail": NOT_ACKNOWLEDGED, "retry_after_s": RETRY_AFTER_S} if reason else {}
            results[place] = ItemOut(status=503 if reason else 202, event_id=record.event_id, **again)
        for result in results.values():
            self._metrics.events.labels(caller, str(result.status)).inc()
        return [results[place] for place in range(len(trees))]

    def _record(self, tree: Any, caller: str) -> Feedback:  # noqa: ANN401 - a JSON tree
        try:
            record = self._maker.make(caller, now_us(), **dict(checked(FeedbackIn, tree)))
        except NotServed as error:
            raise Problem(403, str(error)) from error
        except BadFeedback as error:
            raise Problem(422, str(error)) from error
        # Only holders of a valid token reach this line, so that no client can use up another user's limit or memory.
        wait = self._of_user.take(record.user_id or record.interaction_id, 1, time.monotonic())
        if wait:
            detail = f"more than {self._settings.user_rate:g} events per second for one user"
            raise Problem(429, detail, retry_after_s=wait)
        return record


def checked(model: type[Model], tree: Any) -> Model:  # noqa: ANN401 - a JSON tree
    """Return the model in a JSON tree. Raises Problem 422."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        # Report the errors without the input, which may be large or personal data
        found = error.errors(include_url=False, include_context=False, include_input=False)
        told = [f"{'.'.join(str(part)[:40] for part in e['loc']) or 'event'}: {e['msg']}" for e in found[:ERRORS_TOLD]]
        more = [f"and {len(found) - ERRORS_TOLD} more"] if len(found) > ERRORS_TOLD else []
        raise Problem(422, "; ".join(told + more)) from error
