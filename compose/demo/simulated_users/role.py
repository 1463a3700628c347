"""The process of the simulated users, and the product that they use over its public ways alone: router and SDK."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from tidemill.compose.demo.simulated_users.config import UsersSettings
from tidemill.compose.demo.simulated_users.conversation import NoAnswer, ServedTurn
from tidemill.compose.demo.simulated_users.crowd import Crowd, Product, Seen, UserReport
from tidemill.compose.demo.simulated_users.questions import Question
from tidemill.producers.feedback import AsyncFeedbackProducer
from tidemill.producers.product.settings import ProductSettings
from tidemill.schemas.chat.messages import Message, Tool, checked_message
from tidemill.schemas.config import KafkaSettings

PATH = "/v1/chat/completions"
CONSENT_HEADER = "x-tidemill-consent"
SOURCE = "simulated-product"


@dataclass(frozen=True, slots=True)
class _ServedModel:
    """The model, for one conversation of one user."""

    session: aiohttp.ClientSession
    settings: UsersSettings
    user_id: str
    session_id: str
    consent: bool

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool]) -> ServedTurn:
        """The next turn after a conversation. Raises NoAnswer, RuntimeError."""
        began = time.monotonic()
        headers = {CONSENT_HEADER: "yes" if self.consent else "no"}
        try:
            async with self.session.post(PATH, json=self._body(messages, tools), headers=headers) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise NoAnswer(f"{type(error).__name__}: {error}") from error
        if response.status != 200:
            raise NoAnswer(f"HTTP {response.status}: {body[:300].decode('utf-8', 'replace')}")
        return served(body, time.monotonic() - began)

    def _body(self, messages: Sequence[Message], tools: Sequence[Tool]) -> dict[str, Any]:
        return {
            "messages": list(messages),
            "tools": list(tools),
            "max_tokens": self.settings.max_turn_tokens,
            "temperature": self.settings.temperature,
            "return_token_ids": True,
            "user": self.user_id,
            "metadata": {"session_id": self.session_id},
        }


def served(body: bytes, latency_s: float) -> ServedTurn:
    """One answer of the router. Raises RuntimeError."""
    try:
        answer = json.loads(body)
        (choice,) = answer["choices"]
        return ServedTurn(
            message=checked_message(choice["message"], "message"),
            interaction=str(answer["tidemill"]["interaction"]),
            version=max(int(span[0]) for span in choice["weight_versions"]),
            latency_s=latency_s,
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:  # BadMessage is a ValueError
        raise RuntimeError(f"the router answered {body[:300]!r}: {error!r}") from error


@dataclass(frozen=True, slots=True)
class ServedProduct:
    """The product's backend: its router and its feedback SDK."""

    session: aiohttp.ClientSession
    feedback: AsyncFeedbackProducer
    settings: UsersSettings

    def model(self, user_id: str, session_id: str, *, consent: bool) -> _ServedModel:
        """The model, for one conversation of a user."""
        return _ServedModel(self.session, self.settings, user_id, session_id, consent)

    async def report(self, report: UserReport) -> None:
        """Send one signal. Raises what the SDK raises."""
        await self.feedback.send(
            report.interaction,
            report.kind,
            report.value,
            user=report.user_id,
            event_id=report.event_id,
            corrects=report.corrects,
        )


@asynccontextmanager
async def open_product(
    kafka: KafkaSettings, product: ProductSettings, settings: UsersSettings
) -> AsyncIterator[ServedProduct]:
    """The product; at the end its connections are closed and its feedback is with the log. Raises KeysMissing."""
    key = settings.api_key.get_secret_value()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=settings.request_timeout_s)
    async with (
        aiohttp.ClientSession(settings.router, headers=headers, timeout=timeout) as session,
        AsyncFeedbackProducer(kafka, product, source=SOURCE, deadline_s=settings.request_timeout_s) as feedback,
    ):
        yield ServedProduct(session, feedback, settings)


Say = Callable[[Seen], None]
"""Told what the users have seen so far, now and then and once at the end."""


def run(
    kafka: KafkaSettings, product: ProductSettings, settings: UsersSettings, asked: Iterator[Question], say: Say
) -> None:
    """Let users ask `asked` until it ends, or SIGINT or SIGTERM comes.

    Raises:
        ValueError, TaskError: the settings leave nobody, or nothing, to ask.
        KeysMissing: the product's keys are not configured.
        RuntimeError: the router is not Tidemill's.
        FeedbackNotDelivered and the SDK's other errors.
    """

    async def main() -> None:
        async with open_product(kafka, product, settings) as opened:
            await simulate(settings, opened, asked, say)

    try:
        asyncio.run(main())
    except ExceptionGroup as group:
        # The first error is the cause; the group around it says nothing to the person at the keyboard.
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from group


async def simulate(settings: UsersSettings, product: Product, asked: Iterator[Question], say: Say) -> None:
    """Hold the conversations of `asked` with a product until they end, or a signal or the caller ends them."""
    crowd = Crowd(settings, product)
    asking = asyncio.create_task(crowd.ask(asked))
    telling = asyncio.create_task(_tell(crowd, settings.report_every_s, say))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asking.cancel)
    try:
        await asyncio.wait({asking})
    finally:
        asking.cancel()
        telling.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    say(crowd.seen())
    if not asking.cancelled():
        asking.result()


async def _tell(crowd: Crowd, every_s: float, say: Say) -> None:
    while True:
        await asyncio.sleep(every_s)
        say(crowd.seen())
