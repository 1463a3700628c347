"""Reads a log for an audit.

Effects are read before their causes: what a step names was written before it, so that it lies within what is read after
the steps. A log that grows meanwhile is audited as of the moment at which its steps were read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tidemill.consumers.operate.audit.audit import judge
from tidemill.consumers.operate.audit.facts import Facts, Letter
from tidemill.consumers.operate.audit.partition_facts import Partition
from tidemill.consumers.operate.audit.report import AuditReport
from tidemill.consumers.operate.audit.rules import AuditRules
from tidemill.consumers.operate.reading import read_whole
from tidemill.consumers.operate.trace.place import Place
from tidemill.consumers.sink.dead_letters import DeadLetterReader
from tidemill.consumers.sink.rows import DeadLetter
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.reader import LogReader

CLIENT_ID = "tidemill-audit"
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
"""The topics that are audited. What a rollout was sampled under was acknowledged before, and what was acknowledged was
published before."""

Progress = Callable[[str, int, int], None]
"""Told the topic, and how many offsets of how many of it have been read."""

TOLD_EVERY = 500


def silent(_topic: str, _done: int, _total: int) -> None:
    """Nobody watches."""


def audit_log(kafka: KafkaSettings, rules: AuditRules, progress: Progress = silent) -> AuditReport:
    """Read a whole log and audit it.

    Raises LookupError where a topic is missing or the log holds nothing of the run, TimeoutError when the broker falls
    silent.
    """
    facts = Facts(rules.run_id)
    for topic in ORDER:
        _read(kafka, topic, facts, progress)
    for letter in letters_of(kafka, ORDER):
        facts.observe_letter(letter)
    if rules.run_id not in facts.runs:
        known = ", ".join(sorted(facts.runs)) or "none"
        raise LookupError(f"the log holds nothing of run {rules.run_id}; runs in it: {known}. Name one with --run-id")
    return judge(facts, rules)


def letters_of(kafka: KafkaSettings, topics: Iterable[Topic]) -> Iterator[Letter]:
    """Every dead letter of some topics."""
    names, wanted = Names(kafka.topic_prefix), tuple(topics)
    full = {names.of(topic): topic for topic in wanted}
    with DeadLetterReader(kafka, {}, wanted) as letters:
        for row in letters.read_to_end():
            if isinstance(row.record, DeadLetter) and row.record.source_topic in full:
                source = full[row.record.source_topic].value
                place = Place(source, row.record.source_partition, row.record.source_offset)
                yield Letter(place, row.record.reason)


def _read(kafka: KafkaSettings, topic: Topic, facts: Facts, progress: Progress) -> None:
    with LogReader(kafka, [topic], client_id=CLIENT_ID) as reader:
        firsts, ends = reader.next_offsets(), reader.end_offsets()
        limits: dict[Partition, tuple[int, int]] = {where: (firsts[where], ends[where]) for where in ends}
        facts.expect(limits)
        total = sum(high - low for low, high in limits.values())
        for n, located in enumerate(read_whole(reader)):
            facts.observe(located)
            if n % TOLD_EVERY == 0:
                progress(topic.value, n, total)
