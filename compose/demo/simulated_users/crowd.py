"""Runs the simulated users: conversations at a bounded pace, and their signals when each is due.

What holds: at most `concurrency` conversations at a time and `interactions_per_second` requests a second; a signal is
sent once, when its delay has passed; on cancellation nothing goes on behind the caller's back, and signals that were
not due yet are dropped, since their users have left.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from tidemill.compose.demo.simulated_users.config import UsersSettings
from tidemill.compose.demo.simulated_users.conversation import (
    Conversation,
    NoAnswer,
    Satisfaction,
    SatisfactionTally,
    ServedModel,
    ServedTurn,
    converse,
)
from tidemill.compose.demo.simulated_users.questions import Question
from tidemill.compose.demo.simulated_users.reaction import PersonaRole, Reaction
from tidemill.producers.environments.ledger import LedgerEnvironment
from tidemill.schemas.chat.messages import Message, Tool
from tidemill.schemas.records import SignalKind

LOG = logging.getLogger(__name__)
COOL_OFF_S = 0.5
"""A user who got no answer lets the next one wait so long."""


@dataclass(frozen=True, slots=True)
class UserReport:
    """One signal as the product's backend hands it to the feedback SDK."""

    event_id: str
    interaction: str
    """Signed token of the interaction."""
    user_id: str
    kind: SignalKind
    value: float
    corrects: str | None


class Product(Protocol):
    """The product that the users use: the router, and feedback."""

    def model(self, user_id: str, session_id: str, *, consent: bool) -> ServedModel:
        """The model, for one conversation of a user."""
        ...

    async def report(self, report: UserReport) -> None:
        """Send one signal."""
        ...


@dataclass(frozen=True, slots=True)
class Seen:
    """What the users have seen and done so far."""

    conversations: int
    interactions: int
    failed: int
    """Conversations given up because no answer came."""
    signals: dict[str, int]
    """Sent so far, by kind."""
    satisfaction: list[Satisfaction]


class Pace:
    """Spaces requests evenly."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        self._gap_s = 1.0 / per_second
        self._clock = clock
        self._free_at = clock()

    def take(self) -> float:
        """Seconds to wait before the next request, whose place is taken by asking."""
        now = self._clock()
        begin = max(now, self._free_at)
        self._free_at = begin + self._gap_s
        return begin - now


class Crowd:
    """Everyone who uses the product. Make it inside the event loop that runs it."""

    def __init__(self, settings: UsersSettings, product: Product) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._product = product
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._pace = Pace(settings.interactions_per_second, self._loop.time)
        self._shuffle = ThumbShuffle(settings.seed, settings.shuffle_window) if settings.shuffle_thumbs else None
        self._environment = LedgerEnvironment(settings.options)
        self._tally = SatisfactionTally()
        self._counts: Counter[str] = Counter()
        self._signals: Counter[str] = Counter()

    async def ask(self, asked: Iterable[Question]) -> None:
        """Hold the conversation of each question and send its signals. Raises what the product's SDK raises."""
        async with asyncio.TaskGroup() as group:
            for question in asked:
                await self._slots.acquire()
                group.create_task(self._hold(question))

    def seen(self) -> Seen:
        """What has happened so far."""
        counts = self._counts
        return Seen(
            counts["conversations"],
            counts["interactions"],
            counts["failed"],
            dict(sorted(self._signals.items())),
            self._tally.by_version(),
        )

    async def _hold(self, question: Question) -> None:
        try:
            answer = await self._converse(question)
        finally:
            self._slots.release()
        if answer is not None:
            await self._react(question, answer)

    async def _converse(self, question: Question) -> Conversation | None:
        user = question.user
        model = self._product.model(user.persona.name, question.name, consent=user.consents(question.number))
        try:
            answer = await converse(
                self._environment, question.ledger, question.max_turns, _Paced(model, self._pace, self._counts)
            )
        except NoAnswer as error:
            LOG.info("conversation %s was given up: %s", question.name, error)
            self._counts["failed"] += 1
            await asyncio.sleep(COOL_OFF_S)
            return None
        self._counts["conversations"] += 1
        return answer

    async def _react(self, question: Question, answer: Conversation) -> None:
        ended = self._loop.time()
        at_s = ended - self._began
        if question.user.persona.role is PersonaRole.HELD_OUT:
            self._tally.count(answer, satisfied=question.user.satisfied(answer, at_s))
        signals = question.user.react(answer, question.number, at_s)
        for signal in sorted(signals, key=lambda signal: signal.after_s):
            await asyncio.sleep(max(0.0, ended + signal.after_s - self._loop.time()))
            await self._send(question, answer, signal)

    async def _send(self, question: Question, answer: Conversation, signal: Reaction) -> None:
        value = signal.value
        if self._shuffle is not None and signal.kind is SignalKind.THUMB:
            value = self._shuffle.exchange(value)
        self._signals[signal.kind.value] += 1
        await self._product.report(
            UserReport(
                event_id=f"{question.name}-{signal.name}",
                interaction=answer.turns[signal.turn].interaction,
                user_id=question.user.persona.name,
                kind=signal.kind,
                value=value,
                corrects=signal.corrects and f"{question.name}-{signal.corrects}",
            )
        )


class _Paced:
    """A model that is asked no faster than the pace."""

    def __init__(self, model: ServedModel, pace: Pace, counts: Counter[str]) -> None:
        self._model = model
        self._pace = pace
        self._counts = counts

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool]) -> ServedTurn:
        await asyncio.sleep(self._pace.take())
        served = await self._model.complete(messages, tools)
        self._counts["interactions"] += 1
        return served


class ThumbShuffle:
    """A control: exchanges each vote with one among the votes before it.

    The votes then say nothing about their answers, though they are as many, as late and as often up.
    """

    def __init__(self, seed: int, window: int) -> None:
        """`window` is even: the votes before the first ones are half up and half down."""
        self._rng = Random(f"shuffled thumbs {seed}")
        self._held = [1.0, -1.0] * (window // 2)

    def exchange(self, vote: float) -> float:
        """An earlier vote in place of this one, which is kept for a later one."""
        place = self._rng.randrange(len(self._held))
        earlier, self._held[place] = self._held[place], vote
        return earlier
