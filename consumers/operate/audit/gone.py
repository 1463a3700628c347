"""Whether what a plan reads can still be read: what retention or an erasure took from it, as the log shows it. Pure.

A place below its partition's beginning is gone, and so is one of a compacted topic at which no record is left. Claimed
bytes lie in a store, of which the log knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.model_facts import named
from tidemill.consumers.operate.trace.place import Place
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.records import Group, OnlineBatch, OnlineMember, RolloutStatus, StepPlan


class Readable:
    """What of the log can still be read.

    Args:
        grace_us: how much later a deletion may say that it was made, since clocks differ.
    """

    def __init__(self, facts: Facts, grace_us: int) -> None:
        self._facts, self._grace_us = facts, grace_us
        self._batches: Mapping[Place, OnlineBatch] = {batch.place: batch.record for batch in facts.online.batches}

    def lacks(self, plan: StepPlan, at: int) -> bool:
        """Whether something that `plan` reads was gone by the time `at`, in microseconds; where only the log's
        beginning tells that it is gone, by now."""
        excluded = {one.group_id for one in plan.exclusions if one.topic == Topic.INTERACTIONS}
        return any(self._is_gone(place) for place in self._places(plan)) or any(
            self._is_answer_gone(member, at) for member in self._members(plan) if member.interaction_id not in excluded
        )

    def _places(self, plan: StepPlan) -> Iterator[Place]:
        """The groups and batches of a plan, and the rollouts of the groups."""
        for reference in plan.inputs:
            place = named(reference)
            yield place
            group = self._facts.model.group_at.get(place)
            yield from _rollouts(group.record) if group is not None else ()

    def _members(self, plan: StepPlan) -> Iterator[OnlineMember]:
        for reference in plan.inputs:
            batch = self._batches.get(named(reference))
            yield from batch.members if batch is not None else ()

    def _is_gone(self, place: Place) -> bool:
        return not self._facts.is_kept(place)

    def _is_answer_gone(self, member: OnlineMember, at: int) -> bool:
        online, by = self._facts.online, at + self._grace_us
        place = Place(member.topic, member.partition, member.offset)
        buried_at = online.erased.get(member.interaction_id)
        if buried_at is not None:
            return buried_at <= by
        served = online.served_at_place.get(place)
        if served is None:
            # No tombstone is left, and no record: the broker has compacted both away.
            return True
        return any(served.served_at <= demanded <= by for demanded in online.demands.get(member.user_id, ()))


def _rollouts(group: Group) -> Iterator[Place]:
    for member in group.members:
        if member.status is RolloutStatus.COMPLETED and member.reward is not None:
            yield Place(member.topic, member.partition, member.offset)
