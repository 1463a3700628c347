"""From checked requests to acknowledged records: who may send how much, and what became of each event.

Rate caps are token buckets with the time given: in any span of `t` seconds a key is granted at most
`burst + rate * t`, and a key that has been quiet long enough to be full again is forgotten.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tidemill.producers.feedback.awaited import Acknowledged
from tidemill.producers.feedback.event import (
    BadFeedback,
    FeedbackMaker,
    FeedbackNotDelivered,
    FeedbackQueueFull,
    LogUnreachable,
    NotServed,
)
from tidemill.producers.gateway.config import GatewaySettings
from tidemill.producers.gateway.metrics import GatewayMetrics
from tidemill.producers.gateway.models import BatchIn, FeedbackIn, ItemOut
from tidemill.producers.gateway.problem import Problem, whole_seconds
from tidemill.producers.product.settings import ApiKeys
from tidemill.schemas.clock import now_us
from tidemill.schemas.records import Feedback


class TokenBuckets:
    """Buckets by key, all of one rate and burst.

    Args:
        rate: tokens that come back a second.
        burst: tokens of a full bucket.
    """

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, count: int, now_s: float) -> float:
        """Take tokens; 0 when they were there, otherwise nothing is taken and it is the seconds until they are.

        Args:
            count: at most `burst`.
            now_s: any clock that does not go back.

        Raises:
            ValueError: more tokens than a bucket ever holds.
        """
        if count > self._burst:
            raise ValueError(f"{count} tokens at once from buckets of {self._burst:g}")
        self._forget_full(now_s)
        tokens = self._tokens(key, now_s)
        if tokens < count:
            return (count - tokens) / self._rate
        self._buckets[key] = (tokens - count, now_s)
        self._buckets.move_to_end(key)
        return 0.0

    def _tokens(self, key: str, now_s: float) -> float:
        tokens, at = self._buckets.get(key, (self._burst, now_s))
        return min(self._burst, tokens + max(0.0, now_s - at) * self._rate)

    def _forget_full(self, now_s: float) -> None:
        while self._buckets:
            oldest = next(iter(self._buckets))
            if self._tokens(oldest, now_s) < self._burst:
                return
            del self._buckets[oldest]


log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)

RETRY_AFTER_S = 2
ERRORS_TOLD = 5
NOT_ACKNOWLEDGED = "the log did not acknowledge the event: send it again with the same event_id, and it counts once"


class EventIntake:
    """Takes events of known callers. Used from one event loop."""

    def __init__(
        self, maker: FeedbackMaker, acknowledged: Acknowledged, settings: GatewaySettings, metrics: GatewayMetrics
    ) -> None:
        self._maker = maker
        self._acknowledged = acknowledged
        self._settings = settings
        self._metrics = metrics
        self._keys = ApiKeys(settings.api_keys)
        self._of_key = TokenBuckets(settings.key_rate, settings.key_burst)
        self._of_user = TokenBuckets(settings.user_rate, settings.user_burst)

    def caller(self, api_key: str) -> str:
        """The name of an API key. Raises Problem 401."""
        name = self._keys.name_of(api_key)
        if name is None:
            raise Problem(401, "send a known API key: Authorization: Bearer KEY", close=True)
        return name

    def charge(self, caller: str, events: int) -> None:
        """Count events against the caller's cap. Raises Problem 429."""
        wait = self._of_key.take(caller, events, time.monotonic()) if events else 0.0
        if wait:
            detail = f"the API key {caller!r} sends more than {self._settings.key_rate:g} events per second"
            raise Problem(429, detail, retry_after_s=wait)

    def events_of(self, tree: Any) -> list[Any]:  # noqa: ANN401 - a JSON tree
        """The events of a batch, not yet checked. Raises Problem 422."""
        events: list[Any] = _checked(BatchIn, tree).events
        if len(events) > self._settings.max_batch:
            raise Problem(422, f"events: {len(events)} of them, and a batch has at most {self._settings.max_batch}")
        return events

    async def take(self, trees: Sequence[Any], caller: str) -> list[ItemOut]:
        """Check and write events; what became of each, in order, when the log has answered or its time is over."""
        results: list[ItemOut | None] = [None] * len(trees)
        records: dict[int, Feedback] = {}
        for place, tree in enumerate(trees):
            try:
                records[place] = self._record(tree, caller)
            except Problem as problem:
                wait = None if problem.retry_after_s is None else whole_seconds(problem.retry_after_s)
                results[place] = ItemOut(status=problem.status, detail=problem.detail, retry_after_s=wait)
        for place, result in zip(records, await self._write(list(records.values())), strict=True):
            results[place] = result
        ended = [result for result in results if result is not None]
        for result in ended:
            self._metrics.events.labels(caller, str(result.status)).inc()
        return ended

    def _record(self, tree: Any, caller: str) -> Feedback:  # noqa: ANN401 - a JSON tree
        try:
            record = self._maker.make(_checked(FeedbackIn, tree).report(), caller, now_us())
        except NotServed as error:
            raise Problem(403, str(error)) from error
        except BadFeedback as error:
            raise Problem(422, str(error)) from error
        # Only holders of a token of their own get here, so that nobody uses up another user's share, or this memory.
        wait = self._of_user.take(record.user_id or record.interaction_id, 1, time.monotonic())
        if wait:
            detail = f"more than {self._settings.user_rate:g} events per second in the name of one user"
            raise Problem(429, detail, retry_after_s=wait)
        return record

    async def _write(self, records: list[Feedback]) -> list[ItemOut]:
        if not records:
            return []
        try:
            with self._metrics.acknowledged.time():
                reasons = await self._acknowledged.deliver(records, self._settings.acknowledge_timeout_s)
        except (FeedbackQueueFull, LogUnreachable, FeedbackNotDelivered, LookupError) as error:
            reasons = [str(error)] * len(records)
        failed = next(filter(None, reasons), "")
        if failed:
            log.warning("%d of %d events not acknowledged: %s", sum(map(bool, reasons)), len(records), failed)
        return [_written(record, reason) for record, reason in zip(records, reasons, strict=True)]


def _written(record: Feedback, reason: str) -> ItemOut:
    if not reason:
        return ItemOut(status=202, event_id=record.event_id)
    return ItemOut(status=503, event_id=record.event_id, detail=NOT_ACKNOWLEDGED, retry_after_s=RETRY_AFTER_S)


def _checked(model: type[Model], tree: Any) -> Model:  # noqa: ANN401 - a JSON tree
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        # What is wrong, without the input: it may be large, and somebody's
        found = error.errors(include_url=False, include_context=False, include_input=False)
        told = [f"{'.'.join(str(part)[:40] for part in e['loc']) or 'event'}: {e['msg']}" for e in found[:ERRORS_TOLD]]
        more = [f"and {len(found) - ERRORS_TOLD} more"] if len(found) > ERRORS_TOLD else []
        raise Problem(422, "; ".join(told + more)) from error
