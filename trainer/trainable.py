"""The inputs of steps: what one step can be trained on, and the records of a topic that have ended. Pure.

A step is trained on groups with their rollouts, and on an online batch with the interactions that are left. Each has
its record and its place in the log. Every record ends exactly once, across stops: a record has ended when a step
trained it or excluded it. Records are told apart by their place; those that say the same again are known by their id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.expert_ids import ExpertIds
from tidemill.schemas.records import (
    SECOND_RECORDS,
    Exclusion,
    Group,
    GroupMember,
    Interaction,
    OnlineBatch,
    OnlineMember,
    Rollout,
    RolloutStatus,
    StepExclusion,
    StepInput,
    StepPlan,
    TrainStep,
)

DecidedStep = TrainStep | StepPlan
"""A step whose inputs and exclusions are decided, taken or not."""


@dataclass(frozen=True, slots=True)
class TopicProgress:
    """How far a topic is used up; kept in the checkpoint."""

    next_offsets: Mapping[int, int] = field(default_factory=dict)
    """By partition: every record before this offset has ended or is not this run's."""
    ended_above: Mapping[int, list[int]] = field(default_factory=dict)
    """By partition: offsets at or above `next_offsets` of records that have ended."""
    remembered: list[str] = field(default_factory=list)
    """Ids of records that have ended, oldest first."""


class Endings:
    """The ended records of one topic; at most `limit` of their ids are remembered from step to step."""

    def __init__(self, topic: Topic, progress: TopicProgress, limit: int) -> None:
        self._topic, self._limit = topic, limit
        self.excluded: list[StepExclusion] = []
        """What ended untrained, and no step has named yet."""
        self._read = dict(progress.next_offsets)
        self._ended = {partition: set(offsets) for partition, offsets in progress.ended_above.items()}
        self._remembered = OrderedDict.fromkeys(progress.remembered)

    def read(self, place: StepInput) -> bool:
        """Note that a record was read: True when it has not ended."""
        self._read[place.partition] = max(self._read.get(place.partition, 0), place.offset + 1)
        return place.offset not in self._ended.get(place.partition, ())

    def observe_step(self, step: DecidedStep) -> None:
        """Take over the decisions of a recorded step, or of one that is to be taken: its inputs and exclusions have
        ended."""
        trained = [place for place in step.inputs if place.topic == self._topic]
        self._decide(trained, [entry for entry in step.exclusions if entry.topic == self._topic])

    def close(self, trained: Iterable[StepInput], most: int | None = None) -> list[StepExclusion]:
        """A step trains the records at `trained`; the exclusions that it names, at most `most` of the unnamed ones."""
        named = self.excluded[:most]
        del self.excluded[:most]
        self._decide(trained, named)
        return named

    def exclude(self, place: StepInput, reason: Exclusion, rollouts: int) -> None:
        """End a record untrained, which refers to so many `rollouts`."""
        self.excluded.append(
            StepExclusion(place.group_id, place.topic, place.partition, place.offset, reason.value, rollouts)
        )
        self._end(place, reason.value)

    def _decide(self, trained: Iterable[StepInput], excluded: Iterable[StepExclusion]) -> None:
        """Take in all endings of a step, in one order for a step that is made and one that is read from the log: what
        is forgotten first does not depend on stops."""
        for place in trained:
            self._end(place)
        for entry in excluded:
            self._end(place_of_exclusion(entry), entry.reason)
        while len(self._remembered) > self._limit:
            self._remembered.popitem(last=False)

    def _end(self, place: StepInput, reason: str = "") -> None:
        """A record ends, excluded for a `reason` or trained.

        Its id is remembered, so that one that says the same is known, if only until the next step; unless it only said
        again what another record had said.
        """
        self._ended.setdefault(place.partition, set()).add(place.offset)
        if reason not in SECOND_RECORDS:
            self._remembered[place.group_id] = None
            # The last said counts, so that steps read again from the log leave the same ids behind.
            self._remembered.move_to_end(place.group_id)

    def remembers(self, record_id: str) -> bool:
        """Whether a record of this id has ended."""
        return record_id in self._remembered

    def progress(self, waiting: Iterable[StepInput]) -> TopicProgress:
        """Where to go on, when the records at `waiting` and the excluded ones are to be decided again."""
        following, undecided = dict(self._read), list(waiting)
        # The ids of those that only said again what another record had said stay remembered.
        forgotten = {entry.group_id for entry in self.excluded if entry.reason not in SECOND_RECORDS}
        forgotten |= {place.group_id for place in undecided}
        undecided += map(place_of_exclusion, self.excluded)
        again = {(place.partition, place.offset) for place in undecided}
        for partition, offset in again:
            following[partition] = min(following[partition], offset)
        return TopicProgress(
            next_offsets=following,
            ended_above={
                p: sorted(at for at in offsets if at >= following.get(p, 0) and (p, at) not in again)
                for p, offsets in self._ended.items()
            },
            remembered=[record_id for record_id in self._remembered if record_id not in forgotten],
        )


def place_of_exclusion(exclusion: StepExclusion) -> StepInput:
    """Where the excluded record lies."""
    return StepInput(exclusion.group_id, exclusion.topic, exclusion.partition, exclusion.offset)


@dataclass(frozen=True, slots=True)
class TrainableGroup:
    """One group of a batch. `rollouts` are its completed members' rollouts, in member order."""

    place: StepInput
    group: Group
    rollouts: tuple[Rollout, ...]
    replays: frozenset[str] = frozenset()
    """Ids of the replays that wrote its record or one of its rollouts."""
    expert_ids: tuple[ExpertIds, ...] = field(default=(), compare=False)
    """Of each of the rollouts, where they are asked for."""

    def rewards(self) -> npt.NDArray[np.float64]:
        """f8[G]: rewards of the completed members as group assembly recorded them, permuted ones in a control run."""
        return rewards(self.group)


def completed(group: Group) -> list[GroupMember]:
    """Members that finished with a reward, in member order."""
    return [m for m in group.members if m.status is RolloutStatus.COMPLETED and m.reward is not None]


def rewards(group: Group) -> npt.NDArray[np.float64]:
    """f8[G]: rewards of the completed members, in member order."""
    return np.array([member.reward for member in completed(group)], np.float64)


def has_signal(group: Group) -> bool:
    """Whether the completed members' rewards differ, so that some advantage is not zero."""
    values = rewards(group)
    return len(values) > 0 and bool(values.max() > values.min())


def other_sampling(sampled: Iterable[Rollout | Interaction]) -> str:
    """How any of these was sampled from another distribution than the model's own; empty where none was.

    A record from before this was recorded is taken to be of the model's own.
    """
    found = (record.sampling.changes() for record in sampled if record.sampling is not None)
    return next(filter(None, found), "")


@dataclass(frozen=True, slots=True)
class TrainableBatch:
    """The online batch of one step, of n interactions."""

    place: StepInput
    batch: OnlineBatch
    members: tuple[OnlineMember, ...]
    """What is trained, in the order of the record."""
    interactions: tuple[Interaction, ...]
    """Theirs, with their segments."""
    excluded: tuple[StepExclusion, ...] = ()
    """What of the record is not trained; only these exclusions of a step are of interactions."""

    def rewards(self) -> npt.NDArray[np.float64]:
        """f8[n]: the members' rewards; of a correction, what the reward changed by."""
        return np.array([member.reward for member in self.members], np.float64)

    def corrections(self) -> npt.NDArray[np.bool_]:
        """bool[n]: which members are corrections of a reward trained before."""
        return np.array([member.correction for member in self.members], np.bool_)

    def arms(self) -> list[str]:
        return [member.arm for member in self.members]


def exclusion(member: OnlineMember, reason: str) -> StepExclusion:
    """The one ending of an interaction that its batch is trained without."""
    return StepExclusion(
        member.interaction_id, Topic.INTERACTIONS.value, member.partition, member.offset, reason, rollouts=1
    )
