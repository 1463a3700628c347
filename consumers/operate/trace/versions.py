"""The weight versions of a run, and the trainer's use of each group and batch. A pure fold over the model's topics.

A version contains the training of its ancestors. Ancestors are followed by parent, since after a roll-back a later
number need not descend from an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tidemill.consumers.operate import picked
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.records import AckStatus, GateDecision, Manifest, TrainStep, WeightAck


@dataclass(frozen=True, slots=True)
class TracedVersion:
    """A weight version with its decisions, proofs and use."""

    version: int
    parent: int | None
    step: int
    step_place: Position | None
    """None if the log no longer holds the step."""
    manifest_place: Position | None
    """None if the version is not published yet."""
    learning_rate: float | None
    decisions: list[dict[str, Any]]
    """The gate's decisions: place, verdict, by, reason, numbers and at."""
    proved_by: list[str]
    """Replicas that have ever proved it from their live tensors."""
    served_first_at: int | None
    """Time when a replica first served it or a version that contains it."""
    served_by: dict[str, int]
    """Replicas that serve it or a version that contains it now, with the version that they serve."""
    contained_in: str
    """Later versions that contain it, as ranges."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The trainer's use of an input."""

    step: Position | None
    """The step that trained on it or excluded it; None while it waits."""
    version: int | None
    """The version that the step made with it; None if it was excluded or waits."""
    reason: str
    """The reason of its exclusion; empty otherwise."""


WAITING = Ended(None, None, "")


class VersionHistory:
    """The versions of every branch of one run. Observe the topics in any order, the records of each in their order."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._steps: dict[int, tuple[Position, TrainStep]] = {}
        """By the version that a step made."""
        self._manifests: dict[int, tuple[Position, Manifest]] = {}
        self._decisions: dict[int, list[dict[str, Any]]] = {}
        self._proved: dict[int, set[str]] = {}
        self._acks: dict[str, WeightAck] = {}
        self._served_at: dict[int, int] = {}

    def observe(self, located: ConsumedRecord) -> None:
        """Observe a record; other runs and types are ignored, a repeated step or version counts once."""
        record = located.record
        if getattr(record, "run_id", None) != self._run_id:
            return
        match record:
            case TrainStep():
                self._steps.setdefault(record.version, (located.position, record))
            case Manifest():
                self._manifests.setdefault(record.version, (located.position, record))
            case GateDecision() if record.version is not None:
                decided = picked(record, "verdict reason numbers at", place=located.position, by=record.decided_by)
                self._decisions.setdefault(record.version, []).append(decided)
            case WeightAck():
                self._acks[record.replica_id] = record
                if record.status is not AckStatus.REFUSED:
                    self._proved.setdefault(record.version, set()).add(record.replica_id)
                    # Acknowledgements of several replicas do not arrive in the order of their times.
                    first = self._served_at.get(record.serving_version, record.at)
                    self._served_at[record.serving_version] = min(first, record.at)

    def made(self, version: int) -> TracedVersion:
        containing = self.containing([version])
        step_place, step = self._steps.get(version, (None, None))
        manifest_place, manifest = self._manifests.get(version, (None, None))
        made_by = step or manifest
        return TracedVersion(
            version=version,
            parent=self._parent(version),
            step=0 if made_by is None else made_by.step,
            step_place=step_place,
            manifest_place=manifest_place,
            learning_rate=None if step is None else step.learning_rate,
            decisions=self._decisions.get(version, []),
            proved_by=sorted(self._proved.get(version, ())),
            served_first_at=min((self._served_at[v] for v in containing if v in self._served_at), default=None),
            served_by=self.serving(containing),
            contained_in=ranges(containing - {version}),
        )

    def _parent(self, version: int) -> int | None:
        if version in self._steps:
            return self._steps[version][1].parent_version
        return self._manifests[version][1].parent if version in self._manifests else None

    def containing(self, versions: Iterable[int]) -> set[int]:
        children: dict[int, list[int]] = {}
        for version in self._steps.keys() | self._manifests.keys():
            parent = self._parent(version)
            if parent is not None:
                children.setdefault(parent, []).append(version)
        found, waiting = set[int](), list(versions)
        while waiting:
            version = waiting.pop()
            if version not in found:
                found.add(version)
                waiting += children.get(version, [])
        return found

    def serving(self, versions: Iterable[int]) -> dict[str, int]:
        """Return the replicas whose last acknowledgement says that they serve one of these versions."""
        wanted = set(versions)
        now = {replica: ack.serving_version for replica, ack in sorted(self._acks.items())}
        return {replica: version for replica, version in now.items() if version in wanted}

    def ended(self, topic: Topic, name: str, member: str = "") -> Ended:
        """Return the trainer's use of a group or batch; with `member`, that of an interaction in a batch, which a step
        may have excluded although it trained on the batch."""

        def reasons(step: TrainStep, topic: Topic, name: str) -> list[str]:
            return [each.reason for each in step.exclusions if (each.topic, each.group_id) == (topic.value, name)]

        for place, step in self._steps.values():
            if any((read.topic, read.group_id) == (topic.value, name) for read in step.inputs):
                left_out = reasons(step, Topic.INTERACTIONS, member)
                return Ended(place, None, left_out[0]) if left_out else Ended(place, step.version, "")
        for place, step in self._steps.values():
            for reason in reasons(step, topic, name):
                return Ended(place, None, reason)
        return WAITING


def ranges(versions: Iterable[int]) -> str:
    """Format `{3, 4, 5, 9}` as `3-5, 9`; empty if there are none."""
    parts: list[list[int]] = []
    for version in sorted(versions):
        if parts and version == parts[-1][1] + 1:
            parts[-1][1] = version
        else:
            parts.append([version, version])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
