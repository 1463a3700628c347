"""The gateway's events: bodies of requests, models of requests and answers, rate limits, results and errors.

A body is limited in bytes (the server limits its time), and is JSON without the parts that parsers read differently: a
repeated key, NaN, Infinity and any encoding except UTF-8 are refused, so that two readers of the same bytes never
understand different things. Types are strict: "1" is not a number, unknown keys are refused. The values of a signal are
checked by the SDK's own `FeedbackMaker`. Errors are `application/problem+json` (RFC 9457) without a traceback.

Rate limits are token buckets that are given the time: in any span of `t` seconds a key gets at most
`burst + rate * t` tokens, and a key is forgotten after its bucket is full again.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any, NoReturn, Self, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
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
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tidemill.producers.config import GatewaySettings
from tidemill.producers.feedback.event import (
    BadFeedback,
    FeedbackMaker,
    FeedbackNotDelivered,
    FeedbackQueueFull,
    LogUnreachable,
    NotServed,
)
from tidemill.producers.feedback.queue import FeedbackQueue
from tidemill.schemas.clock import now_us
from tidemill.schemas.records import Feedback, SignalKind

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)

RETRY_AFTER_S = 2
ERRORS_TOLD = 5
NOT_ACKNOWLEDGED = "the log did not acknowledge the event: send it again with the same event_id, and it counts once"

_TOKEN = "b1946ac92492d2347c6235b4d2611184.kWb2rJZ1eYQvJmQ0m2cZ4o3n5p6q7r8s9t0uAvBwCxD"
_SIGNAL = {"interaction": _TOKEN, "kind": "thumb", "user": "ann@example.com"}
THUMB_EXAMPLE = {**_SIGNAL, "value": 1, "observed_at": "2026-03-01T12:00:00.250Z"}
WITHDRAWAL_EXAMPLE = {**_SIGNAL, "value": None, "event_id": "click-1002", "corrects": "click-1001"}


class Problem(Exception):
    """A request that cannot be answered; `detail` tells the author of the client the fault and what to do.

    `close`: the connection ends, because the rest of the request is not read.
    """

    def __init__(self, status: int, detail: str, *, retry_after_s: float | None = None, close: bool = False) -> None:
        super().__init__(detail)
        self.status, self.detail, self.close = status, detail, close
        # As `Retry-After` gives it: whole seconds, rounded up
        self.retry_after_s = None if retry_after_s is None else max(1, math.ceil(retry_after_s))


class ProblemOut(BaseModel):
    """The reason for a refusal."""

    title: str = Field(examples=["Forbidden"])
    status: int = Field(examples=[403])
    detail: str = Field(examples=["interaction: this interaction was not served to this user"])


async def answer(_request: Request, error: Exception) -> JSONResponse:
    """Return the response to an error. The traceback of an unexpected one is only in the server's log."""
    problem = error if isinstance(error, Problem) else Problem(500, "an error of the gateway")
    if isinstance(error, HTTPException):
        problem = Problem(error.status_code, "see /docs for the paths that exist")
    headers = dict(getattr(error, "headers", None) or {})  # of a 405: the methods that are allowed
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(problem.retry_after_s)
    if problem.close:
        headers["Connection"] = "close"
    if problem.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    body = {"title": HTTPStatus(problem.status).phrase, "status": problem.status, "detail": problem.detail}
    return JSONResponse(body, problem.status, headers, "application/problem+json")


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request that is declared as JSON. Raises Problem 400, 413, 415."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem(415, "send the body as Content-Type: application/json", close=True)
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise Problem(415, "send the body without Content-Encoding", close=True)
    too_long = Problem(413, f"the body is longer than {limit} bytes: send fewer events in one request", close=True)
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_long
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise too_long
    except ClientDisconnect as error:
        raise Problem(400, "the client disconnected", close=True) from error
    return bytes(body)


def parse_json(body: bytes) -> Any:  # noqa: ANN401 - a JSON tree
    """Return the JSON value of bytes. Raises Problem 400."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise Problem(400, f"the key {key[:40]!r} comes twice in one object")
            found[key] = value
        return found

    def constant(name: str) -> NoReturn:
        raise Problem(400, f"{name} is not JSON")

    try:
        return json.loads(body.decode(), object_pairs_hook=unique, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise Problem(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise Problem(400, f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise Problem(400, "the body is nested too deeply") from error
    except ValueError as error:
        # Python refuses integers of thousands of digits, whose conversion would take quadratic time.
        raise Problem(400, "the body has an integer of thousands of digits") from error


def _iso_text(value: object) -> object:
    """Check for ISO 8601 text: pydantic would read a bare number as seconds or milliseconds, by its size."""
    if not isinstance(value, datetime) and (not isinstance(value, str) or "T" not in value):
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


class GatewayMetrics(CollectorRegistry):
    """The counts in Prometheus' format. Labels come from fixed sets, so that clients cannot create series."""

    def __init__(self, pending: Callable[[], float]) -> None:
        """`pending`: the number of events that wait for the log's acknowledgement."""
        super().__init__()
        named: dict[str, Any] = {"namespace": "tidemill_gateway", "registry": self}
        buckets = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
        self.requests = Counter("requests", "Requests by route and status.", ["route", "status"], **named)
        self.events = Counter("events", "Events by API key and status.", ["key", "status"], **named)
        waited = "From an event's or a batch's check to the log's acknowledgement."
        self.acknowledged = Histogram("acknowledge_seconds", waited, buckets=buckets, **named)
        Gauge("pending", "Events that wait for the log.", **named).set_function(pending)


class EventIntake:
    """Takes events of known callers. Used from one event loop."""

    def __init__(
        self, maker: FeedbackMaker, queue: FeedbackQueue, settings: GatewaySettings, metrics: GatewayMetrics
    ) -> None:
        self._maker, self._queue = maker, queue
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
        results: list[ItemOut] = []
        records: dict[int, Feedback] = {}
        for place, tree in enumerate(trees):
            try:
                records[place] = self._record(tree, caller)
                results.append(ItemOut(status=202, event_id=records[place].event_id))
            except Problem as refused:
                seconds = refused.retry_after_s
                results.append(ItemOut(status=refused.status, detail=refused.detail, retry_after_s=seconds))
        reasons: list[str] = []
        if records:
            try:
                with self._metrics.acknowledged.time():
                    waited_s = self._settings.acknowledge_timeout_s
                    reasons = await self._queue.deliver(list(records.values()), waited_s)
            except (FeedbackQueueFull, LogUnreachable, FeedbackNotDelivered, LookupError) as error:
                reasons = [str(error)] * len(records)
        if failed := next(filter(None, reasons), ""):
            log.warning("%d of %d events not acknowledged: %s", sum(map(bool, reasons)), len(records), failed)
        for place, reason in zip(records, reasons, strict=True):
            if reason:
                again = {"status": 503, "detail": NOT_ACKNOWLEDGED, "retry_after_s": RETRY_AFTER_S}
                results[place] = results[place].model_copy(update=again)
        for result in results:
            self._metrics.events.labels(caller, str(result.status)).inc()
        return results

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
        wrong = [f"{'.'.join(str(part)[:40] for part in e['loc']) or 'event'}: {e['msg']}" for e in found[:ERRORS_TOLD]]
        more = [f"and {len(found) - ERRORS_TOLD} more"] if len(found) > ERRORS_TOLD else []
        raise Problem(422, "; ".join(wrong + more)) from error
