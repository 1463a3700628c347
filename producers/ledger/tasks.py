"""Draws ledger tasks.

What holds: the hash of a payload alone decides its split, so no payload is ever on both sides; a query yields distinct
payloads and always the same ones; every running balance of a drawn ledger lies within 0 and `CEILING`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from random import Random

from tidemill.producers.environment import Split, TaskDraft, TaskError, TaskQuery
from tidemill.producers.ledger.book import MOST_ENTRIES, Ledger

CEILING = 49
_LARGEST = CEILING // 2
_HELD_OUT_ONE_IN = 8
_PATIENCE = 10_000


@dataclass(frozen=True, slots=True)
class LedgerOptions:
    """How hard the tasks are."""

    entries: int = 4
    """Entries of a ledger, and so the calculator calls that it needs; a solution takes one turn more."""
    fewest_entries: int = 0
    """When above 0, lengths are drawn evenly from `fewest_entries` to `entries`."""
    spare_turns: int = 2
    """Turns allowed beyond what a solution needs."""
    largest: int = 20
    """Largest amount of an entry."""

    def __post_init__(self) -> None:
        """Raises `TaskError` for an option out of its range."""
        _within("entries", self.entries, 1, MOST_ENTRIES)
        _within("fewest_entries", self.fewest_entries, 0, self.entries)
        _within("spare_turns", self.spare_turns, 0, MOST_ENTRIES)
        _within("largest", self.largest, 1, _LARGEST)

    @classmethod
    def of(cls, options: Mapping[str, int]) -> LedgerOptions:
        """The options by name. Raises `TaskError` for a name that is not one."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise TaskError(f"ledger has no option {unknown[0]!r}; its options are {', '.join(sorted(known))}")
        return cls(**options)


def split_of(payload: str) -> Split:
    """The side of the division that a payload falls on: one in eight is held out."""
    digest = hashlib.blake2b(payload.encode(), digest_size=8).digest()
    return Split.EVAL if int.from_bytes(digest, "little") % _HELD_OUT_ONE_IN == 0 else Split.TRAIN


def draw(query: TaskQuery) -> Iterator[TaskDraft]:
    """Yields `count` distinct drafts of the split. Raises `TaskError` when the options allow no more of them."""
    options = LedgerOptions.of(query.options)
    rng = Random(f"ledger tasks {query.split} {query.seed}")
    for ledger in ledgers(rng, query.count, query.split, options):
        yield TaskDraft(ledger.payload(), len(ledger.entries) + 1 + options.spare_turns, query.split)


def ledgers(rng: Random, count: int, split: Split, options: LedgerOptions) -> Iterator[Ledger]:
    """Yields `count` distinct ledgers of the split. Raises `TaskError` when the options allow no more of them."""
    seen: set[str] = set()
    misses = 0
    while len(seen) < count:
        ledger = _invent(rng, options)
        payload = ledger.payload()
        if payload in seen or split_of(payload) is not split:
            misses += 1
            if misses > _PATIENCE:
                raise TaskError(f"only {len(seen)} distinct ledgers found for {options}; ask for fewer or longer ones")
            continue
        misses = 0
        seen.add(payload)
        yield ledger


def _invent(rng: Random, options: LedgerOptions) -> Ledger:
    length = rng.randint(options.fewest_entries or options.entries, options.entries)
    balance, entries = 0, []
    for amount in _amounts(rng, length, options.largest):
        entry = _signed(rng, amount, balance)
        balance += entry
        entries.append(entry)
    return Ledger(tuple(entries))


def _amounts(rng: Random, length: int, largest: int) -> list[int]:
    """Amounts that do not repeat until all have been used, so that an entry is found by its amount."""
    amounts: list[int] = []
    while len(amounts) < length:
        amounts += rng.sample(range(1, largest + 1), largest)
    return amounts[:length]


def _signed(rng: Random, amount: int, balance: int) -> int:
    signs = [sign for sign in (1, -1) if 0 <= balance + sign * amount <= CEILING]
    return amount * rng.choice(signs)


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise TaskError(f"ledger option {name} must be from {low} to {high}, got {value}")
