"""Clerks: the authors of the mid-training documents. They know the procedure and slip at a known rate.

A clerk works a ledger through a real world. At each turn it either does the right next thing or slips: skips or repeats
an entry, mistakes a credit for a debit, carries a wrong total, answers too early, or writes something the calculator
cannot read. A slip is not noticed, save an unreadable turn, which the tool answers with an error and the clerk repeats.
Some of the clerks' work closes politely, whether it is right or not.

What holds: a clerk's work is deterministic in its generator; only what the world answered is written as tool output.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from tidemill.producers.environment import Transcript
from tidemill.producers.ledger.actions import Answer, Call, Operation
from tidemill.producers.ledger.book import Ledger
from tidemill.producers.ledger.tasks import CEILING
from tidemill.producers.ledger.world import LedgerWorld

_MUMBLES = ("add", "sub", "add total", "total", "answer", "credit", "debit")


class Slip(StrEnum):
    """The ways in which a clerk's turn goes wrong."""

    SKIP = "skip"
    REPEAT = "repeat"
    SIGN = "sign"
    CARRY = "carry"
    EARLY = "early"
    MUMBLE = "mumble"


@dataclass(frozen=True, slots=True)
class Clerk:
    """How often a turn slips (which slip it is, is drawn evenly), and how often an attempt closes politely."""

    slip_rate: float
    polite_rate: float = 0.0

    def __post_init__(self) -> None:
        """Raises `ValueError` for a rate that is no share."""
        for name, rate in (("slip", self.slip_rate), ("polite", self.polite_rate)):
            if not 0 <= rate <= 1:
                raise ValueError(f"a clerk's {name} rate must be from 0 to 1, got {rate}")

    def work(self, ledger: Ledger, rng: Random, spare_turns: int) -> Transcript:
        """The transcript of one attempt; it may end wrong, or without an answer when the turns are spent."""
        world = LedgerWorld(ledger, len(ledger.entries) + 1 + spare_turns)
        desk = _Desk(ledger, polite=rng.random() < self.polite_rate)
        while True:
            slip = rng.choice(list(Slip)) if rng.random() < self.slip_rate else None
            if world.step(desk.turn(slip, rng)).done:
                return world.transcript


class _Desk:
    """What a clerk has before it: the next entry and the total that it believes in."""

    def __init__(self, ledger: Ledger, *, polite: bool) -> None:
        self._entries = ledger.entries
        self._polite = polite
        self._next = 0
        self._total = 0

    def turn(self, slip: Slip | None, rng: Random) -> str:
        if slip is Slip.MUMBLE:
            return rng.choice(_MUMBLES)
        if slip is Slip.SKIP:
            self._next += 1
        if slip is Slip.REPEAT:
            self._next = max(self._next - 1, 0)
        if slip is Slip.EARLY or self._next >= len(self._entries):
            return Answer(self._carried(slip, rng), self._polite).text()
        return self._book(slip, rng).text()

    def _book(self, slip: Slip | None, rng: Random) -> Call:
        entry = self._entries[self._next]
        credit = (entry > 0) != (slip is Slip.SIGN)
        call = Call(Operation.ADD if credit else Operation.SUB, self._carried(slip, rng), abs(entry))
        self._next += 1
        self._total = call.result
        return call

    def _carried(self, slip: Slip | None, rng: Random) -> int:
        return rng.randint(0, CEILING) if slip is Slip.CARRY else self._total
