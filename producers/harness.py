"""The harness of a conversation in marked turns: tokens in, tokens out.

A context is `<|user|>prompt<|end|><|assistant|>` followed by, for each turn, the sampled ids exactly as they came, and
then `<|tool|>output<|end|><|assistant|>`. A checkpoint whose tokenizer knows the markers has one token for each; with
any other tokenizer the markers are ordinary text, and a turn ends by a stop string.

What holds: text that comes from a task or a tool cannot forge a marker.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from tidemill.producers.environment import Harness, Observation

USER = "<|user|>"
ASSISTANT = "<|assistant|>"
TOOL = "<|tool|>"
END = "<|end|>"
MARKERS = (USER, ASSISTANT, TOOL, END)

_DEFUSED = "<¦"


def defuse(text: str) -> str:
    """The text with any marker it holds made harmless."""
    return text.replace("<|", _DEFUSED)


def opening(prompt: str) -> str:
    """The context, as text, that the first turn is written in."""
    return f"{USER}{defuse(prompt)}{END}{ASSISTANT}"


def tool_output(text: str) -> str:
    """What follows a turn, as text, up to where the next turn begins."""
    return f"{TOOL}{defuse(text)}{END}{ASSISTANT}"


class TurnHarness(Harness):
    """Marked turns for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, max_turn_tokens: int = 16) -> None:
        """`max_turn_tokens` bounds one sampled turn, its end marker included."""
        self._tokenizer = tokenizer
        self._max_turn_tokens = max_turn_tokens
        self._end_id: int | None = tokenizer.token_to_id(END)

    @property
    def stop_token_ids(self) -> list[int]:
        """The end marker's token, where the tokenizer has one."""
        return [] if self._end_id is None else [self._end_id]

    @property
    def stop(self) -> list[str]:
        """The end marker as text, where the tokenizer has no token for it."""
        return [END] if self._end_id is None else []

    @property
    def max_turn_tokens(self) -> int:
        """Most tokens to sample in one turn."""
        return self._max_turn_tokens

    def open(self, prompt: str) -> list[int]:
        """Token ids of the context that the first turn is sampled from."""
        return self._encode(opening(prompt))

    def read(self, token_ids: Sequence[int]) -> str:
        """The text of a sampled turn up to its first end marker; other markers stay visible, as the text they are."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text.split(END, 1)[0]

    def observe(self, observation: Observation) -> list[int]:
        """Token ids to append after a sampled turn, up to where the next turn is sampled."""
        return self._encode(tool_output(observation.text))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
