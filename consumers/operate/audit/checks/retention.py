"""Nothing is gone that the log was to keep."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.consumers.operate.audit.model_facts import named, references
from tidemill.consumers.operate.trace.place import Place
from tidemill.schemas.catalogue import is_compacted


def _find(case: Case) -> Iterator[Finding]:
    if case.rules.allow_truncated:
        return
    for (topic, partition), facts in sorted(case.facts.partitions.items()):
        if facts.low > 0 and not is_compacted(topic):
            what = f"truncated: offsets 0 to {facts.low - 1} are gone, past retention or deleted"
            yield Finding(Place(topic.value, partition, facts.low), what)
    for by, to in _references(case.facts):
        if not case.facts.is_kept(to):
            yield Finding(by, f"refers to {to}, which the log no longer keeps")


def _references(facts: Facts) -> Iterator[tuple[Place, Place]]:
    for group in facts.model.groups:
        for member in group.record.members:
            yield group.place, Place(member.topic, member.partition, member.offset)
    for step in facts.model.steps:
        for reference in references(step.record):
            yield step.place, named(reference)


CHECK = Check(
    "retention",
    "no partition has lost its beginning, and nothing refers to what is gone (allowed with --allow-truncated)",
    _find,
)
