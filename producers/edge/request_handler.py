"""The handling of one request of the product, from its arrival to its end, and its record.

Invariants:

- while the log fails, requests are refused immediately, except for one at intervals that tries the log again;
- nothing is sent before a replica has begun to answer, so that another replica can be asked until then;
- the chunk that ends the answer, or the whole body, is sent after the log has acknowledged the interaction;
- every answer that was sent in part is recorded, with all tokens sampled until its end or interruption;
- the recorded arm is the pool that answered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.types import Send

from tidemill.producers.config import LogFailure, OtherSampling, RouterSettings
from tidemill.producers.edge.completion_request import CollectedChoice, CompletionRequest, Refusal, sampling_of, shown
from tidemill.producers.edge.routing import NoReplicaAvailable
from tidemill.producers.outbox import Outbox, SegmentClaims
from tidemill.producers.sampling.completion import BadResponse, ReplicaUnavailable
from tidemill.producers.sampling.replicas import ReplicaIdentity, RequestRefused
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.chat.messages import BadMessage
from tidemill.schemas.chat.serving import ChatTurn
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.producer import DeliveryError, RecordProducer
from tidemill.schemas.records import Arm, Interaction

if TYPE_CHECKING:
    from tidemill.producers.edge.router import Router

LOG = logging.getLogger(__name__)
APPLICATION = "tidemill-router"
INTERACTION_HEADER = "x-tidemill-interaction"
ABANDONED = "abandoned"
"""The client disconnected before the end."""
FAILED = "failed"
"""The answer was interrupted because of the replica, or is not valid."""


class Recorder:
    """Writes interactions. `rest_s` is the backoff after a failure of the log, in seconds."""

    def __init__(self, outbox: Outbox, timeout_s: float, rest_s: float) -> None:
        self._outbox, self._timeout_s, self._rest_s = outbox, timeout_s, rest_s
        self._rests_until = float("-inf")
        self.failing = False
        """Whether the last interaction was not acknowledged."""

    async def write(self, made: Interaction) -> None:
        """Write one interaction and wait for its acknowledgement. Raises DeliveryError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._outbox.write(made.interaction_id, made)
        except (DeliveryError, TimeoutError, OSError) as error:
            self.failing, self._rests_until = True, time.monotonic() + self._rest_s
            reason = str(error) or "no acknowledgement in time"
            raise DeliveryError(f"interaction {made.interaction_id}: {reason}") from error
        self.failing = False

    @property
    def rests(self) -> bool:
        """Whether the log failed less than `rest_s` ago, or is being tried again."""
        return self.failing and time.monotonic() < self._rests_until

    def may_try(self) -> bool:
        """Return whether to accept a request: always while the log answers; one per `rest_s` while it does not."""
        if self.rests:
            return False
        self._rests_until = time.monotonic() + self._rest_s
        return True


@asynccontextmanager
async def open_recorder(
    kafka: KafkaSettings, run: RunSettings, store: StoreSettings, settings: RouterSettings
) -> AsyncIterator[Recorder]:
    """Return a recorder whose producer, at its end, has sent all interactions, or dropped them after a time limit."""
    # A client was told that an interaction was not served if it is not acknowledged in time: it is not retried for
    # longer. One that waited for a slow batch of others may still be written after that.
    limit = {"delivery.timeout.ms": str(max(1, round(1000 * settings.log_timeout_s)))}  # 0 would be no limit
    options = kafka.model_copy(update={"client_options": {**limit, **kafka.client_options}})
    claims = SegmentClaims(store.root, run.run_id, settings.claim_check_bytes, Codec(kafka.registry_url))
    outbox = Outbox(RecordProducer(options, APPLICATION), Topic.INTERACTIONS, claims.checked)
    try:
        yield Recorder(outbox, settings.log_timeout_s + 1.0, settings.log_rest_s)
    finally:
        await asyncio.to_thread(outbox.close)


class RequestHandler:
    """Handles one request. Call `run` once; cancelling it means that the client disconnected."""

    def __init__(self, router: Router, ask: CompletionRequest, consent: bool, send: Send, arrived: float) -> None:
        """Check the request against the settings. Raises Refusal, BadUserId."""
        self._router, self._ask, self._consent, self._send = router, ask, consent, send
        self.started = False
        """Whether status and headers were sent."""
        self._arrived = self._last_token = arrived
        self._id = uuid.uuid4().hex
        self._user = router.pseudonyms.of(ask.user)
        unit = self._user or ask.session_id or self._id
        self._assigned, self._propensity = Arm.STABLE, 1.0
        """The user's arm, and the probability with which it was chosen."""
        if router.settings.pools.canary:
            self._assigned, self._propensity = router.canary.assign(unit, router.settings.experiment_salt)
        self._token = router.signer.sign(self._id, self._user)
        self._turn: ChatTurn | None = None
        self._collected = CollectedChoice()
        self._first_token: float | None = None
        self._arm, self._identity = Arm.STABLE, ReplicaIdentity("", "")
        """The pool and the replica that answer."""
        self._settled = False
        self._deadline = asyncio.timeout(router.settings.request_timeout_s)
        if ask.other_sampling and router.settings.other_sampling is OtherSampling.REFUSE:
            raise Refusal.bad(
                f"the recorded logprobs would not describe this sampling ({', '.join(ask.other_sampling)}): leave it "
                "out, or have the operator set router.other_sampling",
                ask.other_sampling[0],
            )

    async def run(self) -> None:
        """Answer the request. Raises Refusal while nothing has been sent."""
        try:
            async with self._deadline, AsyncExitStack() as stack:
                await self._relay(await self._ask_replicas(await self._body(), stack))
        except asyncio.CancelledError:
            await self._break_off(ABANDONED)
            raise
        except RequestRefused as error:
            raise Refusal.by_replica(error) from error
        except (ReplicaUnavailable, BadResponse, TimeoutError) as error:
            LOG.warning("interaction %s: %s: %s", self._id, type(error).__name__, error)
            if isinstance(error, BadResponse):
                refusal = Refusal(502, "a replica returned an invalid answer", "bad_gateway_error")
            elif isinstance(error, ReplicaUnavailable):
                refusal = Refusal.unavailable("the answer was interrupted")
            else:
                refusal = Refusal(504, "no complete answer in time", "timeout_error")
            if not self.started:
                raise refusal from error
            await self._break_off(FAILED)
            if self._ask.stream:
                await self._send_event(refusal.body())
        finally:
            if self._turn is not None:
                self._turn.close()

    async def _body(self) -> bytes:
        """Return the request to a replica. Raises Refusal for a prompt that cannot be built, or is too long."""
        ask, fields = self._ask, self._ask.fields
        if ask.chat is not None:
            if self._router.chat is None:
                raise Refusal.unavailable("the run has no chat template yet: try again later")
            try:
                versions = ask.shows_token_ids
                self._turn = await self._router.chat.begin(ask.chat, stream=ask.stream, versions=versions)
            except BadMessage as error:
                raise Refusal.bad(str(error)) from error
            fields = self._turn.body(fields)
        if isinstance(fields["prompt"], list):
            self._check_length(fields["prompt"])
        return json.dumps(fields).encode()

    async def _relay(self, documents: AsyncIterator[dict[str, Any]]) -> None:
        """Send the documents of an answer in the form that the client requested, and record the answer at its end."""
        async for document in documents:
            if self._collected.take(document):
                self._last_token = time.monotonic()
                if self._first_token is None:
                    self._first_token = self._last_token
                    self._router.metrics.first_token.labels(self._arm.value).observe(self._last_token - self._arrived)
            if not self.started:
                self._check_length(self._collected.prompt)
            ends = self._collected.finish_reason is not None and not self._settled
            if ends and not await self._settle():
                return
            if not self._ask.stream and not self._settled:
                continue
            try:
                part = shown(document, self._ask) if self._turn is None else self._turn.take(document)
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                # In fields that only this client requested.
                raise BadResponse(f"a part of the answer has another shape: {error!r}") from error
            if part is None:
                continue
            if ends and self._token:
                part["tidemill"] = {"interaction": self._token}
            if self._ask.stream:
                await self._send_event(part)
            else:
                await self._begin("application/json")
                await self.send(json.dumps(part, ensure_ascii=False))
        if not self._settled:
            raise BadResponse("the answer ended without a finish_reason")
        if self._ask.stream:
            await self.send("data: [DONE]\n\n")

    def _check_length(self, prompt: list[int]) -> None:
        most = self._router.settings.max_prompt_tokens
        if len(prompt) > most:
            named = "prompt" if self._ask.chat is None else "messages"
            raise Refusal.bad(f"the prompt has {len(prompt)} tokens, at most {most} are served", named)

    async def _settle(self) -> bool:
        """Record the whole answer; return whether the rest may be sent to the client."""
        self._settled = True
        # The wait for the log has its own limit: no deadline may pass between a record and the end that it reports.
        self._deadline.reschedule(None)
        try:
            await asyncio.shield(self._router.start(self._record(str(self._collected.finish_reason))))
        except DeliveryError as error:
            LOG.error("not recorded: %s", error)
            serve = self._router.settings.on_log_failure is LogFailure.SERVE_UNRECORDED
            self._router.metrics.unrecorded.labels("served" if serve else "refused").inc()
            if serve:
                self._token = ""
            elif self.started:
                await self._send_event(Refusal.unavailable("the answer could not be recorded").body())
            else:
                raise Refusal.unavailable("the answer could not be recorded: try again later") from error
            return serve
        finally:
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._router.settings.request_timeout_s)
        return True

    async def _record(self, finish_reason: str) -> None:
        """Record the answer. An invalid one is recorded as failed, without sampled tokens."""
        identity, collected = self._identity, self._collected
        try:
            segment = collected.segment(trainable=not self._ask.other_sampling)
        except BadResponse as error:
            LOG.error("interaction %s of replica %s: %s", self._id, identity.replica_id, error)
            finish_reason, segment = FAILED, collected.segment(trainable=False)
        versions = [span.version for span in segment.spans]
        first = self._last_token if self._first_token is None else self._first_token
        made = Interaction(
            interaction_id=self._id,
            run_id=self._router.run.run_id,
            branch=self._router.run.branch,
            user_id=self._user,
            session_id=self._ask.session_id,
            arm=(self._arm if self._arm is self._assigned else Arm.FALLBACK).value,
            propensity=self._propensity,
            consent=self._consent,
            segments=[segment],
            claim=None,
            prompt_tokens=len(collected.prompt),
            sampled_tokens=sum(span.end - span.start for span in segment.spans),
            version_min=min(versions, default=-1),
            version_max=max(versions, default=-1),
            replica_id=identity.replica_id,
            region=identity.region,
            finish_reason=finish_reason,
            first_token_ms=1e3 * (first - self._arrived),
            latency_ms=1e3 * (self._last_token - self._arrived),
            served_at=now_us(),
            incarnation=collected.incarnation,
            sampling=sampling_of(self._ask),
        )
        with self._router.metrics.acknowledgement.time():
            await self._router.recorder.write(made)
        self._router.metrics.interactions.labels(made.arm, made.finish_reason).inc()

    async def _break_off(self, finish_reason: str) -> None:
        """Record the sent part of an interrupted answer."""
        if not self.started or self._settled:
            return
        self._settled = True
        self._collected.finish_reason = None
        try:
            # Cancellation by a disconnected client must not stop the record.
            await asyncio.shield(self._router.start(self._record(finish_reason)))
        except DeliveryError as error:
            LOG.error("not recorded: %s", error)
            self._router.metrics.unrecorded.labels(finish_reason).inc()

    async def _ask_replicas(self, body: bytes, stack: AsyncExitStack) -> AsyncIterator[dict[str, Any]]:
        """Return the answer of the first replica that begins one: of the user's arm, then of the stable pool."""
        self._arm = self._assigned
        while True:
            try:
                answer = self._router.replicas.ask(self._arm, body, stream=self._ask.stream)
                self._identity, documents = await stack.enter_async_context(answer)
                return documents
            except NoReplicaAvailable:
                LOG.warning("no replica of the %s pool answers: asking the %s pool", self._arm, Arm.STABLE)
                self._router.metrics.fallbacks.inc()
                self._arm = Arm.STABLE
            except ReplicaUnavailable as error:
                LOG.warning("asking another replica: %s", error)
                self._router.metrics.retries.inc()

    async def _send_event(self, document: Mapping[str, Any]) -> None:
        await self._begin("text/event-stream; charset=utf-8")
        await self.send(f"data: {json.dumps(document, ensure_ascii=False)}\n\n")

    async def _begin(self, content_type: str) -> None:
        if not self.started:
            self.started = True
            self._router.metrics.responses.labels("200").inc()
            headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-store")]
            if self._token:
                headers.append((INTERACTION_HEADER.encode(), self._token.encode()))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send(self, text: str, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": more})
