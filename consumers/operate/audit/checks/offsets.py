"""As many records as offsets."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.consumers.operate.audit.partition_facts import may_have_gaps
from tidemill.consumers.operate.trace.place import Place


def _find(case: Case) -> Iterator[Finding]:
    for (topic, partition), facts in sorted(case.facts.partitions.items()):
        if facts.hidden and not may_have_gaps(topic):
            place = None if facts.first_gap is None else Place(topic.value, partition, facts.first_gap)
            what = f"{facts.records:,} records on {facts.high - facts.low:,} offsets: {facts.hidden:,} have none"
            yield Finding(place, what)


CHECK = Check(
    "offsets",
    "every offset that the broker keeps has its record, but for the marks of transactions and what compaction dropped",
    _find,
)
