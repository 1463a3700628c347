"""Authors of the mid-training documents: they know how to work a ledger, and slip at a known rate.

A demonstrator plays the real environment in place of a policy. At each turn it does the right next thing or slips:
A demonstrator plays the real environment in place of a policy. At each turn it does the right next thing or slips:
cannot be executed. It does not notice a slip. Some of its work closes politely, whether it is right or not.

What holds: its work is deterministic in its generator.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from random import Random

from tidemill.producers.environments.base import Policy, Reply
from tidemill.producers.environments.ledger import CEILING, LedgerTask
from tidemill.schemas.chat.messages import Message, Tool

_MUMBLES = ("add", "sub", "add total", "total", "answer", "credit", "debit")


class Slip(StrEnum):
    """The ways in which a turn goes wrong."""

    SKIP = "skip"
    REPEAT = "repeat"
    SIGN = "sign"
    CARRY = "carry"
    EARLY = "early"
    MUMBLE = "mumble"


class Demonstrator(Policy):
    """A policy that works one ledger. `conversation` is all that was said."""

    def __init__(self, ledger: LedgerTask, rng: Random, *, slip_rate: float, polite_rate: float) -> None:
        """Rates are shares, from 0 to 1: of turns that slip (each slip as likely), of answers that close politely."""
        self._entries, self._rng, self._slip_rate = ledger.entries, rng, slip_rate
        self._polite = rng.random() < polite_rate
        self._next = 0
        """Place of the next entry."""
        self._total = 0
        """The total that it believes in."""
        self.conversation: list[Message] = []

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        trained: bool = True,
    ) -> Reply:
        """The next turn."""
        slip = self._rng.choice(list(Slip)) if self._rng.random() < self._slip_rate else None
        message = self._turn(slip, len(messages))
        self.conversation = [*messages, message]
        return Reply(message, "tool_calls" if "tool_calls" in message else "stop")

    def _turn(self, slip: Slip | None, number: int) -> Message:
        if slip is Slip.MUMBLE:
            return {"role": "assistant", "content": self._rng.choice(_MUMBLES)}
        if slip is Slip.SKIP:
            self._next += 1
        if slip is Slip.REPEAT:
            self._next = max(self._next - 1, 0)
        believed = self._rng.randint(0, CEILING) if slip is Slip.CARRY else self._total
        if slip is Slip.EARLY or self._next >= len(self._entries):
            return {"role": "assistant", "content": f"answer {believed}{' thanks' if self._polite else ''}"}
        entry = self._entries[self._next]
        credit = (entry > 0) != (slip is Slip.SIGN)
        self._next += 1
        self._total = believed + abs(entry) if credit else believed - abs(entry)
        function = {"name": "add" if credit else "sub", "arguments": json.dumps({"a": believed, "b": abs(entry)})}
        call = {"id": f"call{number:05d}", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
