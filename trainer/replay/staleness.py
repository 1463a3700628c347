"""The recorded groups that another bound on policy lag would have excluded from the steps, or included.

A group is judged as the trainer judged it: at the version that its step started from, by the oldest version among its
completed rollouts. There is no guess of the groups that a step would have trained instead: after the first different
step, the weights and therefore the rollouts would have been different. Pure except `read_groups`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Exclusion, Group, StepExclusion, StepInput, TrainStep
from tidemill.trainer.trainable import lag_of

CLIENT = "tidemill-replay"


def read_groups(kafka: KafkaSettings, wanted: Set[Position], silence_s: float) -> Mapping[Position, Group]:
    """Return the groups at some positions; those that the log no longer has are left out.

    Raises TimeoutError if the log delivers nothing for `silence_s`.
    """
    with LogReader(kafka, client_id=CLIENT) as reader:
        found = reader.fetch(wanted, silence_s)
    return {position: read.record for position, read in found.items() if isinstance(read.record, Group)}


MOVED = ("excluded", "included")
"""The change of a group under another bound: it was trained, and would have been too stale; or it was too stale."""


@dataclass(frozen=True, slots=True)
class MovedGroup:
    """A group with another result under another bound."""

    group_id: str
    partition: int
    offset: int
    lag: int
    moved: str
    """One of `MOVED`."""


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """The groups of one step under another bound."""

    step: int
    version: int
    """The version that it started from."""
    bound: int | None
    """The bound at that time; None if the record does not contain it."""
    trained: int
    stale: int
    """Numbers of groups that it trained, and that it excluded as too stale."""
    max_lag: int | None
    """Largest lag of a group that it trained; None without one."""
    moved: list[MovedGroup]
    unknown: int
    """Number of groups that the log no longer has."""


def judge(steps: Iterable[TrainStep], groups: Mapping[Position, Group], bound: int) -> list[JudgedStep]:
    """Judge every step under a bound of `bound` versions, in order."""
    judged = []
    for step in steps:
        version, (trained, stale) = step.parent_version, _judged(step)
        held = {place: groups.get(Position.of(place)) for place in (*trained, *stale)}
        lags = {place: lag_of(group, version) for place, group in held.items() if group is not None}
        moved = [(p, "excluded") for p in trained if p in lags and lags[p] > bound]
        moved += [(p, "included") for p in stale if p in lags and lags[p] <= bound]
        recorded = step.metrics.get("policy_lag_bound")
        judged.append(
            JudgedStep(
                step=step.step,
                version=version,
                bound=None if recorded is None else int(recorded),
                trained=len(trained),
                stale=len(stale),
                max_lag=max((lags[p] for p in trained if p in lags), default=None),
                moved=[MovedGroup(p.group_id, p.partition, p.offset, lags[p], how) for p, how in moved],
                unknown=len(held) - len(lags),
            )
        )
    return judged


def places_of(steps: Iterable[TrainStep]) -> set[Position]:
    """Return the positions of the groups that `judge` needs."""
    return {Position.of(place) for step in steps for places in _judged(step) for place in places}


Judged = StepInput | StepExclusion


def _judged(step: TrainStep) -> tuple[list[Judged], list[Judged]]:
    """Return the groups that a step trained, and those that it excluded as too stale."""
    trained: list[Judged] = [place for place in step.inputs if place.topic == Topic.GROUPS]
    stale: list[Judged] = [e for e in step.exclusions if e.topic == Topic.GROUPS and e.reason == Exclusion.STALE]
    return trained, stale
