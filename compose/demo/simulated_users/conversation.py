"""One conversation: the product poses a ledger question to the model, and runs the calculator for it until it answers.

The product speaks OpenAI's chat protocol, as products do: each request carries the whole conversation. It is the ledger
environment itself, with the router in place of a policy.
"""

from __future__ import annotations

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
        """The next turn after a conversation. Raises NotServed."""
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
        if self.turns and any(str(message["content"]).startswith("error: ") for message in _answers(messages)):
            self.errors.add(len(self.turns) - 1)
        served = await self._model.complete(messages, tools)
        self.turns.append(served)
        return Reply(served.message, "tool_calls" if served.message.get("tool_calls") else "stop")


async def converse(
    environment: LedgerEnvironment, ledger: LedgerTask, max_turns: int, model: ServedModel
) -> Conversation:
    """Pose a ledger and work it to the end. Raises NotServed."""
    policy = _ServedPolicy(model)
    await environment.play(Task("", "", "", "ledger", ledger.payload(), Mode.EVAL, 1, max_turns, 0, 0, 0, 0), policy)
    return Conversation(tuple(policy.turns), frozenset(policy.errors), ledger.balance)


def _answers(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages behind the last turn of the assistant."""
    last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
    return messages[last + 1 :]
