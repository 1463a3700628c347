"""What nobody can read was put aside."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.consumers.operate.audit.life import is_overdue


def _find(case: Case) -> Iterator[Finding]:
    for bad in case.facts.undecodable:
        # Whoever reads the topic may not have come to it yet.
        if bad.place not in case.facts.letters and is_overdue(case.facts, case.rules, bad.timestamp_us):
            yield Finding(bad.place, f"cannot be read ({bad.error}) and is no dead letter")


CHECK = Check("dead_letters", "every record that cannot be read lies in its topic's dead-letter topic", _find)
