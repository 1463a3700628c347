"""What an audit found: the checks with their first offenders, and the ledger in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tidemill.consumers.operate.audit.finding import Finding


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check."""

    name: str
    holds: str
    offenders: int
    first: Finding | None

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return self.offenders == 0


@dataclass(frozen=True, slots=True)
class AuditReport:
    """A log, audited."""

    run_id: str
    checks: tuple[CheckResult, ...]
    states: dict[str, int]
    """Rollouts by state, and by reason where there is one."""
    open: dict[str, int]
    """Rollouts that have not ended, by state."""
    counts: dict[str, int]
    """What was read of the run."""
    repeated: dict[str, int]
    """Work that was done again and left no trace in what was trained."""
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
