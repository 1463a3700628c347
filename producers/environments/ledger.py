"""The native example: total a ledger of credits and debits with a calculator tool, one call a turn, then answer.

The policy keeps the running total from call to call. An answer has the form `answer N` or `answer N thanks`. Both mean
the same; the second is polite, which the reward ignores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tidemill.producers.environments import base
from tidemill.producers.environments.toolbox import ToolBox
from tidemill.schemas.chat.messages import Message
from tidemill.schemas.records import RewardComponent, Task

MOST_ENTRIES = 10_000
LARGEST_AMOUNT = 999_999
Entry = Annotated[int, Field(ge=-LARGEST_AMOUNT, le=LARGEST_AMOUNT)]
CEILING = 49
"""Largest running balance of a drawn ledger; the smallest is 0."""
ASK = "Find the balance with the calculator, one call a turn, then reply: answer N"
_ANSWER = re.compile(r"\s*answer (-?[0-9]{1,9})( thanks)?\s*")


def add(a: int, b: int) -> int:
    """a + b"""
    return a + b


def sub(a: int, b: int) -> int:
    """a - b"""
    return a - b


CALCULATOR = ToolBox(add, sub)


class LedgerOptions(base.EnvironmentOptions):
    """Difficulty and reward of the ledgers."""

    entries: int = Field(default=4, ge=1, le=MOST_ENTRIES)
    """Entries of a ledger, which is also the number of calculator calls; a solution needs one more turn."""
    fewest_entries: int = Field(default=0, ge=0, le=MOST_ENTRIES)
    """Above 0: lengths are drawn uniformly from `fewest_entries` to `entries`."""
    spare_turns: int = Field(default=2, ge=0, le=MOST_ENTRIES)
    """Turns allowed in addition to those that a solution needs."""
    largest: int = Field(default=20, ge=1, le=CEILING // 2)
    """Largest amount of an entry."""
    tool_use_weight: float = Field(default=0.1, ge=0)
    """Weight of the share of turns that could be executed; a right answer has weight 1."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.fewest_entries > self.entries:
            raise ValueError(f"fewest_entries ({self.fewest_entries}) is above entries ({self.entries})")
        return self


class LedgerTask(BaseModel):
    """Entries in booking order: credits are positive, debits negative, and no entry is zero."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    entries: tuple[Entry, ...] = Field(min_length=1, max_length=MOST_ENTRIES)

    @model_validator(mode="after")
    def _none_is_zero(self) -> Self:
        if 0 in self.entries:
            raise ValueError("an entry is 0")
        return self

    @property
    def balance(self) -> int:
        """The right answer."""
        return sum(self.entries)

    def payload(self) -> str:
        """Return canonical JSON: equal ledgers have equal payloads."""
        return json.dumps({"entries": list(self.entries)}, separators=(",", ":"))

    def prompt(self) -> str:
        """Return the question as the policy reads it."""
        booked = " ".join(f"{'credit' if entry > 0 else 'debit'} {abs(entry)}" for entry in self.entries)
        return f"{ASK}\n{booked}"


def parse_ledger(payload: str) -> LedgerTask:
    """Return the ledger in a task's payload. Raises TaskError."""
    return base.read_payload(LedgerTask, payload, "ledger")


def closing(message: Message) -> tuple[int, bool] | None:
    """Return the balance in an answer, and whether the answer is polite; None for a turn that is no answer."""
    found = _ANSWER.fullmatch(str(message["content"]))
    return None if found is None or message.get("tool_calls") else (int(found[1]), found[2] is not None)


class LedgerEnvironment(base.Environment):
    """Total a ledger with a calculator. Rewards a right answer, and executable turns a little."""

    options_model = LedgerOptions
    version = "ledger-3"
    isolation = "loop"
    needs_tools = True
    options: LedgerOptions

    def tasks(self, query: base.TaskQuery) -> Iterator[base.TaskDraft]:
        """Yield ledgers without end; every running balance is from 0 to `CEILING`.

        Amounts do not repeat until all have been used, so that an amount identifies its entry.
        """
        rng, options = Random(f"ledger tasks {query.seed}"), self.options
        while True:
            length = rng.randint(options.fewest_entries or options.entries, options.entries)
            amounts: list[int] = []
            while len(amounts) < length:
                amounts += rng.sample(range(1, options.largest + 1), options.largest)
            balance, entries = 0, []
            for amount in amounts[:length]:
                entries.append(
                    amount * rng.choice([sign for sign in (1, -1) if 0 <= balance + sign * amount <= CEILING])
                )
                balance += entries[-1]
            ledger = LedgerTask(entries=tuple(entries))
            yield base.TaskDraft(ledger.payload(), ledger.prompt(), length + 1 + options.spare_turns)

    async def play(self, task: Task, policy: base.Policy) -> base.Score:
        """Converse until the policy answers, or has used all its turns."""
        messages: list[Message] = [{"role": "user", "content": parse_ledger(task.payload).prompt()}]
        for _ in range(task.max_turns):
            reply = await policy.chat(messages, tools=CALCULATOR.schemas)
            messages.append(reply.message)
            answers, _faults = CALCULATOR.answer(reply)
            if closing(reply.message) is not None:
                break
            messages += answers or [{"role": "user", "content": "error: call a tool, or reply: answer N"}]
        return await self.rescore(task, messages)

    async def rescore(self, task: Task, messages: Sequence[Message]) -> base.Score:
        """Score the last answer against the balance, and the share of the policy's turns that could be executed."""
        turns = [message for message in messages if message["role"] == "assistant"]
        errors = sum(
            message["role"] != "assistant" and str(message["content"]).startswith("error: ") for message in messages
        )
        answered = closing(turns[-1]) if turns else None
        right = answered is not None and answered[0] == parse_ledger(task.payload).balance
        executed = max(0.0, 1 - errors / len(turns)) if turns else 0.0
        tool_use = RewardComponent("tool_use", executed, self.options.tool_use_weight)
        return base.Score((RewardComponent("answer", float(right), 1.0), tool_use), success=right)
