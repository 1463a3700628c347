"""Who asks next, and what: a sequence that the seed decides.

What holds: held-out users ask held-out ledgers only, everyone else the others; no question is asked twice by users of
one role.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tidemill.producers.environment import Split
from tidemill.producers.ledger.book import Ledger
from tidemill.producers.ledger.tasks import LedgerOptions, ledgers
from tidemill.producers.users.config import UsersSettings
from tidemill.producers.users.persona import Persona, Role, population
from tidemill.producers.users.reaction import User

MOST_QUESTIONS = 1_000_000


class NobodyAsks(ValueError):
    """The settings leave nobody to ask a question."""


@dataclass(frozen=True, slots=True)
class Question:
    """One user's next question."""

    user: User
    number: int
    """His questions before this one."""
    ledger: Ledger
    max_turns: int

    @property
    def name(self) -> str:
        """Unique among one seed's questions."""
        return f"{self.user.persona.name}-{self.number}"


def questions(settings: UsersSettings, *, held_out_only: bool = False) -> Iterator[Question]:
    """Yields questions without end, as far as there are distinct ledgers. Raises NobodyAsks, TaskError."""
    options = LedgerOptions.of(settings.options)
    rng = Random(f"questions {settings.seed} {held_out_only}")
    everyone = population(settings)
    people = {role: [persona for persona in everyone if persona.role is role] for role in Role}
    shares = {Role.HELD_OUT: 1.0} if held_out_only else _shares(settings)
    roles = [role for role in shares if people[role] and shares[role] > 0]
    if not roles:
        raise NobodyAsks("no user asks anything: set users.ordinary, users.bots or users.held_out above 0")
    weights = [shares[role] for role in roles]
    sources = {role: _ledgers(role, settings, options) for role in roles}
    asked: dict[str, int] = {}
    while True:
        (role,) = rng.choices(roles, weights)
        persona: Persona = rng.choice(people[role])
        number = asked.get(persona.name, 0)
        asked[persona.name] = number + 1
        ledger = next(sources[role])
        yield Question(User(persona, settings), number, ledger, len(ledger.entries) + 1 + options.spare_turns)


def _ledgers(role: Role, settings: UsersSettings, options: LedgerOptions) -> Iterator[Ledger]:
    split = Split.EVAL if role is Role.HELD_OUT else Split.TRAIN
    return ledgers(Random(f"questions {settings.seed} {role}"), MOST_QUESTIONS, split, options)


def _shares(settings: UsersSettings) -> dict[Role, float]:
    ordinary = max(0.0, 1.0 - settings.held_out_share - settings.bot_share)
    return {Role.ORDINARY: ordinary, Role.BOT: settings.bot_share, Role.HELD_OUT: settings.held_out_share}
