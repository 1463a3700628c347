"""Groups that the trainer passed over: it reads a partition in order and takes the oldest group that waits first."""

from __future__ import annotations

from collections import defaultdict

from tidemill.consumers.operate.audit.copies import Standing
from tidemill.consumers.operate.audit.model_facts import TRAINED, Model
from tidemill.consumers.operate.trace.place import Place
from tidemill.schemas.records import Group

PATIENCE = 2
"""Steps that have to pass a group over: its rollouts may have come to the trainer a moment after a younger group's."""


class PassedOver:
    """Which groups stood before groups that were trained."""

    def __init__(self, model: Model) -> None:
        self._groups = model.group_at
        self._trained: defaultdict[int, list[tuple[Standing[Group], int]]] = defaultdict(list)
        """Trained groups with their steps, by partition, in the order of the log."""
        for place in sorted(model.group_at, key=lambda at: (at.partition, at.offset)):
            steps = [use.step.record.step for use in model.uses.get(place, ()) if use.reason == TRAINED]
            if steps:
                self._trained[place.partition].append((model.group_at[place], steps[0]))

    def by_steps(self, place: Place) -> bool:
        """Whether steps trained on younger groups that lie behind the one at `place`, and not on it."""
        age, steps = self._groups[place].record.closed_at, set[int]()
        for group, step in reversed(self._trained[place.partition]):
            if group.place.offset < place.offset or len(steps) >= PATIENCE:
                break
            if group.record.closed_at > age:
                steps.add(step)
        return len(steps) >= PATIENCE
