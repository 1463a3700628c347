"""What the log says of groups, steps and versions."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from tidemill.consumers.operate.audit.copies import Standing, standing
from tidemill.consumers.operate.trace.place import Place
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import (
    GateDecision,
    Group,
    Manifest,
    SkipDelta,
    StepExclusion,
    StepInput,
    StepPlan,
    TrainStep,
    WeightAck,
)

TRAINED = "trained"


@dataclass(frozen=True, slots=True)
class Use:
    """A step names a record: it trained on it, or says why it did not."""

    step: Standing[TrainStep]
    reason: str
    """`TRAINED`, or why not."""


class Model:
    """Groups, the steps that ended them, the versions that the steps made, and who held those."""

    def __init__(self) -> None:
        self.groups: list[Standing[Group]] = []
        self.group_at: dict[Place, Standing[Group]] = {}
        self.groups_of: defaultdict[str, list[Standing[Group]]] = defaultdict(list)
        """By group id, in the order read."""
        self.steps: list[Standing[TrainStep]] = []
        self.begun_and_taken: list[Standing[StepPlan | TrainStep]] = []
        """Plans and steps in the order of the log."""
        self.uses: defaultdict[Place, list[Use]] = defaultdict(list)
        """By the place that a step names."""
        self.manifests: list[Standing[Manifest]] = []
        """Without the lists of their tensors and chunks."""
        self.skips: list[Standing[SkipDelta]] = []
        self.acks: list[Standing[WeightAck]] = []
        self.decisions: list[Standing[GateDecision]] = []
        """Decisions of the gate."""
        self.repeats: Counter[str] = Counter()

    def observe(self, located: ConsumedRecord) -> None:
        """Take a record of the run in."""
        match located.record:
            case Group() as group:
                self._take_group(standing(located, group))
            case TrainStep() as step:
                self._take_step(standing(located, step))
            case StepPlan() as plan:
                self._take_plan(standing(located, plan))
            case Manifest() as manifest:
                lean = replace(manifest, tensors=[], tensor_table=None, shards=[])
                self.manifests.append(standing(located, lean))
            case SkipDelta() as skip:
                self.skips.append(standing(located, replace(skip, shards=[])))
            case WeightAck() as ack:
                self.acks.append(standing(located, ack))
            case GateDecision() as decision:
                self.decisions.append(standing(located, decision))

    def _take_group(self, group: Standing[Group]) -> None:
        known = self.groups_of[group.record.group_id]
        self.repeats["groups"] += any(other.digest == group.digest for other in known)
        known.append(group)
        self.groups.append(group)
        self.group_at[group.place] = group

    def _take_plan(self, plan: Standing[StepPlan]) -> None:
        last = self.begun_and_taken[-1].record if self.begun_and_taken else None
        self.repeats["plans"] += isinstance(last, StepPlan) and last.step == plan.record.step
        self.begun_and_taken.append(plan)

    def _take_step(self, step: Standing[TrainStep]) -> None:
        self.steps.append(step)
        self.begun_and_taken.append(step)
        for place in step.record.inputs:
            self.uses[named(place)].append(Use(step, TRAINED))
        for excluded in step.record.exclusions:
            self.uses[named(excluded)].append(Use(step, excluded.reason))


def references(step: TrainStep) -> list[StepInput | StepExclusion]:
    """Everything that a step names: what it trained on, then what it left out."""
    return [*step.inputs, *step.exclusions]


def named(reference: StepInput | StepExclusion) -> Place:
    """The place that a step names."""
    return Place(reference.topic, reference.partition, reference.offset)
