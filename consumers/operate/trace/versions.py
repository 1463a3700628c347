"""The weight versions of a run, and how the trainer used each group and batch. A pure fold over the model's topics.

A version contains the training of its ancestors. Ancestors are followed by parent, since after a roll-back a later
number need not descend from an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tidemill.consumers.operate import copied
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.records import AckStatus, GateDecision, Manifest, TrainStep, WeightAck


@dataclass(frozen=True, slots=True)
class VersionDecision:
    place: Position
    verdict: str
    by: str
    reason: str
    numbers: dict[str, float]
    at: int


@dataclass(frozen=True, slots=True)
class TracedVersion:
    """A weight version, and how it ended."""

    version: int
    parent: int | None
    step: int
    step_place: Position | None
    """None where the log no longer holds the step."""
    manifest_place: Position | None
    """None where the version is not published yet."""
    learning_rate: float | None
    decisions: list[VersionDecision]
    proved_by: list[str]
    """Replicas that proved it from their live tensors at some time."""
    served_first_at: int | None
    """When a replica served it, or a version that contains it, first."""
    served_by: dict[str, int]
    """Replicas that serve it or a version that contains it now, with the version that they serve."""
    contained_in: str
    """Later versions that contain it, as ranges."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What the trainer did with something that it read."""

    step: Position | None
    """The step that trained on it, or that says why it was left out; None while it waits."""
    version: int | None
    """The version that the step made with it; None where it was left out or waits."""
    reason: str
    """Why it was left out; empty otherwise."""


WAITING = Ended(None, None, "")


@dataclass(slots=True)
class _Version:
    parent: int | None = None
    step: TrainStep | None = None
    step_place: Position | None = None
    step_number: int = 0
    manifest_place: Position | None = None


class VersionHistory:
    """The versions of every branch of one run. Take the topics in any order, each in its own."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._versions: dict[int, _Version] = {}
        self._decisions: dict[int, list[VersionDecision]] = {}
        self._proved: dict[int, set[str]] = {}
        self._acks: dict[str, WeightAck] = {}
        self._served_at: dict[int, int] = {}
        self.steps: list[tuple[Position, TrainStep]] = []
        """Each step once, in order."""

    def observe(self, located: ConsumedRecord) -> None:
        """Take a record in; other runs and kinds are let pass, a step or a version said twice counts once."""
        record = located.record
        if getattr(record, "run_id", None) != self._run_id:
            return
        match record:
            case TrainStep():
                made = self._versions.setdefault(record.version, _Version())
                if made.step is None:
                    made.parent, made.step = record.parent_version, record
                    made.step_place, made.step_number = located.position, record.step
                    self.steps.append((located.position, record))
            case Manifest():
                made = self._versions.setdefault(record.version, _Version())
                if made.manifest_place is None:
                    made.manifest_place, made.step_number = located.position, record.step
                    made.parent = record.parent if made.step is None else made.parent
            case GateDecision() if record.version is not None:
                decided = copied(VersionDecision, record, place=located.position, by=record.decided_by)
                self._decisions.setdefault(record.version, []).append(decided)
            case WeightAck():
                self._acks[record.replica_id] = record
                if record.status is not AckStatus.REFUSED:
                    self._proved.setdefault(record.version, set()).add(record.replica_id)
                    self._served_at.setdefault(record.serving_version, record.at)

    def made(self, version: int) -> TracedVersion:
        known = self._versions.get(version, _Version())
        containing = self.containing([version])
        step = known.step
        return TracedVersion(
            version=version,
            parent=known.parent,
            step=known.step_number,
            step_place=known.step_place,
            manifest_place=known.manifest_place,
            learning_rate=None if step is None else step.learning_rate,
            decisions=self._decisions.get(version, []),
            proved_by=sorted(self._proved.get(version, ())),
            served_first_at=min((self._served_at[v] for v in containing if v in self._served_at), default=None),
            served_by=self.serving(containing),
            contained_in=ranges(containing - {version}),
        )

    def containing(self, versions: Iterable[int]) -> set[int]:
        children: dict[int, list[int]] = {}
        for version, made in self._versions.items():
            if made.parent is not None:
                children.setdefault(made.parent, []).append(version)
        found, waiting = set[int](), list(versions)
        while waiting:
            version = waiting.pop()
            if version not in found:
                found.add(version)
                waiting += children.get(version, [])
        return found

    def serving(self, versions: Iterable[int]) -> dict[str, int]:
        """Replicas whose last word is that they serve one of these versions."""
        wanted = set(versions)
        now = {replica: ack.serving_version for replica, ack in sorted(self._acks.items())}
        return {replica: version for replica, version in now.items() if version in wanted}

    def ended(self, topic: Topic, name: str, member: str = "") -> Ended:
        """What the trainer did with a group or batch; with an interaction that is a member of a batch, which a trained
        batch may have left out."""
        for place, step in self.steps:
            if any((read.topic, read.group_id) == (topic.value, name) for read in step.inputs):
                left_out = self._reasons(step, Topic.INTERACTIONS, member)
                return Ended(place, None, left_out[0]) if left_out else Ended(place, step.version, "")
        for place, step in self.steps:
            for reason in self._reasons(step, topic, name):
                return Ended(place, None, reason)
        return WAITING

    def _reasons(self, step: TrainStep, topic: Topic, name: str) -> list[str]:
        return [each.reason for each in step.exclusions if (each.topic, each.group_id) == (topic.value, name)]


def ranges(versions: Iterable[int]) -> str:
    """`{3, 4, 5, 9}` as `3-5, 9`; empty for none."""
    parts: list[list[int]] = []
    for version in sorted(versions):
        if parts and version == parts[-1][1] + 1:
            parts[-1][1] = version
        else:
            parts.append([version, version])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
