"""Who the simulated users are: each a person with habits, drawn once from a seed.

What holds: the same settings give the same people; a held-out user never consents and never reacts, so nothing is ever
learnt from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from tidemill.compose.demo.simulated_users.config import UsersSettings


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
