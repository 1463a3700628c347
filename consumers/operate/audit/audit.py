"""The audit: every check over everything that the log says. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.checks import (
    batches,
    dead_letters,
    endings,
    erasures,
    groups,
    incarnations,
    inputs,
    interactions,
    offsets,
    plans,
    retention,
    served,
    steps,
    tasks,
    trained_once,
    versions,
)
from tidemill.consumers.operate.audit.facts import Facts, Letter
from tidemill.consumers.operate.audit.life import OPEN, Life, lives
from tidemill.consumers.operate.audit.partition_facts import Partition
from tidemill.consumers.operate.audit.report import AuditReport, CheckResult
from tidemill.consumers.operate.audit.rules import AuditRules
from tidemill.schemas.log.consumed import ConsumedRecord

CHECKS: tuple[Check, ...] = (
    retention.CHECK,
    offsets.CHECK,
    dead_letters.CHECK,
    tasks.CHECK,
    endings.CHECK,
    trained_once.CHECK,
    groups.CHECK,
    plans.CHECK,
    inputs.CHECK,
    steps.CHECK,
    versions.CHECK,
    served.CHECK,
    incarnations.CHECK,
    interactions.CHECK,
    batches.CHECK,
    erasures.CHECK,
)
"""From the log itself to what became of its records: an early one may explain a later one."""


def audit(
    records: Iterable[ConsumedRecord],
    rules: AuditRules,
    *,
    letters: Iterable[Letter] = (),
    ends: Mapping[Partition, tuple[int, int]] | None = None,
) -> AuditReport:
    """Audit a log.

    Args:
        records: every record of the audited topics; each partition in order, the topics in any order.
        rules: what it is held to.
        letters: every dead letter, by the place of the record that it is.
        ends: first and next offset of each partition, as the broker says; taken from the records where it is not given.
    """
    facts = Facts(rules.run_id, ends)
    for located in records:
        facts.observe(located)
    for letter in letters:
        facts.observe_letter(letter)
    return judge(facts, rules)


def judge(facts: Facts, rules: AuditRules) -> AuditReport:
    """Audit what was observed, all of it."""
    facts.finish()
    found = tuple(lives(facts, rules))
    case = Case(facts, rules, found)
    states = Counter(f"{life.state.value}: {life.reason}" if life.reason else life.state.value for life in found)
    return AuditReport(
        run_id=rules.run_id,
        checks=tuple(_result(check, case) for check in CHECKS),
        states=dict(sorted(states.items())),
        open=dict(sorted(Counter(life.state.value for life in found if life.state in OPEN).items())),
        counts=_counts(facts, found),
        repeated={what: n for what, n in sorted(_repeated(facts).items()) if n},
        records=sum(partition.records for partition in facts.partitions.values()),
        runs=dict(facts.runs),
    )


def _result(check: Check, case: Case) -> CheckResult:
    offenders, first = 0, None
    for finding in check.find(case):
        offenders, first = offenders + 1, first or finding
    return CheckResult(check.name, check.holds, offenders, first)


def _counts(facts: Facts, found: Sequence[Life]) -> dict[str, int]:
    played, model, online = facts.played, facts.model, facts.online
    return {
        "tasks": len(played.tasks),
        "rollouts": len(found),
        "dispatched": sum(len(indexes) for _, indexes in played.dispatched.values()),
        "written": len(played.rollouts),
        "groups": len(model.groups),
        "steps": len(model.steps),
        "versions": len({(one.record.branch, one.record.version) for one in model.manifests}),
        "refusals": sum(one.record.status.value == "refused" for one in model.acks),
        "interactions": len(online.served),
        "outcomes": sum(map(len, online.ends.values())),
        "online batches": len(online.batches),
        "dead letters": len(facts.letters),
        "replayed": facts.replayed,
    }


def _repeated(facts: Facts) -> Counter[str]:
    batches = facts.online.batches
    again = len(batches) - len({batch.record.batch_id for batch in batches})
    return Counter({**facts.played.repeats, **facts.model.repeats, **facts.online.repeats, "online batches": again})
