"""A step is taken as it was planned last, and is planned anew only for a reason that the log knows."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.consumers.operate.audit.gone import Readable
from tidemill.consumers.operate.trace.place import Place
from tidemill.schemas.records import GateVerdict, StepPlan, TrainStep

DECISIVE = ("parent_version", "inputs", "exclusions", "seed", "config_hash")
GIVES_UP = frozenset({GateVerdict.REJECT, GateVerdict.ROLL_BACK, GateVerdict.PROMOTE})
"""Decisions after which versions may not be trained on."""


_Plans = dict[int, tuple[Place, StepPlan]]


def _find(case: Case) -> Iterator[Finding]:
    plans: _Plans = {}
    readable = Readable(case.facts, case.rules.grace_us)
    taken: dict[int, Place] = {}
    for standing in case.facts.model.begun_and_taken:
        said, number = standing.record, standing.record.step
        if isinstance(said, StepPlan):
            problem = _of_plan(case.facts, readable, said, plans, taken)
            plans[number] = (standing.place, said)
        else:
            problem = _of_step(said, plans)
            taken[number] = standing.place
        if problem:
            yield Finding(standing.place, f"step {number} {problem}")


def _of_step(step: TrainStep, plans: _Plans) -> str:
    if step.step not in plans:
        # A run that was begun before there were plans has none for its first steps.
        return "was taken without a plan" if plans else ""
    place, plan = plans[step.step]
    field = _difference(plan, step)
    return f"was taken with other {field} than {place} planned" if field else ""


def _of_plan(facts: Facts, readable: Readable, plan: StepPlan, plans: _Plans, taken: dict[int, Place]) -> str:
    if plan.step in taken:
        return f"was planned after it was taken, at {taken[plan.step]}"
    place, before = plans.get(plan.step, (None, plan))
    field = _difference(before, plan)
    if not field or _is_outdated(facts, readable, before, plan):
        return ""
    return f"was planned at {place} with other {field}, and nothing in the log stood against that plan"


def _is_outdated(facts: Facts, readable: Readable, before: StepPlan, now: StepPlan) -> bool:
    """Whether a trainer that came back had to plan anew."""
    if before.trainer == now.trainer:
        return False
    # Who goes on from a version that was given up goes on from another one.
    moved = before.parent_version != now.parent_version
    given_up = moved and any(decision.record.verdict in GIVES_UP for decision in facts.model.decisions)
    return before.config_hash != now.config_hash or given_up or readable.lacks(before, now.at)


def _difference(plan: StepPlan, other: StepPlan | TrainStep) -> str:
    return next((field for field in DECISIVE if getattr(plan, field) != getattr(other, field)), "")


CHECK = Check(
    "plans",
    "every step was planned before it was taken, and was taken as it was planned last; a trainer that came back "
    "planned it anew only where the settings, the gate, or the loss of something that it reads to retention or an "
    "erasure stood against the first plan",
    _find,
)
