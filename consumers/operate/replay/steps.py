"""Which records the steps and versions of a run are made of, from what `train.steps` says."""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.consumers.operate.replay.references import Place, references
from tidemill.consumers.operate.replay.selection import Span
from tidemill.schemas.records import Record, StepPlan, TrainStep


class StepIndex:
    """The steps of one run: for each the places of its own record, of its inputs, and of what it left out."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._taken: dict[int, set[Place]] = {}
        self._begun: dict[int, set[Place]] = {}
        self._made: dict[int, set[Place]] = {}

    def observe(self, place: Place, record: Record | None) -> None:
        """One record of `train.steps` and where it lies."""
        if not isinstance(record, TrainStep | StepPlan) or record.run_id != self._run_id:
            return
        places = {place, *references(record)}
        if isinstance(record, StepPlan):
            self._begun.setdefault(record.step, set()).update(places)
            return
        self._taken.setdefault(record.step, set()).update(places)
        self._made.setdefault(record.version, set()).update(places)

    def of_steps(self, steps: Iterable[Span]) -> set[Place]:
        """Places of some steps; of one that was begun and not taken, those of its plan.

        Raises LookupError when the run has no such step.
        """
        return self._chosen("step", {**self._begun, **self._taken}, steps)

    def of_versions(self, versions: Iterable[Span]) -> set[Place]:
        """Places of the steps that made some versions. Raises LookupError when no step made them."""
        return self._chosen("version", self._made, versions)

    def _chosen(self, what: str, known: dict[int, set[Place]], spans: Iterable[Span]) -> set[Place]:
        chosen: set[Place] = set()
        for span in spans:
            found = [number for number in known if number in span]
            if not {span.first, span.last} <= set(found):
                there = f"{min(known)} to {max(known)}" if known else "none"
                raise LookupError(f"train.steps has no {what} {span} of run {self._run_id!r}; there are {there}")
            chosen |= set().union(*(known[number] for number in found))
        return chosen
