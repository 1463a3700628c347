"""A ledger: the list of entries that a task asks about, and its form as a payload and as a prompt.

What holds: equal ledgers have equal payloads (canonical JSON), so that a payload's hash names the task.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate

from tidemill.producers.environment import TaskError

MOST_ENTRIES = 10_000
LARGEST_AMOUNT = 999_999


@dataclass(frozen=True, slots=True)
class Ledger:
    """Entries in the order in which they are booked: a credit is positive, a debit negative, none is zero."""

    entries: tuple[int, ...]

    @property
    def balance(self) -> int:
        """The right answer: the sum of the entries."""
        return sum(self.entries)

    @property
    def running(self) -> tuple[int, ...]:
        """The balance before each entry, and after the last one."""
        return tuple(accumulate(self.entries, initial=0))

    def payload(self) -> str:
        """Canonical JSON."""
        return json.dumps({"entries": list(self.entries)}, separators=(",", ":"))

    def prompt(self) -> str:
        """The question as the policy reads it."""
        return "ledger " + " ".join(f"{'credit' if entry > 0 else 'debit'} {abs(entry)}" for entry in self.entries)


def parse(payload: str) -> Ledger:
    """The ledger of a task's payload. Raises `TaskError` saying what is wrong with it."""
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"a ledger task's payload must be JSON: {error}") from error
    entries = document.get("entries") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not 1 <= len(entries) <= MOST_ENTRIES:
        raise TaskError(f"a ledger task's payload must hold `entries`, a list of 1 to {MOST_ENTRIES} amounts")
    wrong = [entry for entry in entries if not _is_amount(entry)]
    if wrong:
        raise TaskError(f"an entry must be a whole number, not 0, at most {LARGEST_AMOUNT} in size; got {wrong[0]!r}")
    return Ledger(tuple(entries))


def _is_amount(entry: object) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool) and 0 < abs(entry) <= LARGEST_AMOUNT
