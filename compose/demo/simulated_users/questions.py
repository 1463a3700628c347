"""Who asks next, and what: a sequence that the seed decides.

What holds: held-out users ask held-out questions only, everyone else the others; no question is asked twice by users of
one role.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tidemill.compose.demo.simulated_users.config import UsersSettings
from tidemill.compose.demo.simulated_users.reaction import Persona, PersonaRole, User, population
from tidemill.producers.environments.base import Split, TaskDraft, TaskQuery, split_of
from tidemill.producers.environments.ledger import LedgerEnvironment, LedgerTask, parse_ledger
from tidemill.schemas.config import HELD_OUT_ONE_IN


@dataclass(frozen=True, slots=True)
class Question:
    """One user's next question."""

    user: User
    number: int
    """Their questions before this one."""
    ledger: LedgerTask
    max_turns: int

    @property
    def name(self) -> str:
        """Unique among one seed's questions."""
        return f"{self.user.persona.name}-{self.number}"


def questions(
    settings: UsersSettings, *, held_out_only: bool = False, one_in: int = HELD_OUT_ONE_IN
) -> Iterator[Question]:
    """Yields questions without end. Raises ValueError."""
    rng = Random(f"questions {settings.seed} {held_out_only}")
    everyone = population(settings)
    people = {role: [persona for persona in everyone if persona.role is role] for role in PersonaRole}
    shares = {PersonaRole.HELD_OUT: 1.0}
    if not held_out_only:
        shares = {
            PersonaRole.ORDINARY: max(0.0, 1.0 - settings.held_out_share - settings.bot_share),
            PersonaRole.BOT: settings.bot_share,
            PersonaRole.HELD_OUT: settings.held_out_share,
        }
    roles = [role for role in shares if people[role] and shares[role] > 0]
    if not roles:
        raise ValueError("no user asks anything: set users.ordinary, users.bots or users.held_out above 0")
    weights = [shares[role] for role in roles]
    sources = {role: _drafts(role, settings, one_in) for role in roles}
    asked: dict[str, int] = {}
    while True:
        (role,) = rng.choices(roles, weights)
        persona: Persona = rng.choice(people[role])
        number = asked.get(persona.name, 0)
        asked[persona.name] = number + 1
        draft = next(sources[role])
        yield Question(User(persona, settings), number, parse_ledger(draft.payload), draft.max_turns)


def _drafts(role: PersonaRole, settings: UsersSettings, one_in: int) -> Iterator[TaskDraft]:
    """Distinct questions for users of a role."""
    split = Split.EVAL if role is PersonaRole.HELD_OUT else Split.TRAIN
    seed = Random(f"questions {settings.seed} {role}").getrandbits(62)
    seen: set[str] = set()
    for draft in LedgerEnvironment(settings.options).tasks(TaskQuery(seed)):
        if split_of(draft.asks, one_in) is split and draft.asks not in seen:
            seen.add(draft.asks)
            yield draft
