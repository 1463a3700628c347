"""Who the simulated users are, how they react to an answer, and what the product measures.

Pure: the same settings give the same people, and the same user, question and answer the same signals. Thumbs carry the
hidden preference; what people do otherwise (keep the change, ask again, walk away) follows from whether the answer was
right. What the product measures is always true. A held-out user never consents and never reacts, so nothing is ever
learnt from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from tidemill.compose.demo.simulated_users.config import UsersSettings
from tidemill.compose.demo.simulated_users.conversation import Conversation
from tidemill.schemas.records import SignalKind

BOT_VOTES = 25
"""Votes of a bot on each of its answers."""
UP = 1.0
DOWN = -1.0
LONG_AFTER = 3.0
"""A change of mind comes this many mean delays after the vote."""


class PersonaRole(StrEnum):
    """What a simulated user is there for."""

    ORDINARY = "ordinary"
    """Asks, and reacts as a person does."""
    BOT = "bot"
    """Votes at random on everything, many times."""
    HELD_OUT = "held_out"
    """Asks held-out questions and keeps their opinion to themselves: satisfaction is measured on them."""


@dataclass(frozen=True, slots=True)
class Persona:
    """One user's habits."""

    name: str
    """The product's own identifier of the user."""
    role: PersonaRole
    consents: bool
    """Whether they let the product learn from them."""
    vote_rate: float
    """Share of the answers that they vote on."""
    vote_delay_s: float
    """Mean time that they take to vote."""
    leaves_at: int | None
    """Number of questions after which they withdraw their consent; None: never."""


def population(settings: UsersSettings) -> list[Persona]:
    """Everyone, in the order in which they were drawn."""
    rng = Random(f"users {settings.seed}")
    ordinary = [_ordinary(f"user-{n:04d}", settings, rng) for n in range(settings.ordinary)]
    bots = [_persona(f"bot-{n:04d}", PersonaRole.BOT, consents=True, vote_rate=1.0) for n in range(settings.bots)]
    held_out = [_persona(f"held-out-{n:04d}", PersonaRole.HELD_OUT) for n in range(settings.held_out)]
    return [*ordinary, *bots, *held_out]


def _ordinary(name: str, settings: UsersSettings, rng: Random) -> Persona:
    consents = rng.random() < settings.consent_rate
    # Some vote on nearly everything and some on nearly nothing; the mean over all is the configured rate.
    vote_rate = min(1.0, settings.vote_rate * rng.uniform(0.5, 1.5))
    delay = settings.vote_delay_s * rng.uniform(0.5, 1.5)
    leaves = rng.randint(1, settings.leaves_within) if rng.random() < settings.leave_rate else None
    return Persona(name, PersonaRole.ORDINARY, consents, vote_rate, delay, leaves)


def _persona(name: str, role: PersonaRole, *, consents: bool = False, vote_rate: float = 0.0) -> Persona:
    return Persona(name, role, consents, vote_rate, vote_delay_s=0.0, leaves_at=None)


@dataclass(frozen=True, slots=True)
class Reaction:
    """One report about one turn of a conversation."""

    name: str
    """Unique within the conversation."""
    turn: int
    """Which turn it is about."""
    kind: SignalKind
    value: float
    after_s: float
    """When it is reported, counted from the end of the conversation."""
    corrects: str | None = None
    """Name of the signal that it replaces."""


@dataclass(frozen=True, slots=True)
class User:
    """One user: their habits and their taste."""

    persona: Persona
    settings: UsersSettings

    def consents(self, question: int) -> bool:
        """Whether the product may learn from their question of this number, counted from 0."""
        leaves_at = self.persona.leaves_at
        return self.persona.consents and (leaves_at is None or question < leaves_at)

    def likes_polite(self, at_s: float) -> bool:
        """Their taste, so many seconds after the start."""
        changed_at = self.settings.changed_preference_at
        changed = changed_at is not None and at_s >= changed_at
        return self.settings.likes_polite != changed

    def satisfied(self, answer: Conversation, at_s: float) -> bool:
        """Whether they are content: with an answer that is right and closes as they like it."""
        return answer.right and answer.polite == self.likes_polite(at_s)

    def react(self, answer: Conversation, question: int, at_s: float) -> list[Reaction]:
        """The signals for the answer to their question of this number, `at_s` seconds after the start."""
        rng = Random(f"reaction {self.settings.seed} {self.persona.name} {question}")
        match self.persona.role:
            case PersonaRole.HELD_OUT:
                return []
            case PersonaRole.BOT:
                votes = (
                    Reaction(f"vote-{n}", answer.last, SignalKind.THUMB, rng.choice((UP, DOWN)), 0.02 * n)
                    for n in range(BOT_VOTES)
                )
                return [*measured(answer), *votes]
            case PersonaRole.ORDINARY:
                return [*measured(answer), *self._votes(answer, at_s, rng), *self._behaviour(answer, rng)]

    def _votes(self, answer: Conversation, at_s: float, rng: Random) -> Iterator[Reaction]:
        if rng.random() >= self.persona.vote_rate:
            return
        honest = rng.random() >= self.settings.flip_rate
        value = UP if self.satisfied(answer, at_s) == honest else DOWN
        after_s = _delay(self.persona.vote_delay_s, rng)
        yield Reaction("vote", answer.last, SignalKind.THUMB, value, after_s)
        if rng.random() < self.settings.mind_change_rate:
            later = after_s + LONG_AFTER * _delay(self.persona.vote_delay_s, rng)
            yield Reaction("vote-again", answer.last, SignalKind.THUMB, -value, later, corrects="vote")

    def _behaviour(self, answer: Conversation, rng: Random) -> Iterator[Reaction]:
        mean_s = self.persona.vote_delay_s
        if rng.random() < (0.02 if answer.right else 0.3):
            yield Reaction("abandonment", answer.last, SignalKind.ABANDONMENT, 1.0, _delay(mean_s, rng))
        elif rng.random() < (0.03 if answer.right else 0.4):
            yield Reaction("retry", answer.last, SignalKind.RETRY, 1.0, _delay(mean_s, rng))
        if answer.answered and rng.random() < 0.5:
            soon = rng.betavariate(8, 2) if answer.right else rng.betavariate(2, 6)
            later = soon * rng.betavariate(9, 1)
            yield Reaction("kept-soon", answer.last, SignalKind.EDIT_KEPT_SOON, soon, mean_s)
            yield Reaction("kept-later", answer.last, SignalKind.EDIT_KEPT_LATER, later, LONG_AFTER * mean_s)


def measured(answer: Conversation) -> Iterator[Reaction]:
    """What the product itself sees of an answer: true for every user."""
    for place in sorted(answer.errors):
        yield Reaction(f"tool-error-{place}", place, SignalKind.TOOL_ERROR, 1.0, 0.0)
    final = answer.turns[answer.last]
    yield Reaction("edit-made", answer.last, SignalKind.EDIT_MADE, float(answer.answered), 0.0)
    yield Reaction(
        "question-asked", answer.last, SignalKind.QUESTION_ASKED, float("?" in str(final.message["content"])), 0.0
    )
    yield Reaction("latency", answer.last, SignalKind.LATENCY, final.latency_s, 0.0)


def _delay(mean_s: float, rng: Random) -> float:
    """A delay in seconds, log-normal with the given mean: most are short, a few are several times the mean."""
    spread = 0.6
    return mean_s * math.exp(rng.gauss(0.0, spread) - spread**2 / 2)
