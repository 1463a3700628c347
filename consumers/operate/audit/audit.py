"""The audit of a log: the checks of the log itself, every check over the facts of one run, and the report.

Effects are read before their causes: a record that a step names was written before the step, so it is in the part of
the log that is read after the steps. If the log grows during the audit, the audit describes the log at the time when
its steps were read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tidemill.consumers.operate import watched
from tidemill.consumers.operate.audit import rollout_checks, step_checks
from tidemill.consumers.operate.audit.endings import (
    OPEN,
    AuditCheck,
    AuditedRun,
    AuditRules,
    CheckResult,
    Finding,
    check,
)
from tidemill.consumers.operate.audit.facts import TRANSACTIONAL, references
from tidemill.consumers.sink.rows import DeadLetter, DeadLetterReader
from tidemill.schemas.catalogue import DEAD_LETTER_RETENTION_MS, Names, Topic, is_compacted
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.log.reader import LogReader


@check(
    "retention",
    "no partition has lost its first records, and no record refers to a deleted one (allowed with --allow-truncated)",
)
def retention(run: AuditedRun) -> Iterator[Finding]:
    if run.rules.allow_truncated:
        return
    for (topic, number), partition in sorted(run.partitions.items()):
        if partition.low > 0 and not is_compacted(topic):
            what = f"truncated: offsets 0 to {partition.low - 1} were deleted, by retention or by a person"
            yield Finding(Position(topic.value, number, partition.low), what)
    members = ((group.place, member) for group in run.groups for member in group.record.members)
    of_groups = ((by, Position.of(member)) for by, member in members)
    of_steps = ((step.place, Position.of(one)) for step in run.steps for one in references(step.record))
    for by, to in (*of_groups, *of_steps):
        if not run.is_kept(to):
            yield Finding(by, f"refers to {to}, which the log no longer keeps")


@check(
    "offsets",
    "every offset that the broker keeps has a record, except transaction markers and records that compaction removed",
)
def offsets(run: AuditedRun) -> Iterator[Finding]:
    for (topic, number), partition in sorted(run.partitions.items()):
        if partition.hidden and topic not in TRANSACTIONAL and not is_compacted(topic):
            place = Position(topic.value, number, partition.first_gap)
            count = f"{partition.records:,} records on {partition.high - partition.low:,} offsets"
            yield Finding(place, f"{count}: {partition.hidden:,} have none")


@check(
    "dead_letters",
    "every record that cannot be decoded is in its topic's dead-letter topic, unless it is older than letters are kept",
)
def dead_letters(run: AuditedRun) -> Iterator[Finding]:
    for place, timestamp_us, error in run.unreadable:
        # Some topics are kept for longer than dead letters: an older letter may be deleted already.
        is_recent = run.clock_us <= timestamp_us + DEAD_LETTER_RETENTION_MS * 1_000
        # The reader of the topic may not have read so far yet.
        if is_recent and place not in run.letters and run.is_overdue(timestamp_us):
            yield Finding(place, f"cannot be decoded ({error}) and is no dead letter")


CLIENT_ID = "tidemill-audit"
CHECKS: tuple[AuditCheck, ...] = (
    retention,
    offsets,
    dead_letters,
    *rollout_checks.CHECKS,
    *step_checks.CHECKS,
    *rollout_checks.ANSWER_CHECKS,
)
"""From the log itself to the use of its records: a finding of an early check may explain one of a later check."""
ORDER = (
    Topic.STEPS,
    Topic.GROUPS,
    Topic.ONLINE_BATCHES,
    Topic.OUTCOMES,
    Topic.FEEDBACK,
    Topic.INTERACTIONS,
    Topic.ROLLOUTS,
    Topic.PROGRESS,
    Topic.TASKS,
    Topic.USER_REQUESTS,
    Topic.GATE,
    Topic.ACKS,
    Topic.MANIFESTS,
)
"""The topics that are audited. A version was acknowledged before a rollout was sampled under it, and published before
it was acknowledged."""
TopicProgress = Callable[[str, int, int], None]
"""Called with a topic, the number of its offsets that were read, and their total number."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit: the checks with their first offenders, and the counts of the run."""

    run_id: str
    checks: tuple[CheckResult, ...]
    states: dict[str, int]
    """Rollouts by state, and by reason if there is one."""
    open: dict[str, int]
    """Rollouts that have not ended, by state."""
    counts: dict[str, int]
    """Records and items of the run."""
    repeated: dict[str, int]
    """Work that was repeated without an effect on training."""
    records: int
    """Records read, of all runs."""
    runs: dict[str, int]
    """Records by run."""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        return tuple(check for check in self.checks if not check.passed)

    def verdict(self) -> str:
        if self.passed:
            return f"sound, {len(self.checks)} checks over {self.records:,} records"
        first = self.failed[0]
        return (
            f"NOT SOUND, {len(self.failed)} of {len(self.checks)} checks failed. "
            f"First offender ({first.name}): {first.first}"
        )

    def document(self) -> dict[str, Any]:
        checks = [{"passed": one.passed, **asdict(one)} for one in self.checks]
        return {"passed": self.passed, **asdict(self), "checks": checks}


def audit_log(kafka: KafkaSettings, rules: AuditRules, progress: TopicProgress = lambda *_: None) -> AuditReport:
    """Read a whole log and audit it.

    Raises LookupError if a topic is missing or the log holds no record of the run, TimeoutError when the broker
    stops delivering.
    """
    run = AuditedRun(rules)
    for topic in ORDER:
        with LogReader(kafka, [topic], client_id=CLIENT_ID) as reader:
            firsts, ends = reader.next_offsets(), reader.end_offsets()
            run.expect({where: (firsts[where], ends[where]) for where in ends})
            total = sum(ends.values()) - sum(firsts[where] for where in ends)
            for consumed in watched(reader.read_to_end(), total, partial(progress, topic.value)):
                run.observe(consumed)
    full = {Names(kafka.topic_prefix).of(topic): topic.value for topic in ORDER}
    with DeadLetterReader(kafka, {}, ORDER) as letters:
        for row in letters.read_to_end():
            dead_letter = row.record
            if isinstance(dead_letter, DeadLetter) and dead_letter.source_topic in full:
                place = Position(
                    full[dead_letter.source_topic], dead_letter.source_partition, dead_letter.source_offset
                )
                run.letters.setdefault(place, dead_letter.reason)
    if rules.run_id not in run.runs:
        known = ", ".join(sorted(run.runs)) or "none"
        raise LookupError(f"the log has no record of run {rules.run_id}; runs in it: {known}. Name one with --run-id")
    return judge(run)


def judge(run: AuditedRun) -> AuditReport:
    """Audit a run. All of its records must have been observed."""
    lives = run.lives
    states = Counter(f"{life.state.value}: {life.reason}" if life.reason else life.state.value for life in lives)
    batches = len({batch.record.batch_id for batch in run.batches})
    return AuditReport(
        run_id=run.run_id,
        checks=tuple(one(run) for one in CHECKS),
        states=dict(sorted(states.items())),
        open=dict(sorted(Counter(life.state.value for life in lives if life.state in OPEN).items())),
        counts={
            "tasks": len(run.tasks),
            "rollouts": len(lives),
            "dispatched": sum(len(indexes) for _, indexes in run.dispatched.values()),
            "written": len(run.rollouts),
            "groups": len(run.groups),
            "steps": len(run.steps),
            "versions": len({(one.record.branch, one.record.version) for one in run.manifests}),
            "refusals": sum(one.record.status.value == "refused" for one in run.acks),
            "interactions": len(run.served),
            "outcomes": sum(map(len, run.ends.values())),
            "online batches": len(run.batches),
            "dead letters": len(run.letters),
            "replayed": run.replayed,
        },
        repeated=dict(sorted((run.repeats + Counter({"online batches": len(run.batches) - batches})).items())),
        records=sum(partition.records for partition in run.partitions.values()),
        runs=dict(run.runs),
    )
