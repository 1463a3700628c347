"""One conversation: the product poses a ledger question to the model, and runs the calculator for it until it answers.

The product speaks OpenAI's chat protocol, as products do: each request carries the whole conversation. It is the ledger
environment itself, with the router in place of a policy. How satisfied the held-out users are with the answers is known
to them alone, by weight version; a conversation that saw two versions counts for neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tidemill.producers.environments.base import Policy, Reply
from tidemill.producers.environments.ledger import LedgerEnvironment, LedgerTask, closing
from tidemill.schemas.chat.messages import Message, Tool
from tidemill.schemas.records import Mode, Task


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """One answer of the router."""

    message: Message
    interaction: str
    """Signed token of the interaction: what feedback is given on."""
    version: int
    """Newest weight version among its tokens, by which satisfaction is counted."""
    latency_s: float
    """From request to answer, as the product's side measured it; above 0."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that has ended. It has at least one turn."""

    turns: tuple[ServedTurn, ...]
    errors: frozenset[int]
    """Places of the turns that the calculator could not execute."""
    balance: int
    """The right answer."""

    @property
    def last(self) -> int:
        """Place of the turn that ended it."""
        return len(self.turns) - 1

    @property
    def answered(self) -> bool:
        """Whether the last turn is an answer; not so when the turns were spent."""
        return closing(self.turns[-1].message) is not None

    @property
    def right(self) -> bool:
        """Whether the answer is the ledger's balance."""
        found = closing(self.turns[-1].message)
        return found is not None and found[0] == self.balance

    @property
    def polite(self) -> bool:
        """Whether the answer closes politely."""
        found = closing(self.turns[-1].message)
        return found is not None and found[1]


class ServedModel(Protocol):
    """The router, for one user's conversation."""

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool]) -> ServedTurn:
        """The next turn after a conversation. Raises NoAnswer."""
        ...


class NoAnswer(RuntimeError):
    """The router did not answer."""


class _ServedPolicy(Policy):
    """The router as a policy."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
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
        served = await self._model.complete(messages, tools)
        self.turns.append(served)
        return Reply(served.message, "tool_calls" if served.message.get("tool_calls") else "stop")


async def converse(
    environment: LedgerEnvironment, ledger: LedgerTask, max_turns: int, model: ServedModel
) -> Conversation:
    """Pose a ledger and work it to the end. Raises NoAnswer."""
    policy = _ServedPolicy(model)
    await environment.play(Task("", "", "", "ledger", ledger.payload(), Mode.EVAL, 1, max_turns, 0, 0, 0, 0), policy)
    return Conversation(tuple(policy.turns), frozenset(policy.errors), ledger.balance)


@dataclass(frozen=True, slots=True)
class Satisfaction:
    """What held-out users thought of one version's answers."""

    version: int
    satisfied: int
    right: int
    """Answers with the right balance, closed as the user likes it or not."""
    answers: int

    @property
    def rate(self) -> float:
        """Share of the answers that satisfied; 0 where there is none."""
        return self.satisfied / self.answers if self.answers else 0.0


class SatisfactionTally:
    """Counts held-out answers."""

    def __init__(self) -> None:
        self._answers: Counter[int] = Counter()
        self._satisfied: Counter[int] = Counter()
        self._right: Counter[int] = Counter()

    def count(self, answer: Conversation, *, satisfied: bool) -> None:
        """Take one held-out user's answer and their opinion."""
        versions = {turn.version for turn in answer.turns}
        if len(versions) != 1:
            return
        (version,) = versions
        self._answers[version] += 1
        self._satisfied[version] += satisfied
        self._right[version] += answer.right

    def by_version(self) -> list[Satisfaction]:
        """The counts so far, oldest version first."""
        return [
            Satisfaction(version, self._satisfied[version], self._right[version], count)
            for version, count in sorted(self._answers.items())
        ]
