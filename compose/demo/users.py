"""The process of the simulated users: conversations at a bounded rate, their signals at the due times, and the product,
which they use only over its public interfaces, router and SDK.

Invariants: at most `concurrency` conversations at a time and `interactions_per_second` requests a second; a signal is
sent once, after its delay; after a cancellation no task continues in the background, and signals that were not due yet
are dropped, because their users have left.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import aiohttp

from tidemill.compose.config import UsersSettings
from tidemill.compose.demo.people import (
    NoAnswer,
    PersonaRole,
    Question,
    Satisfaction,
    ServedTurn,
    UserActivity,
    converse,
)
from tidemill.producers.environments.ledger import LedgerEnvironment
from tidemill.producers.feedback import AsyncFeedbackProducer
from tidemill.producers.product.settings import ProductSettings
from tidemill.schemas.chat.messages import Message, Tool, checked_message
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import SignalKind

LOG = logging.getLogger(__name__)
COOL_OFF_S = 0.5
"""The delay of the next conversation after a user got no answer."""


class SimulatedUsers:
    """All users of the product. Create it inside the event loop that runs it."""

    def __init__(self, settings: UsersSettings, product: ServedProduct) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._product = product
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._gap_s = 1.0 / settings.interactions_per_second
        self._free_at = self._began
        """The time at which the next request may begin."""
        self._shuffle = thumb_shuffle(settings.seed, settings.shuffle_window) if settings.shuffle_thumbs else None
        self._environment = LedgerEnvironment(settings.options)
        self._opinions: defaultdict[int, list[tuple[bool, bool]]] = defaultdict(list)
        """By version: for each answer to a held-out user, whether it satisfied them, and whether it was right."""
        self._counts: Counter[str] = Counter()
        self._signals: Counter[str] = Counter()

    async def ask(self, questions: Iterable[Question]) -> None:
        """Hold the conversation of each question and send its signals. Raises the errors of the product's SDK."""
        async with asyncio.TaskGroup() as group:
            for question in questions:
                await self._slots.acquire()
                group.create_task(self._hold(question))

    def seen(self) -> UserActivity:
        counts = self._counts
        return UserActivity(
            counts["conversations"],
            counts["interactions"],
            counts["failed"],
            dict(sorted(self._signals.items())),
            [
                Satisfaction(
                    version, sum(happy for happy, _ in opinions), sum(right for _, right in opinions), len(opinions)
                )
                for version, opinions in sorted(self._opinions.items())
            ],
        )

    async def _hold(self, question: Question) -> None:
        user = question.user
        consent = user.consents(question.number)

        async def complete(messages: Sequence[Message], tools: Sequence[Tool]) -> ServedTurn:
            now = self._loop.time()
            begin = max(now, self._free_at)
            self._free_at = begin + self._gap_s
            await asyncio.sleep(begin - now)
            turn = await self._product.complete(
                messages, tools, user_id=user.name, session_id=question.name, consent=consent
            )
            self._counts["interactions"] += 1
            return turn

        try:
            answer = await converse(self._environment, question.ledger, question.max_turns, complete)
            self._counts["conversations"] += 1
        except NoAnswer as error:
            LOG.info("conversation %s was given up: %s", question.name, error)
            self._counts["failed"] += 1
            await asyncio.sleep(COOL_OFF_S)
            return
        finally:
            self._slots.release()
        ended = self._loop.time()
        at_s = ended - self._began
        versions = {turn.version for turn in answer.turns}
        if user.role is PersonaRole.HELD_OUT and len(versions) == 1:
            self._opinions[versions.pop()].append((user.satisfied(answer, at_s), answer.right))
        for reaction in sorted(user.react(answer, question.number, at_s), key=lambda each: each.after_s):
            await asyncio.sleep(max(0.0, ended + reaction.after_s - self._loop.time()))
            value = reaction.value
            if self._shuffle is not None and reaction.kind is SignalKind.THUMB:
                value = self._shuffle(value)
            self._signals[reaction.kind.value] += 1
            await self._product.report(
                answer.turns[reaction.turn].interaction,
                reaction.kind,
                value,
                user=user.name,
                event_id=f"{question.name}-{reaction.name}",
                corrects=reaction.corrects and f"{question.name}-{reaction.corrects}",
            )


def thumb_shuffle(seed: int, window: int) -> Callable[[float], float]:
    """Return a control: a function that exchanges each vote with an earlier vote.

    The votes are then independent of their answers, but keep their number, their times and their share of thumbs up.
    `window` is even: half of the votes before the first ones are up and half are down.
    """
    rng, held = Random(f"shuffled thumbs {seed}"), [1.0, -1.0] * (window // 2)

    def exchange(vote: float) -> float:
        place = rng.randrange(len(held))
        earlier, held[place] = held[place], vote
        return earlier

    return exchange


PATH = "/v1/chat/completions"
CONSENT_HEADER = "x-tidemill-consent"
SOURCE = "simulated-product"


def served(body: bytes, latency_s: float) -> ServedTurn:
    """Parse one answer of the router. Raises RuntimeError."""
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

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, user_id: str, session_id: str, consent: bool
    ) -> ServedTurn:
        """Return the next turn after a user's conversation. Raises NoAnswer, RuntimeError."""
        began = time.monotonic()
        headers = {CONSENT_HEADER: "yes" if consent else "no"}
        request = {
            "messages": list(messages),
            "tools": list(tools),
            "max_tokens": self.settings.max_turn_tokens,
            "temperature": self.settings.temperature,
            "return_token_ids": True,
            "user": user_id,
            "metadata": {"session_id": session_id},
        }
        try:
            async with self.session.post(PATH, json=request, headers=headers) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise NoAnswer(f"{type(error).__name__}: {error}") from error
        if response.status != 200:
            raise NoAnswer(f"HTTP {response.status}: {body[:300].decode('utf-8', 'replace')}")
        return served(body, time.monotonic() - began)

    async def report(
        self, interaction: str, kind: SignalKind, value: float, *, user: str, event_id: str, corrects: str | None
    ) -> None:
        """Send one signal about an interaction, named by its signed token. Raises the errors of the SDK."""
        await self.feedback.send(interaction, kind, value, user=user, event_id=event_id, corrects=corrects)


@asynccontextmanager
async def open_product(
    kafka: KafkaSettings, product: ProductSettings, settings: UsersSettings
) -> AsyncIterator[ServedProduct]:
    """Yield the product; at the end close its connections and flush its feedback to the log. Raises KeysMissing."""
    key = settings.api_key.get_secret_value()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=settings.request_timeout_s)
    # The users bound their requests (`users.concurrency`); aiohttp's own bound would delay some of them.
    unbounded = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(settings.router, headers=headers, timeout=timeout, connector=unbounded) as session,
        AsyncFeedbackProducer(kafka, product, source=SOURCE, deadline_s=settings.request_timeout_s) as feedback,
    ):
        yield ServedProduct(session, feedback, settings)


Say = Callable[[UserActivity], None]
"""Called with the users' activity so far, at intervals and once at the end."""


def run(
    kafka: KafkaSettings, product: ProductSettings, settings: UsersSettings, upcoming: Iterator[Question], say: Say
) -> None:
    """Let users ask the `upcoming` questions until they end, or until SIGINT or SIGTERM.

    Raises:
        ValueError, TaskError: with these settings there are no users or no questions.
        KeysMissing: the product's keys are not configured.
        RuntimeError: the router is not Tidemill's.
        FeedbackNotDelivered and the SDK's other errors.
    """

    async def main() -> None:
        async with open_product(kafka, product, settings) as opened:
            await simulate(settings, opened, upcoming, say)

    try:
        asyncio.run(main())
    except ExceptionGroup as group:
        # The first error is the cause; the group around it is of no use to the operator.
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from group


async def simulate(settings: UsersSettings, product: ServedProduct, upcoming: Iterator[Question], say: Say) -> None:
    """Hold the conversations of the `upcoming` questions with a product, until they, a signal or the caller end it."""
    crowd = SimulatedUsers(settings, product)
    asking = asyncio.create_task(crowd.ask(upcoming))

    async def tell() -> None:
        while True:
            await asyncio.sleep(settings.report_every_s)
            say(crowd.seen())

    telling = asyncio.create_task(tell())
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
