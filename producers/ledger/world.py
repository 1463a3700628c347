"""The world of a ledger episode: a calculator, a limit of turns, and an answer that ends it."""

from __future__ import annotations

from tidemill.producers.environment import Observation, Transcript, Turn, World
from tidemill.producers.ledger import actions
from tidemill.producers.ledger.book import Ledger, parse
from tidemill.schemas.records import Task


class LedgerWorld(World):
    """One episode. The calculator has no memory: the policy carries the running total from call to call."""

    def __init__(self, ledger: Ledger, max_turns: int) -> None:
        """An episode of at most `max_turns` turns. Raises `ValueError` when that is below 1."""
        if max_turns < 1:
            raise ValueError(f"an episode needs at least one turn, got max_turns={max_turns}")
        self._ledger = ledger
        self._max_turns = max_turns
        self._turns: list[Turn] = []

    @classmethod
    def open(cls, task: Task) -> LedgerWorld:
        """A fresh episode of `task`. Raises `TaskError` for a payload that is not a ledger."""
        return cls(parse(task.payload), task.max_turns)

    def prompt(self) -> str:
        """The entries, in order."""
        return self._ledger.prompt()

    def step(self, text: str) -> Observation:
        """Execute one turn: a call is computed, an answer ends the episode, anything else is a tool error."""
        if self._turns and self._turns[-1].observation.done:
            raise RuntimeError("the episode is over; open the task again for another")
        last = len(self._turns) + 1 >= self._max_turns
        observation = _observe(actions.read(text), last)
        self._turns.append(Turn(text, observation))
        return observation

    @property
    def transcript(self) -> Transcript:
        """The turns so far, oldest first."""
        return tuple(self._turns)


def _observe(action: actions.Call | actions.Answer | None, last: bool) -> Observation:
    match action:
        case actions.Answer():
            return Observation("", done=True, tool_error=False)
        case actions.Call():
            return Observation(actions.output(action), done=last, tool_error=False)
        case None:
            return Observation(actions.USAGE, done=last, tool_error=True)
