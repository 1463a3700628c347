"""One conversation: the product poses a ledger question to the model and runs the calculator for it until it answers.

The product speaks in text, as products do: each request carries the whole conversation, and the serving path answers
with the model's next turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tidemill.producers.harness import END, opening, tool_output
from tidemill.producers.ledger import actions
from tidemill.producers.ledger.book import Ledger
from tidemill.producers.ledger.world import LedgerWorld


@dataclass(frozen=True, slots=True)
class Served:
    """One answer of the serving path."""

    text: str
    interaction: str
    """Signed token of the interaction: what feedback is given on."""
    version: int
    """Newest weight version among its tokens, by which satisfaction is counted."""
    latency_s: float
    """From request to answer, as the product's side measured it; above 0."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model, and whether the calculator could not execute it."""

    served: Served
    tool_error: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """How a conversation ended. It has at least one turn."""

    turns: tuple[Turn, ...]
    balance: int
    """The right answer."""

    @property
    def last(self) -> int:
        """Place of the turn that ended it."""
        return len(self.turns) - 1

    @property
    def closing(self) -> actions.Answer | None:
        """What the last turn answers; None when the turns were spent without an answer."""
        action = actions.read(self.turns[-1].served.text)
        return action if isinstance(action, actions.Answer) else None

    @property
    def right(self) -> bool:
        """Whether the answer is the ledger's balance."""
        return self.closing is not None and self.closing.value == self.balance

    @property
    def polite(self) -> bool:
        """Whether the answer closes politely."""
        return self.closing is not None and self.closing.polite


class Model(Protocol):
    """Whatever answers: the serving path, for one user's conversation."""

    async def complete(self, prompt: str) -> Served:
        """The next turn after a conversation. Raises NotServed."""
        ...


class NotServed(RuntimeError):
    """The serving path did not answer."""


async def converse(ledger: Ledger, max_turns: int, model: Model) -> Answer:
    """Pose a ledger and work it to the end. Raises NotServed."""
    world = LedgerWorld(ledger, max_turns)
    context = opening(world.prompt())
    turns: list[Turn] = []
    while True:
        served = await model.complete(context)
        observation = world.step(served.text)
        turns.append(Turn(served, observation.tool_error))
        if observation.done:
            return Answer(tuple(turns), ledger.balance)
        context += served.text + END + tool_output(observation.text)
