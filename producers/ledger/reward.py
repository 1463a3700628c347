"""The reward of a ledger episode, in two named parts.

- `answer`: 1 when the last turn answers with the ledger's balance, politely or not, else 0. This alone decides success.
- `tool_use`: the share of turns that the world could execute.
"""

from __future__ import annotations

from tidemill.producers.environment import Reward, Score, Transcript
from tidemill.producers.ledger import actions
from tidemill.producers.ledger.book import parse
from tidemill.schemas.records import RewardComponent, Task


class LedgerReward(Reward):
    """Right answers first, executable turns a little."""

    def __init__(self, tool_use_weight: float = 0.1) -> None:
        """`answer` weighs 1; `tool_use_weight` is the other part's weight."""
        self._tool_use_weight = tool_use_weight

    @property
    def version(self) -> str:
        """Names the formula and its weight."""
        return f"ledger-2:tool_use={self._tool_use_weight:g}"

    def score(self, task: Task, transcript: Transcript) -> Score:
        """The score of a finished transcript; an empty one scores zero. Raises `TaskError` for a bad payload."""
        success = _answered(transcript) == parse(task.payload).balance
        return Score(
            components=(
                RewardComponent("answer", float(success), 1.0),
                RewardComponent("tool_use", _executable(transcript), self._tool_use_weight),
            ),
            success=success,
        )


def _answered(transcript: Transcript) -> int | None:
    action = actions.read(transcript[-1].text) if transcript else None
    return action.value if isinstance(action, actions.Answer) else None


def _executable(transcript: Transcript) -> float:
    if not transcript:
        return 0.0
    return sum(not turn.observation.tool_error for turn in transcript) / len(transcript)
