"""What a check is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.consumers.operate.audit.life import Life
from tidemill.consumers.operate.audit.rules import AuditRules


@dataclass(frozen=True, slots=True)
class Case:
    """A log that was read whole."""

    facts: Facts
    rules: AuditRules
    lives: Sequence[Life]

    @property
    def over(self) -> bool:
        """Whether nothing may be open any more."""
        return self.rules.complete


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold."""

    name: str
    holds: str
    """What it means that the check passes, in a sentence."""
    find: Callable[[Case], Iterator[Finding]]
    """The offenders, in the order of the log where there is one."""
