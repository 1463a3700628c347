"""Which recorded groups another bound on policy lag would have kept out of the steps, or let into them. Pure.

A group is judged as the trainer judged it: at the version that its step started from, by the oldest version among its
completed rollouts. What a step would have trained instead is not guessed: past the first step that differs the weights,
and with them the rollouts, would have been others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.records import Exclusion, Group, StepExclusion, StepInput, TrainStep
from tidemill.trainer.trainable import completed


class Moved(StrEnum):
    """What another bound changes about a group."""

    EXCLUDED = "excluded"
    """It was trained, and would have been too stale."""
    INCLUDED = "included"
    """It was too stale, and would have been let in."""


@dataclass(frozen=True, slots=True)
class MovedGroup:
    """A group that another bound judges otherwise."""

    group_id: str
    partition: int
    offset: int
    lag: int
    moved: Moved


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """The groups of one step under another bound."""

    step: int
    version: int
    """The version that it started from."""
    bound: int | None
    """The bound that it was taken with; None where the step does not say."""
    trained: int
    stale: int
    """Groups that it trained, and that it left out as too stale."""
    max_lag: int | None
    """Largest lag of a group that it trained; None without one."""
    moved: list[MovedGroup]
    unknown: int
    """Groups that the log no longer holds."""


def judge(steps: Iterable[TrainStep], groups: Mapping[Position, Group], bound: int) -> list[JudgedStep]:
    """Every step under a bound of `bound` versions, in order."""
    return [_judged(step, groups, bound) for step in steps]


def places_of(steps: Iterable[TrainStep]) -> set[Position]:
    """Positions of the groups that `judge` asks for."""
    return {Position.of(place) for step in steps for place in (*_trained(step), *_stale(step))}


def lag_of(group: Group, version: int) -> int:
    """How many versions the oldest completed rollout of a group is behind `version`; 0 without one."""
    return version - min((member.version_min for member in completed(group)), default=version)


def _judged(step: TrainStep, groups: Mapping[Position, Group], bound: int) -> JudgedStep:
    version = step.parent_version
    trained, stale = _trained(step), _stale(step)
    lags = {place: _lag(groups, place, version) for place in (*trained, *stale)}
    moved = [_moved(p, lag, Moved.EXCLUDED) for p in trained if (lag := lags[p]) is not None and lag > bound]
    moved += [_moved(p, lag, Moved.INCLUDED) for p in stale if (lag := lags[p]) is not None and lag <= bound]
    told = step.metrics.get("policy_lag_bound")
    return JudgedStep(
        step=step.step,
        version=version,
        bound=None if told is None else int(told),
        trained=len(trained),
        stale=len(stale),
        max_lag=max((lag for p in trained if (lag := lags[p]) is not None), default=None),
        moved=moved,
        unknown=sum(lag is None for lag in lags.values()),
    )


Judged = StepInput | StepExclusion


def _trained(step: TrainStep) -> list[Judged]:
    return [place for place in step.inputs if place.topic == Topic.GROUPS]


def _stale(step: TrainStep) -> list[Judged]:
    return [e for e in step.exclusions if e.topic == Topic.GROUPS and e.reason == Exclusion.STALE]


def _lag(groups: Mapping[Position, Group], place: Judged, version: int) -> int | None:
    group = groups.get(Position.of(place))
    return None if group is None else lag_of(group, version)


def _moved(place: Judged, lag: int, moved: Moved) -> MovedGroup:
    return MovedGroup(place.group_id, place.partition, place.offset, lag, moved)
