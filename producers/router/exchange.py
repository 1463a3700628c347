"""One request of the product from its arrival to its end.

What holds:

- nothing is sent before a replica has begun to answer, so that until then another replica may be asked;
- the chunk that ends the answer, or the whole body, is sent after the log has acknowledged the interaction;
- every answer of which a part was sent is recorded, with what was sampled until it ended or broke off;
- the arm recorded is the pool that answered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from tidemill.producers.product.pseudonym import Pseudonyms
from tidemill.producers.product.signing import Signer
from tidemill.producers.router.ask import Ask
from tidemill.producers.router.canary import Arm, CanaryShare, Lot
from tidemill.producers.router.config import LogFailure, OtherSampling, RouterSettings
from tidemill.producers.router.errors import Refusal, bad_request, unavailable
from tidemill.producers.router.metrics import Metrics
from tidemill.producers.router.record import ABANDONED, FAILED, Served, Times, interaction
from tidemill.producers.router.recorder import LogUnavailable, Recorder
from tidemill.producers.router.replicas import Answer, NoPlace, ReplicaFailed, Replicas
from tidemill.producers.router.shape import shaped
from tidemill.producers.router.transcribe import BadAnswer, Collected
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import RunSettings

LOG = logging.getLogger(__name__)
INTERACTION_HEADER = "x-tidemill-interaction"

Begin = Callable[[int, dict[str, str]], Awaitable[None]]
"""Sends status and headers."""
Send = Callable[[bytes], Awaitable[None]]
"""Sends a part of the body."""


@dataclass(frozen=True, slots=True)
class Client:
    """Where an answer goes."""

    begin: Begin
    send: Send


@dataclass(frozen=True, slots=True)
class Router:
    """What every request needs."""

    run: RunSettings
    settings: RouterSettings
    signer: Signer
    pseudonyms: Pseudonyms
    canary: CanaryShare
    replicas: Replicas
    recorder: Recorder
    metrics: Metrics


class Exchange:
    """One request. `run` it once; cancelling it means that the client went away."""

    def __init__(self, router: Router, ask: Ask, consent: bool, client: Client, arrived: float) -> None:
        self._router, self._ask, self._consent, self._client = router, ask, consent, client
        self._arrived = arrived
        self._id = uuid.uuid4().hex
        self._user = router.pseudonyms.of(ask.user)
        self._lot = _lot(router, self._user or ask.session_id or self._id)
        self._token = router.signer.sign(self._id, self._user)
        self._collected = Collected()
        self._first_token: float | None = None
        self._last_token = arrived
        self._answer: Answer | None = None
        self._begun = self._settled = False
        self._deadline = asyncio.timeout(router.settings.request_timeout_s)
        _check(router.settings, ask)

    async def run(self) -> None:
        """Answer the request. Raises Refusal while nothing has been sent."""
        try:
            async with self._deadline, self._answered() as answer:
                await self._relay(answer)
        except asyncio.CancelledError:
            await self._break_off(ABANDONED)
            raise
        except (ReplicaFailed, BadAnswer, TimeoutError) as error:
            await self._fail(error)

    async def _relay(self, answer: Answer) -> None:
        async for document in answer.documents:
            self._take(document, answer.arm)
            ends = self._collected.finish_reason is not None and not self._settled
            if ends and not await self._settle():
                return
            if self._ask.stream:
                await self._send_event(document, ends)
            elif self._settled:
                await self._send_body(document)
        if not self._settled:
            raise BadAnswer("the answer ended without a finish_reason")
        if self._ask.stream:
            await self._client.send(b"data: [DONE]\n\n")

    def _take(self, document: dict[str, Any], arm: Arm) -> None:
        if self._collected.take(document):
            self._last_token = time.monotonic()
            if self._first_token is None:
                self._first_token = self._last_token
                self._router.metrics.first_token.labels(arm.value).observe(self._last_token - self._arrived)
        if len(self._collected.prompt) > self._router.settings.max_prompt_tokens and not self._begun:
            raise _too_long(len(self._collected.prompt), self._router.settings.max_prompt_tokens)

    async def _settle(self) -> bool:
        """Record the whole answer; whether it may be given to the client to its end."""
        self._settled = True
        # The wait for the log has a limit of its own: no deadline comes between a record and the end that it speaks of.
        self._deadline.reschedule(None)
        try:
            await asyncio.shield(self._record(str(self._collected.finish_reason)))
        except LogUnavailable as error:
            return await self._unrecorded(error)
        finally:
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._router.settings.request_timeout_s)
        return True

    async def _unrecorded(self, error: LogUnavailable) -> bool:
        LOG.error("not recorded: %s", error)
        serve = self._router.settings.on_log_failure is LogFailure.SERVE_UNRECORDED
        self._router.metrics.unrecorded.labels("served" if serve else "refused").inc()
        if serve:
            self._token = ""
        elif self._begun:
            await self._send_error(unavailable("the answer could not be recorded"))
        else:
            raise unavailable("the answer could not be recorded: try again later") from error
        return serve

    async def _record(self, finish_reason: str) -> None:
        assert self._answer is not None
        made, problem = interaction(self._router.run, self._served(self._answer), self._collected, finish_reason,
                                    self._times())  # fmt: skip
        if problem:
            LOG.error("interaction %s of replica %s: %s", self._id, made.replica_id, problem)
        with self._router.metrics.acknowledgement.time():
            await self._router.recorder.write(made)
        self._router.metrics.interactions.labels(made.arm, made.finish_reason).inc()

    def _served(self, answer: Answer) -> Served:
        lot = self._lot
        if lot.arm is not answer.arm:
            lot = Lot(Arm.FALLBACK, lot.propensity)
        return Served(
            interaction_id=self._id,
            user_id=self._user,
            session_id=self._ask.session_id,
            lot=lot,
            consent=self._consent,
            trainable=not self._ask.other_sampling,
            identity=answer.identity,
        )

    def _times(self) -> Times:
        first = self._last_token if self._first_token is None else self._first_token
        return Times(1e3 * (first - self._arrived), 1e3 * (self._last_token - self._arrived), now_us())

    async def _break_off(self, finish_reason: str) -> None:
        """Record what was sent of an answer that has no end."""
        if not self._begun or self._settled:
            return
        self._settled = True
        self._collected.finish_reason = None
        try:
            # The client's departure must not take the record with it.
            await asyncio.shield(self._record(finish_reason))
        except LogUnavailable as error:
            LOG.error("not recorded: %s", error)
            self._router.metrics.unrecorded.labels(finish_reason).inc()

    async def _fail(self, error: ReplicaFailed | BadAnswer | TimeoutError) -> None:
        LOG.warning("interaction %s: %s: %s", self._id, type(error).__name__, error)
        refusal = _refusal(error)
        if not self._begun:
            raise refusal from error
        await self._break_off(FAILED)
        if self._ask.stream:
            await self._send_error(refusal)

    @asynccontextmanager
    async def _answered(self) -> AsyncIterator[Answer]:
        """The answer of the first replica that begins one: of the user's arm, then of the stable pool."""
        async with AsyncExitStack() as stack:
            answer = await self._first_answer(stack)
            self._answer = answer
            yield answer

    async def _first_answer(self, stack: AsyncExitStack) -> Answer:
        arm = self._lot.arm
        while True:
            try:
                async with AsyncExitStack() as opened:
                    answer = await self._open(opened, arm)
                    stack.push_async_exit(opened.pop_all())
                    return answer
            except NoPlace:
                LOG.warning("no replica of the %s pool answers: asking the %s pool", arm, Arm.STABLE)
                self._router.metrics.fallbacks.inc()
                arm = Arm.STABLE
            except ReplicaFailed as error:
                LOG.warning("asking another replica: %s", error)
                self._router.metrics.retries.inc()

    async def _open(self, opened: AsyncExitStack, arm: Arm) -> Answer:
        replicas = self._router.replicas
        address = await opened.enter_async_context(replicas.place(arm, wait=arm is Arm.STABLE))
        answer = await opened.enter_async_context(replicas.ask(address, arm, self._ask))
        try:
            first = await anext(answer.documents)
        except StopAsyncIteration as error:
            raise BadAnswer("the answer is empty") from error
        return replace(answer, documents=_rejoined(first, answer.documents))

    async def _send_event(self, document: dict[str, Any], ends: bool) -> None:
        await self._begin("text/event-stream; charset=utf-8")
        shown = shaped(document, self._ask.wanted, self._token if ends else "")
        await self._client.send(f"data: {json.dumps(shown, ensure_ascii=False)}\n\n".encode())

    async def _send_body(self, document: dict[str, Any]) -> None:
        await self._begin("application/json")
        shown = shaped(document, self._ask.wanted, self._token)
        await self._client.send(json.dumps(shown, ensure_ascii=False).encode())

    async def _send_error(self, refusal: Refusal) -> None:
        await self._client.send(f"data: {json.dumps(refusal.body())}\n\n".encode())

    async def _begin(self, content_type: str) -> None:
        if self._begun:
            return
        self._begun = True
        headers = {"content-type": content_type, "cache-control": "no-store"}
        await self._client.begin(200, {**headers, **({INTERACTION_HEADER: self._token} if self._token else {})})


async def _rejoined(first: dict[str, Any], rest: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    yield first
    async for document in rest:
        yield document


def _lot(router: Router, unit: str) -> Lot:
    if not router.replicas.has_canary():
        return Lot(Arm.STABLE, 1.0)
    return router.canary.lot(unit, router.settings.experiment_salt)


def _check(settings: RouterSettings, ask: Ask) -> None:
    if ask.prompt_tokens is not None and ask.prompt_tokens > settings.max_prompt_tokens:
        raise _too_long(ask.prompt_tokens, settings.max_prompt_tokens)
    if ask.other_sampling and settings.other_sampling is OtherSampling.REFUSE:
        raise bad_request(
            f"the recorded logprobs would not describe this sampling ({', '.join(ask.other_sampling)}): leave it out, "
            "or have the operator set router.other_sampling",
            ask.other_sampling[0],
        )


def _too_long(count: int, most: int) -> Refusal:
    return bad_request(f"the prompt has {count} tokens, at most {most} are served", "prompt")


def _refusal(error: ReplicaFailed | BadAnswer | TimeoutError) -> Refusal:
    match error:
        case BadAnswer():
            return Refusal(502, "a replica answered something that is no answer", "bad_gateway_error")
        case ReplicaFailed():
            return unavailable("the answer broke off")
    return Refusal(504, "no whole answer in time", "timeout_error")
