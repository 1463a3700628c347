"""The form of a check: a pure function of an audited run that names each fault with its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tidemill.consumers.operate.audit.endings import RolloutLife
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.report import AuditRules, Finding


@dataclass(frozen=True, slots=True)
class AuditedRun:
    """A run whose log was read whole."""

    facts: Facts
    rules: AuditRules
    lives: Sequence[RolloutLife]


Find = Callable[[AuditedRun], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """One condition on a log."""

    name: str
    holds: str
    """The condition, in a sentence."""
    find: Find
    """The offenders, in the order of the log where there is one."""


def check(name: str, holds: str) -> Callable[[Find], AuditCheck]:
    """Make a check of a function that finds its offenders."""
    return lambda find: AuditCheck(name, holds, find)
