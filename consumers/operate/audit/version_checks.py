"""Checks of weight versions: each is what its step made, was proved before it was served, and is of one incarnation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tidemill.consumers.operate.audit.endings import AuditedRun, check
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.report import Finding
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.records import AckStatus, Manifest, OnlineBatch, RolloutStatus, TrainStep

NOTHING = -1
"""The version that a replica reports while it serves none, and the version of a rollout without a sampled token."""
_Published = dict[tuple[str, int], Manifest]
"""By branch and version."""


@check("versions", "every published version continues a published one, and has the weights that its step made")
def versions(run: AuditedRun) -> Iterator[Finding]:
    """Find versions that disagree with their parents or their steps."""
    model = run.facts.model
    steps = {step.record.version: step.record for step in model.steps}
    published: _Published = {}
    for at in model.manifests:
        manifest = at.record
        for problem in (*_chain(run.facts, published, manifest), *_made(run, steps, manifest)):
            yield Finding(at.place, f"version {manifest.version} of branch {manifest.branch} {problem}")
        published.setdefault((manifest.branch, manifest.version), manifest)
    for skip in model.skips:
        branch, base, version = skip.record.branch, skip.record.base, skip.record.version
        if (branch, version) not in published or (branch, base) not in published:
            what = f"the skip-delta from version {base} to {version} of branch {branch} joins nothing"
            yield Finding(skip.place, what)
    numbers = {version for _, version in published}
    for step in model.steps if run.rules.complete and numbers else ():
        if step.record.version not in numbers:
            what = f"step {step.record.step} made version {step.record.version}: never published"
            yield Finding(step.place, what)


def _chain(facts: Facts, published: _Published, manifest: Manifest) -> Iterator[str]:
    branch, parent = manifest.branch, manifest.parent
    before = published.get((branch, manifest.version))
    if before is not None and before.fingerprint != manifest.fingerprint:
        yield f"was published with weights {before.fingerprint} before, now with {manifest.fingerprint}"
    if parent is None:
        if before is None and any(of == branch for of, _ in published):
            yield "has no parent, and the branch had begun"
        if manifest.anchor is None:
            yield "has neither a parent nor an anchor"
    elif (branch, parent) not in published and not facts.is_truncated(Topic.MANIFESTS):
        yield f"continues version {parent}, which is not published before it"
    elif parent >= manifest.version:
        yield f"continues version {parent}; a parent is older"


def _made(run: AuditedRun, steps: Mapping[int, TrainStep], manifest: Manifest) -> Iterator[str]:
    step = steps.get(manifest.version)
    if step is not None:
        if manifest.fingerprint != step.fingerprint:
            yield f"has weights {manifest.fingerprint}; step {step.step} made {step.fingerprint}"
        elif manifest.parent not in (None, step.parent_version):
            yield f"continues version {manifest.parent}; step {step.step} started from {step.parent_version}"
        return
    # A trainer may have continued after its steps were read.
    was_read = run.rules.complete or manifest.step <= max(steps, default=0)
    if steps and manifest.step > 0 and was_read and not run.facts.is_truncated(Topic.STEPS):
        yield f"names step {manifest.step}, and no step made it"


@check(
    "served",
    "every version that a replica served, and every version that something was sampled under, was proved before from "
    "the replica's live tensors, with the published fingerprint; a refusal is no fault",
)
def served(run: AuditedRun) -> Iterator[Finding]:
    """Find versions that were served without a proof."""
    facts = run.facts
    published = {(m.record.branch, m.record.version): m.record.fingerprint for m in facts.model.manifests}
    proved: set[tuple[str, str, int]] = set()
    for at in facts.model.acks:
        ack = at.record
        if ack.status is not AckStatus.REFUSED:
            proved.add((ack.replica_id, ack.incarnation, ack.version))
            wanted, problem = published.get((ack.branch, ack.version)), ""
            if wanted is None and not facts.is_truncated(Topic.MANIFESTS):
                problem = "no such version is published"
            elif wanted not in (None, ack.fingerprint):
                problem = f"proved weights {ack.fingerprint}; it is published with {wanted}"
            if problem:
                yield Finding(at.place, f"{ack.replica_id}, version {ack.version}: {problem}")
        known = (ack.replica_id, ack.incarnation, ack.serving_version) in proved
        if ack.serving_version > NOTHING and not known and not facts.is_truncated(Topic.ACKS):
            yield Finding(at.place, f"{ack.replica_id} serves version {ack.serving_version} and never proved it")
    if facts.model.acks and not facts.is_truncated(Topic.ACKS):
        yield from _sampled(facts, {(replica, version) for replica, _, version in proved})


def _sampled(facts: Facts, proved: set[tuple[str, int]]) -> Iterator[Finding]:
    numbers = {version for _, version in proved}
    for version, place in facts.played.sampled_under.items():
        if version > NOTHING and version not in numbers:
            yield Finding(place, f"a rollout was sampled under version {version}, which no replica proved")
    for (replica, version), place in facts.played.sampled_by.items():
        if replica and (replica, version) not in proved:
            yield Finding(place, f"a turn was sampled by {replica} under version {version}, which it never proved")
    for answer in facts.online.served.values():
        if answer.version_max > NOTHING and (answer.replica_id, answer.version_max) not in proved:
            what = f"interaction {answer.interaction_id} was answered by {answer.replica_id} under version"
            yield Finding(answer.place, f"{what} {answer.version_max}, which it never proved")


@check(
    "incarnations",
    "no step trained on what was sampled in another life of the version numbers, and every version is of its parent's",
)
def incarnations(run: AuditedRun) -> Iterator[Finding]:
    """Find version numbers of one incarnation that were compared with those of another."""
    model = run.facts.model
    batches = {batch.place: batch.record for batch in run.facts.online.batches}
    for step in model.steps:
        for name, incarnation in _sampled_in(run.facts, batches, step.record):
            if _differ(step.record.incarnation, incarnation):
                what = f"step {step.record.step} of incarnation {step.record.incarnation} trained on {name}"
                yield Finding(step.place, f"{what}, sampled in incarnation {incarnation}")
    of_step = {step.record.version: step.record.incarnation for step in model.steps}
    of_version = {(m.record.branch, m.record.version): m.record.incarnation for m in model.manifests}
    for at in model.manifests:
        manifest = at.record
        parent = "" if manifest.parent is None else of_version.get((manifest.branch, manifest.parent), "")
        for other, of in ((parent, "its parent"), (of_step.get(manifest.version, ""), "its step")):
            if _differ(manifest.incarnation, other):
                what = f"version {manifest.version} of incarnation {manifest.incarnation}, {of} of {other}"
                yield Finding(at.place, what)


def _differ(one: str, other: str) -> bool:
    """Whether two incarnations differ; a record from before there were incarnations can be of any."""
    return bool(one and other and one != other)


def _sampled_in(facts: Facts, batches: Mapping[Position, OnlineBatch], step: TrainStep) -> Iterator[tuple[str, str]]:
    """Everything that a step trained on, with the incarnation under which it was sampled."""
    for place in map(Position.of, step.inputs):
        group, batch = facts.model.group_at.get(place), batches.get(place)
        for member in group.record.members if group is not None else ():
            rollout = facts.played.rollouts.get(member.rollout_id)
            record = rollout.at(member.partition, member.offset) if rollout is not None else None
            if record is not None and record.status is RolloutStatus.COMPLETED:
                yield f"rollout {member.rollout_id}", record.incarnation
        for one in batch.members if batch is not None else ():
            answer = facts.online.served_at_place.get(Position.of(one))
            if answer is not None:
                yield f"interaction {one.interaction_id}", answer.incarnation


CHECKS = (versions, served, incarnations)
