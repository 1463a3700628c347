"""Checks of the log itself: every record is there, and every record that cannot be read is a dead letter."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.operate.audit.checks import AuditedRun, check
from tidemill.consumers.operate.audit.endings import is_overdue
from tidemill.consumers.operate.audit.facts import may_have_gaps
from tidemill.consumers.operate.audit.report import Finding
from tidemill.consumers.operate.audit.run_facts import named, references
from tidemill.schemas.catalogue import is_compacted
from tidemill.schemas.log.consumed import Position


@check(
    "retention",
    "no partition has lost its beginning, and nothing refers to what is gone (allowed with --allow-truncated)",
)
def retention(run: AuditedRun) -> Iterator[Finding]:
    """Find records that the log no longer keeps."""
    facts = run.facts
    if run.rules.allow_truncated:
        return
    for (topic, number), partition in sorted(facts.partitions.items()):
        if partition.low > 0 and not is_compacted(topic):
            what = f"truncated: offsets 0 to {partition.low - 1} are gone, past retention or deleted"
            yield Finding(Position(topic.value, number, partition.low), what)
    members = ((group.place, member) for group in facts.model.groups for member in group.record.members)
    of_groups = ((by, Position.of(member)) for by, member in members)
    of_steps = ((step.place, named(one)) for step in facts.model.steps for one in references(step.record))
    for by, to in (*of_groups, *of_steps):
        if not facts.is_kept(to):
            yield Finding(by, f"refers to {to}, which the log no longer keeps")


@check(
    "offsets",
    "every offset that the broker keeps has its record, but for the marks of transactions and what compaction dropped",
)
def offsets(run: AuditedRun) -> Iterator[Finding]:
    """Find offsets without a record."""
    for (topic, number), partition in sorted(run.facts.partitions.items()):
        if partition.hidden and not may_have_gaps(topic):
            place = None if partition.first_gap is None else Position(topic.value, number, partition.first_gap)
            count = f"{partition.records:,} records on {partition.high - partition.low:,} offsets"
            yield Finding(place, f"{count}: {partition.hidden:,} have none")


@check("dead_letters", "every record that cannot be read lies in its topic's dead-letter topic")
def dead_letters(run: AuditedRun) -> Iterator[Finding]:
    """Find unreadable records without a dead letter."""
    for bad in run.facts.unreadable:
        # The reader of the topic may not have read so far yet.
        if bad.place not in run.facts.letters and is_overdue(run.facts, run.rules, bad.timestamp_us):
            yield Finding(bad.place, f"cannot be read ({bad.error}) and is no dead letter")


CHECKS = (retention, offsets, dead_letters)
