"""Checks of answers to users: each ends once, is in one online batch at most, and is not trained after an erasure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tidemill.consumers.operate import RecordAt
from tidemill.consumers.operate.audit.endings import AuditedRun, check
from tidemill.consumers.operate.audit.facts import Facts, OutcomeFacts
from tidemill.consumers.operate.audit.report import Finding
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.records import OnlineBatch, OnlineMember


@check(
    "interactions",
    "every answer that was served has one end of revision 0, a reward or an exclusion with its reason, unless its "
    "horizon has not passed or its user had it erased",
)
def interactions(run: AuditedRun) -> Iterator[Finding]:
    """Find answers that never ended, and ends that contradict each other or their answer."""
    facts, rules = run.facts, run.rules
    for name, ends in facts.online.ends.items():
        yield from _ends(facts, name, ends)
    for answer in facts.online.served.values():
        if facts.online.ends.get(answer.interaction_id) or facts.letters.get(answer.place):
            continue
        if rules.complete or facts.clock_us > answer.served_at + rules.horizon_us + rules.grace_us:
            yield Finding(answer.place, f"interaction {answer.interaction_id} was served and never ended")


def _ends(facts: Facts, name: str, ends: Sequence[RecordAt[OutcomeFacts]]) -> Iterator[Finding]:
    last = ends[-1]
    revisions = Counter(end.record.revision for end in ends)
    for revision, times in revisions.items():
        if times > 1:
            second = [end for end in ends if end.record.revision == revision][1]
            yield Finding(second.place, f"interaction {name} has {times} different outcomes of revision {revision}")
    for end in ends:
        if (end.record.reward is None) == (not end.record.exclusion) and end.record.revision == 0:
            yield Finding(end.place, f"the end of interaction {name} is neither a reward nor an exclusion")
    # An erasure removes the records of an interaction one by one.
    user_erased = last.record.user_id in facts.online.erasures
    if user_erased or name in facts.online.erased or facts.is_truncated(Topic.OUTCOMES):
        return
    if sorted(revisions) != list(range(1 + max(revisions))):
        yield Finding(last.place, f"interaction {name} has revisions and not each from 0 on")
    place = Position(Topic.INTERACTIONS.value, last.record.partition, last.record.offset)
    if facts.online.served and facts.is_kept(place) and place not in facts.online.served_at_place:
        yield Finding(last.place, f"interaction {name} ended, and {place} is no interaction")


@check(
    "batches",
    "online batches are numbered without a gap, their members are interactions of the one version that lie where they "
    "say, each in one batch, with the reward of its outcome",
)
def batches(run: AuditedRun) -> Iterator[Finding]:
    """Find gaps in the batches, batches with two contents, and members that contradict their interaction."""
    known: dict[str, RecordAt[OnlineBatch]] = {}
    batch_of: dict[str, RecordAt[OnlineBatch]] = {}
    following: Counter[str] = Counter()
    """Next number of each branch."""
    for at in run.facts.online.batches:
        batch = at.record
        first = known.setdefault(batch.batch_id, at)
        if first is not at:
            if first.digest != at.digest:
                yield Finding(at.place, f"batch {batch.batch_id} stands at {first.place} otherwise")
            continue
        expected = following[batch.branch]
        if batch.sequence != expected and not run.facts.is_truncated(Topic.ONLINE_BATCHES):
            yield Finding(at.place, f"batch {batch.sequence} where number {expected} was expected")
        following[batch.branch] = batch.sequence + 1
        tokens = sum(member.sampled_tokens for member in batch.members)
        if tokens != batch.tokens:
            yield Finding(at.place, f"counts {batch.tokens} tokens, its members have {tokens}")
        for member in batch.members:
            problem = _problem(run.facts, batch, member)
            if not member.correction:
                before = batch_of.setdefault(member.interaction_id, at)
                problem = problem or ("" if before is at else f"it is in the batch at {before.place} already")
            if problem:
                yield Finding(at.place, f"interaction {member.interaction_id}: {problem}")


def _problem(facts: Facts, batch: OnlineBatch, member: OnlineMember) -> str:
    if not member.correction and (member.version_min, member.version_max) != (batch.version, batch.version):
        return f"sampled under version {member.version_min} to {member.version_max}, the batch is of {batch.version}"
    if member.user_id in facts.online.erasures or member.interaction_id in facts.online.erased:
        return ""
    place = Position.of(member)
    answer = facts.online.served_at_place.get(place)
    if facts.is_kept(place) and (answer is None or answer.interaction_id != member.interaction_id):
        return f"it does not lie at {place}"
    rewards = [end.record.reward for end in facts.online.ends.get(member.interaction_id, ())]
    if rewards and not member.correction and member.reward not in rewards:
        return f"trained with reward {member.reward}, its outcomes say {rewards}"
    return ""


@check("erasures", "no step trained on a user's answers after they had demanded to be erased")
def erasures(run: AuditedRun) -> Iterator[Finding]:
    """Find steps that trained on users after their erasure."""
    online = run.facts.online
    batch_at = {at.place: at.record for at in online.batches} if online.erasures else {}
    for step in run.facts.model.steps if batch_at else ():
        excluded = {one.group_id for one in step.record.exclusions if one.topic == Topic.INTERACTIONS}
        for reference in step.record.inputs:
            batch = batch_at.get(Position.of(reference))
            for member in batch.members if batch is not None else ():
                at = online.erasures.get(member.user_id)
                # The request may not have reached the trainer yet.
                known = at is not None and at + run.rules.grace_us < step.record.started_at
                if at is None or not known or member.interaction_id in excluded:
                    continue
                answer = online.served.get(member.interaction_id)
                if answer is None or answer.served_at <= at:
                    what = f"step {step.record.step} trained on interaction {member.interaction_id} of user"
                    yield Finding(step.place, f"{what} {member.user_id}, who had demanded to be erased")


CHECKS = (interactions, batches, erasures)
