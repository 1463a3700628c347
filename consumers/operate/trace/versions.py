"""The weight versions of a run, and the trainer's use of each group and batch. A pure fold over the model's topics.

A version contains the training of its ancestors. Ancestors are followed by parent, since after a roll-back a later
number need not descend from an earlier one. Two branches may have different versions with the same number: a version is
identified by branch and number. A step does not name its branch: it made the versions with its number and fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.consumers.operate import picked
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.records import AckStatus, GateDecision, Manifest, TrainStep, WeightAck

Version = tuple[str, int]
"""Branch and number. The branch is empty if the log does not show it: the version is not published."""
StepAt = tuple[Position, TrainStep]


@dataclass(frozen=True, slots=True)
class TracedVersion:
    version: int
    branch: str
    """Empty if the log does not show it: the version is not published."""
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
    """Later versions of the branch that contain it, as ranges."""


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
        self._steps: dict[tuple[int, str], StepAt] = {}
        """By the number and the fingerprint of the version that a step made."""
        self._manifests: dict[Version, tuple[Position, Manifest]] = {}
        self._decisions: dict[Version, list[dict[str, Any]]] = {}
        self._proved: dict[Version, set[str]] = {}
        self._acks: dict[str, WeightAck] = {}
        self._served_at: dict[Version, int] = {}

    def observe(self, located: ConsumedRecord) -> None:
        """Observe a record; other runs and types are ignored, a repeated step or version counts once."""
        record = located.record
        if getattr(record, "run_id", None) != self._run_id:
            return
        match record:
            case TrainStep():
                self._steps.setdefault((record.version, record.fingerprint), (located.position, record))
            case Manifest():
                self._manifests.setdefault((record.branch, record.version), (located.position, record))
            case GateDecision() if record.version is not None:
                decided = picked(record, "verdict reason numbers at", place=located.position, by=record.decided_by)
                self._decisions.setdefault((record.branch, record.version), []).append(decided)
            case WeightAck():
                self._acks[record.replica_id] = record
                if record.status is not AckStatus.REFUSED:
                    self._proved.setdefault((record.branch, record.version), set()).add(record.replica_id)
                    # Acknowledgements of several replicas do not arrive in the order of their times.
                    serving = (record.branch, record.serving_version)
                    self._served_at[serving] = min(self._served_at.get(serving, record.at), record.at)

    def made(self, endings: Iterable[Ended], branch: str = "") -> list[TracedVersion]:
        """Return the versions that were trained on inputs with these ends, in the order of their numbers.

        Args:
            branch: the branch of the inputs; versions of other branches are returned only if it has none of them.
        """
        steps = {ending.step for ending in endings if ending.version is not None}
        made_by = self._versions()
        versions = [version for version, step in made_by.items() if step is not None and step[0] in steps]
        own = [version for version in versions if version[0] == branch]
        return [self._traced(version, made_by) for version in sorted(own or versions, key=lambda one: (one[1], one[0]))]

    def _versions(self) -> dict[Version, StepAt | None]:
        """Return every version with the step that made it, None if the log no longer holds the step."""
        found = {
            version: self._steps.get((manifest.version, manifest.fingerprint))
            for version, (_, manifest) in self._manifests.items()
        }
        branches: dict[str, set[str]] = {}
        for _, manifest in self._manifests.values():
            branches.setdefault(manifest.incarnation, set()).add(manifest.branch)
        published = {step[0] for step in found.values() if step is not None}
        for place, step in self._steps.values():
            if place not in published:
                of = branches.get(step.incarnation, set())
                version = (min(of) if len(of) == 1 else "", step.version)
                if found.get(version) is not None:
                    version = ("", step.version)
                found[version] = (place, step)
        return found

    def _traced(self, version: Version, made_by: Mapping[Version, StepAt | None]) -> TracedVersion:
        containing = self._containing([version], made_by)
        step_place, step = made_by[version] or (None, None)
        manifest_place, manifest = self._manifests.get(version, (None, None))
        maker = step or manifest
        return TracedVersion(
            version=version[1],
            branch=version[0],
            parent=step.parent_version if step is not None else None if manifest is None else manifest.parent,
            step=0 if maker is None else maker.step,
            step_place=step_place,
            manifest_place=manifest_place,
            learning_rate=None if step is None else step.learning_rate,
            decisions=self._decisions.get(version, []),
            proved_by=sorted(self._proved.get(version, ())),
            served_first_at=min((self._served_at[v] for v in containing if v in self._served_at), default=None),
            served_by=self._serving(containing),
            contained_in=ranges(number for _, number in containing - {version}),
        )

    def _containing(self, versions: Iterable[Version], made_by: Mapping[Version, StepAt | None]) -> set[Version]:
        """Return versions and all their descendants; `made_by` is the result of `_versions`."""
        children: dict[Version, list[Version]] = {}
        for (branch, number), step in made_by.items():
            parent = self._manifests[branch, number][1].parent if step is None else step[1].parent_version
            if parent is not None:
                children.setdefault((branch, parent), []).append((branch, number))
        found, waiting = set[Version](), list(versions)
        while waiting:
            version = waiting.pop()
            if version not in found:
                found.add(version)
                waiting += children.get(version, [])
        return found

    def _serving(self, versions: Iterable[Version]) -> dict[str, int]:
        """Return the replicas whose last acknowledgement says that they serve one of these versions."""
        wanted = set(versions)
        now = sorted(self._acks.items())
        return {replica: ack.serving_version for replica, ack in now if (ack.branch, ack.serving_version) in wanted}

    def contained_in(self, versions: Iterable[TracedVersion]) -> tuple[str, dict[str, int]]:
        """Return versions of one branch and all their descendants, as ranges, and the replicas that serve one of them
        now, with the version that they serve."""
        containing = self._containing(((made.branch, made.version) for made in versions), self._versions())
        return ranges(number for _, number in containing), self._serving(containing)

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
