"""Published versions are those that the steps made, each on the one before."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.copies import Standing
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.records import Manifest, TrainStep


def _find(case: Case) -> Iterator[Finding]:
    facts = case.facts
    steps = {step.record.version: step.record for step in facts.model.steps}
    published: dict[tuple[str, int], Manifest] = {}
    for standing in facts.model.manifests:
        manifest = standing.record
        for problem in (*_chain(facts, published, manifest), *_made(case, steps, manifest)):
            yield Finding(standing.place, f"version {manifest.version} of branch {manifest.branch} {problem}")
        published.setdefault((manifest.branch, manifest.version), manifest)
    yield from _skips(facts, published)
    if case.over:
        yield from _unpublished(facts, published)


def _chain(facts: Facts, published: dict[tuple[str, int], Manifest], manifest: Manifest) -> Iterator[str]:
    branch, parent = manifest.branch, manifest.parent
    before = published.get((branch, manifest.version))
    if before is not None and before.fingerprint != manifest.fingerprint:
        yield f"was published with weights {before.fingerprint} before, now with {manifest.fingerprint}"
    begun = any(of == branch for of, _ in published)
    if parent is None:
        if begun and before is None:
            yield "has no parent, and the branch had begun"
        if manifest.anchor is None:
            yield "has neither a parent nor an anchor"
    elif (branch, parent) not in published and not facts.is_truncated(Topic.MANIFESTS):
        yield f"continues version {parent}, which is not published before it"
    elif parent >= manifest.version:
        yield f"continues version {parent}; a parent is older"


def _made(case: Case, steps: dict[int, TrainStep], manifest: Manifest) -> Iterator[str]:
    step = steps.get(manifest.version)
    if step is not None:
        if manifest.fingerprint != step.fingerprint:
            yield f"has weights {manifest.fingerprint}; step {step.step} made {step.fingerprint}"
        elif manifest.parent not in (None, step.parent_version):
            yield f"continues version {manifest.parent}; step {step.step} started from {step.parent_version}"
    elif _had_its_step(case, steps, manifest):
        yield f"names step {manifest.step}, and no step made it"


def _had_its_step(case: Case, steps: dict[int, TrainStep], manifest: Manifest) -> bool:
    """Whether the step of a version must be in the log. A trainer may have gone on after its steps were read."""
    read = case.over or manifest.step <= max(steps, default=0)
    return bool(steps) and manifest.step > 0 and read and not case.facts.is_truncated(Topic.STEPS)


def _skips(facts: Facts, published: dict[tuple[str, int], Manifest]) -> Iterator[Finding]:
    for skip in facts.model.skips:
        told = skip.record
        if any((told.branch, version) not in published for version in (told.version, told.base)):
            what = f"the skip-delta from version {told.base} to {told.version} of branch {told.branch} joins nothing"
            yield Finding(skip.place, what)


def _unpublished(facts: Facts, published: dict[tuple[str, int], Manifest]) -> Iterator[Finding]:
    versions = {version for _, version in published}
    steps: list[Standing[TrainStep]] = [one for one in facts.model.steps if one.record.version not in versions]
    for step in steps if versions else ():
        yield Finding(step.place, f"step {step.record.step} made version {step.record.version}: never published")


CHECK = Check(
    "versions",
    "every published version continues a published one, and has the weights that its step made",
    _find,
)
