"""The rules that an audit applies to a log, and the report of what it found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tidemill.schemas.log.consumed import Position

MINUTE_US = 60_000_000


@dataclass(frozen=True, slots=True)
class AuditRules:
    """The settings that separate a fault from work that is under way."""

    run_id: str
    ended: bool = False
    """No worker plays rollouts any more: a rollout without a result is lost, also before its deadline."""
    complete: bool = False
    """The run is over: everything that is still open is a fault, groups that wait for the trainer included."""
    last_step: int | None = None
    """The last step of the run, where it is known: groups that are left after it are no fault."""
    allow_truncated: bool = False
    """Records that are past a topic's retention are no fault, and checks that need them are left out."""
    grace_us: int = 10 * MINUTE_US
    """How long after its deadline, in event time, a record may still arrive."""
    horizon_us: int = 48 * 60 * MINUTE_US
    """How long after it was served an interaction may wait for its end."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One offender."""

    place: Position | None
    """The record that shows the fault; None where no record of the log does."""
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}" if self.place else self.what


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    name: str
    holds: str
    offenders: int
    first: Finding | None

    @property
    def passed(self) -> bool:
        """Whether the check found nothing."""
        return self.offenders == 0


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit: the checks with their first offenders, and the counts of the run."""

    run_id: str
    checks: tuple[CheckResult, ...]
    states: dict[str, int]
    """Rollouts by state, and by reason where there is one."""
    open: dict[str, int]
    """Rollouts that have not ended, by state."""
    counts: dict[str, int]
    """Records and items of the run."""
    repeated: dict[str, int]
    """Work that was done more than once and did not change what was trained."""
    records: int
    """Records read, of all runs."""
    runs: dict[str, int]
    """Records by run."""

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)

    def verdict(self) -> str:
        """One line for people."""
        if self.passed:
            return f"sound, {len(self.checks)} checks over {self.records:,} records"
        first = self.failed[0]
        return (
            f"NOT SOUND, {len(self.failed)} of {len(self.checks)} checks failed. "
            f"First offender ({first.name}): {first.first}"
        )

    def check(self, name: str) -> CheckResult:
        """The result of a check by its name. Raises LookupError."""
        for one in self.checks:
            if one.name == name:
                return one
        raise LookupError(f"no check is named {name!r}: there are {', '.join(one.name for one in self.checks)}")

    def document(self) -> dict[str, Any]:
        """The report as JSON takes it."""
        checks = [{"passed": one.passed, **asdict(one)} for one in self.checks]
        return {"passed": self.passed, **{**asdict(self), "checks": checks}}
