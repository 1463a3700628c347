"""Every answer that was served ends once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.copies import Standing
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.consumers.operate.audit.online_facts import End
from tidemill.consumers.operate.trace.place import Place
from tidemill.schemas.catalogue import Topic


def _find(case: Case) -> Iterator[Finding]:
    facts = case.facts
    for name, ends in facts.online.ends.items():
        yield from _ends(facts, name, ends)
    for served in facts.online.served.values():
        if facts.online.ends.get(served.interaction_id) or facts.letters.get(served.place):
            continue
        overdue = facts.clock_us > served.served_at + case.rules.horizon_us + case.rules.grace_us
        if case.over or overdue:
            yield Finding(served.place, f"interaction {served.interaction_id} was served and never ended")


def _ends(facts: Facts, name: str, ends: list[Standing[End]]) -> Iterator[Finding]:
    last = ends[-1]
    for revision, times in Counter(end.record.revision for end in ends).items():
        if times > 1:
            second = [end for end in ends if end.record.revision == revision][1]
            yield Finding(second.place, f"interaction {name} has {times} different outcomes of revision {revision}")
    for end in ends:
        if (end.record.reward is None) == (not end.record.exclusion) and end.record.revision == 0:
            yield Finding(end.place, f"the end of interaction {name} is neither a reward nor an exclusion")
    # An erasure takes the records of an interaction one by one.
    user_erased = last.record.user_id in facts.online.erasures
    if user_erased or name in facts.online.erased or facts.is_truncated(Topic.OUTCOMES):
        return
    if sorted({end.record.revision for end in ends}) != list(range(1 + max(end.record.revision for end in ends))):
        yield Finding(last.place, f"interaction {name} has revisions and not each from 0 on")
    place = Place(Topic.INTERACTIONS.value, last.record.partition, last.record.offset)
    if facts.online.served and facts.is_kept(place) and place not in facts.online.served_at_place:
        yield Finding(last.place, f"interaction {name} ended, and {place} is no interaction")


CHECK = Check(
    "interactions",
    "every answer that was served has one end of revision 0, a reward or an exclusion with its reason, unless its "
    "horizon has not passed or its user had it erased",
    _find,
)
