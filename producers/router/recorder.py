"""Has interactions acknowledged by the log within a time, and knows whether the log answers.

What holds: `write` returns only after the acknowledgement. While the log fails, requests are turned away at once, one
of them let through now and then to try it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tidemill.producers.outbox import Outbox
from tidemill.producers.router.config import RouterSettings
from tidemill.producers.sampling.segments import SegmentClaims
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.producer import DeliveryError, RecordProducer
from tidemill.schemas.records import Interaction

APPLICATION = "tidemill-router"


class LogUnavailable(RuntimeError):
    """The log did not acknowledge an interaction in time."""


class Recorder:
    """Writes interactions. `rest_s` is how long the log is left alone after a failure."""

    def __init__(self, outbox: Outbox, timeout_s: float, rest_s: float) -> None:
        self._outbox, self._timeout_s, self._rest_s = outbox, timeout_s, rest_s
        self._rests_until = float("-inf")
        self.failing = False
        """Whether the last interaction was not acknowledged."""

    async def write(self, made: Interaction) -> None:
        """Write one interaction and wait for its acknowledgement. Raises LogUnavailable."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._outbox.write(made.interaction_id, made)
        except (DeliveryError, TimeoutError, OSError) as error:
            self.failing, self._rests_until = True, self._now() + self._rest_s
            raise LogUnavailable(
                f"interaction {made.interaction_id}: {error or 'no acknowledgement in time'}"
            ) from error
        self.failing = False

    def may_try(self) -> bool:
        """Whether a request may come in: always while the log answers; one each `rest_s` while it does not."""
        if not self.failing:
            return True
        if self._now() < self._rests_until:
            return False
        self._rests_until = self._now() + self._rest_s
        return True

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


@asynccontextmanager
async def open_recorder(
    kafka: KafkaSettings, run: RunSettings, store: StoreSettings, settings: RouterSettings
) -> AsyncIterator[Recorder]:
    """A recorder whose producer has sent everything when it is closed, or has given it up in time."""
    # What is not acknowledged in time is not sent later either: the client was told that it was not served.
    limit = {"delivery.timeout.ms": str(round(1000 * settings.log_timeout_s))}
    options = kafka.model_copy(update={"client_options": {**limit, **kafka.client_options}})
    claims = SegmentClaims(store.root, run.run_id, settings.claim_check_bytes, Codec(kafka.registry_url))
    outbox = Outbox(RecordProducer(options, APPLICATION), Topic.INTERACTIONS, claims.checked)
    try:
        yield Recorder(outbox, settings.log_timeout_s + 1.0, settings.log_rest_s)
    finally:
        await asyncio.to_thread(outbox.close)
