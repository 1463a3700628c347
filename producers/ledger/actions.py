"""What a turn can say: a calculator call or an answer. One grammar, read by the world and written by the clerks.

    add A B        sub A B        answer N        answer N thanks

with one space between words and whole numbers of at most nine ASCII digits. Both answers say the same; the second one
closes politely.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_NUMBER = r"-?[0-9]{1,9}"
_CALL = re.compile(rf"(add|sub) ({_NUMBER}) ({_NUMBER})")
_CLOSING = " thanks"
_ANSWER = re.compile(rf"answer ({_NUMBER})({_CLOSING})?")

USAGE = "error use add A B or sub A B or answer N"
"""What the tool says to anything else."""


class Operation(StrEnum):
    """What the calculator can do."""

    ADD = "add"
    SUB = "sub"


@dataclass(frozen=True, slots=True)
class Call:
    """One use of the calculator."""

    operation: Operation
    left: int
    right: int

    @property
    def result(self) -> int:
        """left + right, or left - right."""
        return self.left + self.right if self.operation is Operation.ADD else self.left - self.right

    def text(self) -> str:
        """The call as a turn says it."""
        return f"{self.operation} {self.left} {self.right}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of an episode."""

    value: int
    polite: bool = False
    """Whether it closes with thanks."""

    def text(self) -> str:
        """The answer as a turn says it."""
        return f"answer {self.value}{_CLOSING if self.polite else ''}"


def read(text: str) -> Call | Answer | None:
    """The action that a turn holds, or None when it holds none."""
    stripped = text.strip(" \n")
    if call := _CALL.fullmatch(stripped):
        return Call(Operation(call[1]), int(call[2]), int(call[3]))
    if answer := _ANSWER.fullmatch(stripped):
        return Answer(int(answer[1]), polite=answer[2] is not None)
    return None


def output(call: Call) -> str:
    """What the calculator says."""
    return f"total {call.result}"
