"""The simulated users: their properties, their questions in order, a conversation, and their reaction to an answer.

Pure, except for the conversation: the same settings give the same people and questions, and the same user, question and
answer give the same signals. Held-out users ask only held-out questions, all others the other questions; users of one
role never ask a question twice. Thumbs carry the hidden preference; other behaviour (to keep the change, ask again,
walk away) follows from whether the answer was right. The product's measurements are always true. A held-out user never
consents and never reacts, so nothing is ever learnt from them: their satisfaction is stored only here, by weight
version; a conversation with two versions counts for neither.

In a conversation the product sends a ledger question to the model, and runs the calculator for it until it answers. It
is the ledger environment itself, with the router in place of a policy, and each request has the whole conversation.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from tidemill.compose.config import UsersSettings
from tidemill.producers.environments.base import Policy, Reply, Split, TaskDraft, TaskQuery, split_of
from tidemill.producers.environments.ledger import LedgerEnvironment, LedgerTask, closing, parse_ledger
from tidemill.schemas.chat.messages import Message, Tool
from tidemill.schemas.config import HELD_OUT_ONE_IN
from tidemill.schemas.records import Mode, SignalKind, Task


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """One answer of the router."""

    message: Message
    interaction: str
    """Signed token of the interaction, with which feedback is given."""
    version: int
    """Newest weight version among its tokens, by which satisfaction is counted."""
    latency_s: float
    """From request to answer, as the product measured it; above 0."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that has ended. It has at least one turn."""

    turns: tuple[ServedTurn, ...]
    errors: frozenset[int]
    """Indexes of the turns that the calculator could not execute."""
    balance: int
    """The right answer."""

    @property
    def last(self) -> int:
        return len(self.turns) - 1

    @property
    def answered(self) -> bool:
        """Whether the last turn is an answer; false if the turns ran out."""
        return closing(self.turns[-1].message) is not None

    @property
    def right(self) -> bool:
        found = closing(self.turns[-1].message)
        return found is not None and found[0] == self.balance

    @property
    def polite(self) -> bool:
        found = closing(self.turns[-1].message)
        return found is not None and found[1]


Complete = Callable[[Sequence[Message], Sequence[Tool]], Awaitable[ServedTurn]]
"""The router, for one user's conversation: returns the next turn. Raises NoAnswer."""


class NoAnswer(RuntimeError):
    """The router did not answer."""


class _ServedPolicy(Policy):
    def __init__(self, complete: Complete) -> None:
        self._complete = complete
        self.turns: list[ServedTurn] = []
        self.errors: set[int] = set()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        trained: bool = True,
    ) -> Reply:
        if self.turns:
            last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
            if any(str(message["content"]).startswith("error: ") for message in messages[last + 1 :]):
                self.errors.add(len(self.turns) - 1)
        served = await self._complete(messages, tools)
        self.turns.append(served)
        return Reply(served.message, "tool_calls" if served.message.get("tool_calls") else "stop")


async def converse(
    environment: LedgerEnvironment, ledger: LedgerTask, max_turns: int, complete: Complete
) -> Conversation:
    """Ask a ledger question and play it to the end. Raises NoAnswer."""
    policy = _ServedPolicy(complete)
    await environment.play(Task("", "", "", "ledger", ledger.payload(), Mode.EVAL, 1, max_turns, 0, 0, 0, 0), policy)
    return Conversation(tuple(policy.turns), frozenset(policy.errors), ledger.balance)


@dataclass(frozen=True, slots=True)
class Satisfaction:
    """The opinions of held-out users on one version's answers."""

    version: int
    satisfied: int
    right: int
    """Answers with the right balance, with either closing."""
    answers: int

    @property
    def rate(self) -> float:
        """Share of the answers that satisfied; 0 if there are none."""
        return self.satisfied / self.answers if self.answers else 0.0


@dataclass(frozen=True, slots=True)
class UserActivity:
    """The activity of the users so far."""

    conversations: int
    interactions: int
    failed: int
    """Conversations that ended because no answer came."""
    signals: dict[str, int]
    """Signals sent so far, by kind."""
    satisfaction: list[Satisfaction]


BOT_VOTES = 25
"""Votes of a bot on each of its answers."""
UP = 1.0
DOWN = -1.0
LONG_AFTER = 3.0
"""Time from a vote to a change of mind, in mean delays."""


class PersonaRole(StrEnum):
    """The purpose of a simulated user."""

    ORDINARY = "ordinary"
    """Asks, and reacts as a person does."""
    BOT = "bot"
    """Votes at random on all answers, many times."""
    HELD_OUT = "held_out"
    """Asks held-out questions and sends no signals: satisfaction is measured on them."""


@dataclass(frozen=True, slots=True)
class Reaction:
    name: str
    """Unique within the conversation."""
    turn: int
    """The index of the turn that it refers to."""
    kind: SignalKind
    value: float
    after_s: float
    """The time of its report, in seconds after the end of the conversation."""
    corrects: str | None = None
    """Name of the signal that it replaces."""


@dataclass(frozen=True, slots=True)
class User:
    """One user: their habits and their preference."""

    name: str
    """The product's own identifier of the user."""
    role: PersonaRole
    agrees: bool
    """Whether they consent at the start to the product learning from them."""
    vote_rate: float
    """Share of the answers that they vote on."""
    vote_delay_s: float
    """Mean delay of their votes."""
    leaves_at: int | None
    """Number of questions after which they withdraw their consent; None: never."""
    settings: UsersSettings = field(repr=False, compare=False)

    def consents(self, question: int) -> bool:
        """Return whether the product may learn from their question of this number, counted from 0."""
        return self.agrees and (self.leaves_at is None or question < self.leaves_at)

    def likes_polite(self, at_s: float) -> bool:
        """Return their preference at a time in seconds after the start."""
        changed_at = self.settings.changed_preference_at
        changed = changed_at is not None and at_s >= changed_at
        return self.settings.likes_polite != changed

    def satisfied(self, answer: Conversation, at_s: float) -> bool:
        """Return whether they are satisfied: the answer is right and closes in the way that they like."""
        return answer.right and answer.polite == self.likes_polite(at_s)

    def react(self, answer: Conversation, question: int, at_s: float) -> list[Reaction]:
        """Return the signals for the answer to their question of this number, `at_s` seconds after the start."""
        if self.role is PersonaRole.HELD_OUT:
            return []
        rng = Random(f"reaction {self.settings.seed} {self.name} {question}")
        found, last, mean_s = list(measured(answer)), answer.last, self.vote_delay_s
        if self.role is PersonaRole.BOT:
            for n in range(BOT_VOTES):
                found.append(Reaction(f"vote-{n}", last, SignalKind.THUMB, rng.choice((UP, DOWN)), 0.02 * n))
            return found
        # The vote.
        if rng.random() < self.vote_rate:
            honest = rng.random() >= self.settings.flip_rate
            value = UP if self.satisfied(answer, at_s) == honest else DOWN
            after_s = _delay(mean_s, rng)
            found.append(Reaction("vote", last, SignalKind.THUMB, value, after_s))
            if rng.random() < self.settings.mind_change_rate:
                changed_s = after_s + LONG_AFTER * _delay(mean_s, rng)
                found.append(Reaction("vote-again", last, SignalKind.THUMB, -value, changed_s, corrects="vote"))
        # Other behaviour follows from whether the answer was right.
        if rng.random() < (0.02 if answer.right else 0.3):
            found.append(Reaction("abandonment", last, SignalKind.ABANDONMENT, 1.0, _delay(mean_s, rng)))
        elif rng.random() < (0.03 if answer.right else 0.4):
            found.append(Reaction("retry", last, SignalKind.RETRY, 1.0, _delay(mean_s, rng)))
        if answer.answered and rng.random() < 0.5:
            soon = rng.betavariate(8, 2) if answer.right else rng.betavariate(2, 6)
            later = soon * rng.betavariate(9, 1)
            found.append(Reaction("kept-soon", last, SignalKind.EDIT_KEPT_SOON, soon, mean_s))
            found.append(Reaction("kept-later", last, SignalKind.EDIT_KEPT_LATER, later, LONG_AFTER * mean_s))
        return found


def population(settings: UsersSettings) -> list[User]:
    """Return all users, in the order in which they were drawn."""
    rng = Random(f"users {settings.seed}")
    everyone = []
    for n in range(settings.ordinary):
        agrees = rng.random() < settings.consent_rate
        # Vote rates differ from user to user; their mean is the configured rate.
        vote_rate = min(1.0, settings.vote_rate * rng.uniform(0.5, 1.5))
        delay = settings.vote_delay_s * rng.uniform(0.5, 1.5)
        leaves = rng.randint(1, settings.leaves_within) if rng.random() < settings.leave_rate else None
        everyone.append(User(f"user-{n:04d}", PersonaRole.ORDINARY, agrees, vote_rate, delay, leaves, settings))
    bots, held_out = range(settings.bots), range(settings.held_out)
    everyone += (User(f"bot-{n:04d}", PersonaRole.BOT, True, 1.0, 0.0, None, settings) for n in bots)
    everyone += (User(f"held-out-{n:04d}", PersonaRole.HELD_OUT, False, 0.0, 0.0, None, settings) for n in held_out)
    return everyone


def measured(answer: Conversation) -> Iterator[Reaction]:
    """Yield the product's own measurements of an answer: the same for every user."""
    for place in sorted(answer.errors):
        yield Reaction(f"tool-error-{place}", place, SignalKind.TOOL_ERROR, 1.0, 0.0)
    final = answer.turns[answer.last]
    yield Reaction("edit-made", answer.last, SignalKind.EDIT_MADE, float(answer.answered), 0.0)
    yield Reaction(
        "question-asked", answer.last, SignalKind.QUESTION_ASKED, float("?" in str(final.message["content"])), 0.0
    )
    yield Reaction("latency", answer.last, SignalKind.LATENCY, final.latency_s, 0.0)


def _delay(mean_s: float, rng: Random) -> float:
    """Return a delay in seconds, log-normal with the given mean: most are short, a few several times the mean."""
    spread = 0.6
    return mean_s * math.exp(rng.gauss(0.0, spread) - spread**2 / 2)


@dataclass(frozen=True, slots=True)
class Question:
    user: User
    number: int
    """The number of their earlier questions."""
    ledger: LedgerTask
    max_turns: int

    @property
    def name(self) -> str:
        """A name that is unique among one seed's questions."""
        return f"{self.user.name}-{self.number}"


def questions(
    settings: UsersSettings, *, held_out_only: bool = False, one_in: int = HELD_OUT_ONE_IN
) -> Iterator[Question]:
    """Yield questions without end. Raises ValueError."""
    rng = Random(f"questions {settings.seed} {held_out_only}")
    everyone = population(settings)
    people = {role: [user for user in everyone if user.role is role] for role in PersonaRole}
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
    counts: dict[str, int] = {}
    while True:
        (role,) = rng.choices(roles, weights)
        user = rng.choice(people[role])
        number = counts.get(user.name, 0)
        counts[user.name] = number + 1
        draft = next(sources[role])
        yield Question(user, number, parse_ledger(draft.payload), draft.max_turns)


def _drafts(role: PersonaRole, settings: UsersSettings, one_in: int) -> Iterator[TaskDraft]:
    """Yield distinct questions for users of a role."""
    split = Split.EVAL if role is PersonaRole.HELD_OUT else Split.TRAIN
    seed = Random(f"questions {settings.seed} {role}").getrandbits(62)
    seen: set[str] = set()
    for draft in LedgerEnvironment(settings.options).tasks(TaskQuery(seed)):
        if split_of(draft.asks, one_in) is split and draft.asks not in seen:
            seen.add(draft.asks)
            yield draft
