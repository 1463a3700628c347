"""Steps form one chain."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.records import TrainStep


def _find(case: Case) -> Iterator[Finding]:
    facts = case.facts
    made = {0: _start(facts)}
    expected = 1
    for standing in facts.model.steps:
        step = standing.record
        if expected == 1 and facts.is_truncated(Topic.STEPS):
            expected = step.step
            made[step.parent_version] = step.parent_fingerprint
        if step.step != expected:
            yield Finding(standing.place, f"step {step.step} where step {expected} was expected")
        problem = _link(step, made)
        if problem:
            yield Finding(standing.place, f"step {step.step} {problem}")
        made.setdefault(step.version, step.fingerprint)
        expected = step.step + 1


def _start(facts: Facts) -> str | None:
    """Fingerprint of what the run starts from; None where the log does not say."""
    found = (one.record.fingerprint for one in facts.model.manifests if one.record.version == 0)
    return next(found, None)


def _link(step: TrainStep, made: dict[int, str | None]) -> str:
    if step.version != step.step:
        return f"made version {step.version}; a step makes the version of its number"
    if step.parent_version not in made or step.parent_version >= step.version:
        return f"starts from version {step.parent_version}, which nothing before it made"
    parent = made[step.parent_version]
    if parent is not None and parent != step.parent_fingerprint:
        return (
            f"starts from weights {step.parent_fingerprint}, and version {step.parent_version} was made with {parent}"
        )
    return ""


CHECK = Check(
    "steps",
    "the steps are numbered without a gap, and each starts from the weights that an earlier step made",
    _find,
)
