"""The inputs of steps: groups and online batches, and the state of a topic's records (waiting or ended). Pure.

A step is trained on groups with their rollouts, and on an online batch with its remaining interactions. Each has a
record and a position in the log. Every record ends exactly once, also across restarts: it has ended when a step trained
or excluded it. Records are identified by their position; duplicates are recognised by their id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import RunSettings
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
from tidemill.trainer.config import TrainerSettings

DecidedStep = TrainStep | StepPlan
"""A step whose inputs and exclusions are decided, even if it is not taken yet."""


@dataclass(frozen=True, slots=True)
class TopicProgress:
    """Progress in a topic; stored in the checkpoint."""

    next_offsets: Mapping[int, int] = field(default_factory=dict)
    """By partition: every record before this offset has ended or is of another run."""
    ended_above: Mapping[int, list[int]] = field(default_factory=dict)
    """By partition: offsets at or above `next_offsets` of records that have ended."""
    remembered: list[str] = field(default_factory=list)
    """Ids of records that have ended, oldest first."""


R = TypeVar("R")
W = TypeVar("W", bound="Reference[Any] | TrainableGroup")


@dataclass(frozen=True, slots=True)
class Reference(Generic[R]):
    """A record that refers to other records, with its position in the log."""

    place: StepInput
    record: R
    replay_id: str = ""
    """Id of the replay that wrote it; empty if none did."""


MOST_EXCLUSIONS = 4_096
"""Maximum number of exclusions that fit into one record."""


class InputQueue(Generic[W]):
    """The waiting and the ended records of one topic.

    Args:
        progress: the position from which to continue; None for the beginning.
        incarnation: the incarnation of the run's versions; None if incarnations are not compared.
    """

    def __init__(
        self,
        topic: Topic,
        run: RunSettings,
        settings: TrainerSettings,
        progress: TopicProgress | None,
        incarnation: str | None,
    ) -> None:
        progress = progress or TopicProgress()
        self._topic, self._run, self._settings, self._incarnation = topic, run, settings, incarnation
        self._waiting: dict[str, W] = {}
        """The records that can be trained, by id, oldest first."""
        self._excluded: list[StepExclusion] = []
        """The exclusions that no step record has named yet."""
        self._excluded_ids: set[str] = set()
        """Their ids, except those of duplicates of other records."""
        self._read = dict(progress.next_offsets)
        self._ended = {partition: set(offsets) for partition, offsets in progress.ended_above.items()}
        self._remembered = OrderedDict.fromkeys(progress.remembered)

    def observe_step(self, step: DecidedStep) -> None:
        """Apply the decisions of a step that is recorded or about to be taken: its inputs and exclusions have ended."""
        trained = [place for place in step.inputs if place.topic == self._topic]
        self._decide(trained, [entry for entry in step.exclusions if entry.topic == self._topic])

    def exclude(self, place: StepInput, reason: Exclusion, rollouts: int) -> None:
        """Exclude a record that refers to `rollouts` rollouts."""
        entry = StepExclusion(place.group_id, place.topic, place.partition, place.offset, reason.value, rollouts)
        self._excluded.append(entry)
        self._ended.setdefault(place.partition, set()).add(place.offset)
        if reason not in SECOND_RECORDS:
            self._excluded_ids.add(place.group_id)

    def progress(self) -> TopicProgress:
        """Return the position after the last step, from which to continue: waiting records, and exclusions that no step
        has named, are decided again."""
        again = {(each.partition, each.offset) for each in self._excluded}
        again |= {(one.place.partition, one.place.offset) for one in self._waiting.values()}
        following = dict(self._read)
        for partition, offset in again:
            following[partition] = min(following[partition], offset)
        # Offsets before the position are never read again.
        self._ended = {p: {at for at in ended if at >= following.get(p, 0)} for p, ended in self._ended.items()}
        return TopicProgress(
            next_offsets=following,
            ended_above={p: sorted(at for at in ended if (p, at) not in again) for p, ended in self._ended.items()},
            remembered=list(self._remembered),
        )

    def is_new(self, place: StepInput) -> bool:
        """Register that a record was read; return whether it has not ended."""
        self._read[place.partition] = max(self._read.get(place.partition, 0), place.offset + 1)
        return place.offset not in self._ended.get(place.partition, ())

    def is_known(self, record_id: str) -> bool:
        """Return whether a record with this id waits or has ended."""
        return any(record_id in known for known in (self._waiting, self._remembered, self._excluded_ids))

    def refuses(self, replay_id: str) -> bool:
        return bool(replay_id) and replay_id not in self._settings.accept_replays

    def name_exclusions(self, trained: Iterable[StepInput], most: int) -> list[StepExclusion]:
        """End the records at `trained`. Return the oldest exclusions, at most `most`, for the record of the step; the
        next step names the remaining ones."""
        named, self._excluded = self._excluded[:most], self._excluded[most:]
        self._excluded_ids = {each.group_id for each in self._excluded if each.reason not in SECOND_RECORDS}
        self._decide(trained, named)
        return named

    def _decide(self, trained: Iterable[StepInput], excluded: Iterable[StepExclusion]) -> None:
        """Register all endings of a step, in the same order for a new step and for one read from the log: so the order
        in which ids are forgotten does not depend on restarts."""
        endings: list[StepInput | StepExclusion] = [*trained, *excluded]
        for ending in endings:
            self._ended.setdefault(ending.partition, set()).add(ending.offset)
            if isinstance(ending, StepInput) or ending.reason not in SECOND_RECORDS:
                self._remembered[ending.group_id] = None
                self._remembered.move_to_end(ending.group_id)
        while len(self._remembered) > self._settings.remembered_groups:
            self._remembered.popitem(last=False)


@dataclass(frozen=True, slots=True)
class TrainableGroup:
    """One group of a batch. `rollouts` are its completed members' rollouts, in member order."""

    place: StepInput
    group: Group
    rollouts: tuple[Rollout, ...]
    replays: frozenset[str] = frozenset()
    """Ids of the replays that wrote its record or one of its rollouts."""
    expert_ids: tuple[ExpertIds, ...] = field(default=(), compare=False)
    """The expert ids of each rollout, if the routing uses them."""


def completed(group: Group) -> list[GroupMember]:
    """Return the members that finished with a reward, in member order."""
    return [m for m in group.members if m.status is RolloutStatus.COMPLETED and m.reward is not None]


def rewards_of(group: Group) -> npt.NDArray[np.float64]:
    """Return f8[G]: rewards of the completed members, in member order."""
    return np.array([member.reward for member in completed(group)], np.float64)


def lag_of(group: Group, version: int) -> int:
    """Return the number of versions that the oldest completed rollout of a group is behind `version`; 0 without one."""
    return version - min((member.version_min for member in completed(group)), default=version)


def has_signal(group: Group) -> bool:
    """Return whether the completed members' rewards differ, so that some advantage is not zero."""
    values = rewards_of(group)
    return len(values) > 0 and bool(values.max() > values.min())


def other_sampling(sampled: Iterable[Rollout | Interaction]) -> str:
    """Describe how one of these was sampled from another distribution than the model's own; empty if none was.

    Old records without this field count as sampled from the model's own distribution.
    """
    found = (record.sampling.changes() for record in sampled if record.sampling is not None)
    return next(filter(None, found), "")


@dataclass(frozen=True, slots=True)
class TrainableBatch:
    """The online batch of one step, of n interactions."""

    place: StepInput
    batch: OnlineBatch
    members: tuple[OnlineMember, ...]
    """The members that are trained, in the order of the record."""
    interactions: tuple[Interaction, ...]
    """The interactions of these members, with their segments."""
    excluded: tuple[StepExclusion, ...] = ()
    """The members of the record that are not trained; no other exclusions of a step are of interactions."""

    def rewards(self) -> npt.NDArray[np.float64]:
        """Return f8[n]: the members' rewards; for a correction, the change of the reward."""
        return np.array([member.reward for member in self.members], np.float64)

    def corrections(self) -> npt.NDArray[np.bool_]:
        """Return bool[n]: which members are corrections of a reward that was trained before."""
        return np.array([member.correction for member in self.members], np.bool_)

    def arms(self) -> list[str]:
        return [member.arm for member in self.members]
