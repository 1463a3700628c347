"""A step is taken as it was planned."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.ledger.check import Case, Check
from tidemill.consumers.ledger.copies import Standing
from tidemill.consumers.ledger.finding import Finding
from tidemill.schemas.records import StepPlan, TrainStep

DECISIVE = ("parent_version", "inputs", "seed", "config_hash")


def _find(case: Case) -> Iterator[Finding]:
    plans: dict[int, Standing[StepPlan]] = {}
    for plan in case.facts.model.plans:
        first = plans.setdefault(plan.record.step, plan)
        field = _difference(first.record, plan.record)
        if field:
            yield Finding(plan.place, f"step {plan.record.step} was planned at {first.place} with other {field}")
    oldest = min((plan.place.offset for plan in plans.values()), default=None)
    for step in case.facts.model.steps:
        found = plans.get(step.record.step)
        if found is None:
            if oldest is not None and step.place.offset > oldest:
                yield Finding(step.place, f"step {step.record.step} was taken without a plan")
        elif found.place.offset > step.place.offset:
            yield Finding(step.place, f"step {step.record.step} was planned after it was taken, at {found.place}")
        else:
            field = _difference(found.record, step.record)
            if field:
                yield Finding(step.place, f"step {step.record.step} was taken with other {field} than {found.place}")


def _difference(plan: StepPlan, other: StepPlan | TrainStep) -> str:
    return next((field for field in DECISIVE if getattr(plan, field) != getattr(other, field)), "")


CHECK = Check(
    "plans",
    "every step was planned before it was taken, with the same parent, inputs, seed and settings, however often it "
    "was begun",
    _find,
)
