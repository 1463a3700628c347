"""Online batches hold each answer once, with the reward it was given."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.copies import Standing
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.consumers.operate.trace.place import Place
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.records import OnlineBatch, OnlineMember


def _find(case: Case) -> Iterator[Finding]:
    known: dict[str, Standing[OnlineBatch]] = {}
    holds: dict[str, Standing[OnlineBatch]] = {}
    following: dict[str, int] = {}
    for batch in case.facts.online.batches:
        first = known.setdefault(batch.record.batch_id, batch)
        if first is not batch:
            if first.digest != batch.digest:
                yield Finding(batch.place, f"batch {batch.record.batch_id} stands at {first.place} otherwise")
            continue
        expected = following.get(batch.record.branch, 0)
        if batch.record.sequence != expected and not case.facts.is_truncated(Topic.ONLINE_BATCHES):
            yield Finding(batch.place, f"batch {batch.record.sequence} where number {expected} was expected")
        following[batch.record.branch] = batch.record.sequence + 1
        yield from _members(case.facts, batch, holds)


def _members(facts: Facts, batch: Standing[OnlineBatch], holds: dict[str, Standing[OnlineBatch]]) -> Iterator[Finding]:
    tokens = sum(member.sampled_tokens for member in batch.record.members)
    if tokens != batch.record.tokens:
        yield Finding(batch.place, f"counts {batch.record.tokens} tokens, its members have {tokens}")
    for member in batch.record.members:
        problem = _problem(facts, batch.record, member)
        if not member.correction:
            before = holds.setdefault(member.interaction_id, batch)
            problem = problem or ("" if before is batch else f"it is in the batch at {before.place} already")
        if problem:
            yield Finding(batch.place, f"interaction {member.interaction_id}: {problem}")


def _problem(facts: Facts, batch: OnlineBatch, member: OnlineMember) -> str:
    if not member.correction and (member.version_min, member.version_max) != (batch.version, batch.version):
        return f"sampled under version {member.version_min} to {member.version_max}, the batch is of {batch.version}"
    if member.user_id in facts.online.erasures or member.interaction_id in facts.online.erased:
        return ""
    place = Place(member.topic, member.partition, member.offset)
    served = facts.online.served_at_place.get(place)
    if facts.is_kept(place) and (served is None or served.interaction_id != member.interaction_id):
        return f"it does not lie at {place}"
    rewards = [end.record.reward for end in facts.online.ends.get(member.interaction_id, ())]
    if rewards and not member.correction and member.reward not in rewards:
        return f"trained with reward {member.reward}, its outcomes say {rewards}"
    return ""


CHECK = Check(
    "batches",
    "online batches are numbered without a gap, their members are interactions of the one version that lie where they "
    "say, each in one batch, with the reward of its outcome",
    _find,
)
