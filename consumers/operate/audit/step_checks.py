"""Checks of training: each step was planned, read the inputs that it names, and continues an earlier one; each version
has the weights that its step made, was proved before it was served, and is of one incarnation."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.operate.audit.endings import AuditedRun, Finding, check
from tidemill.consumers.operate.audit.facts import Facts, references
from tidemill.schemas import records as r
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.gate_decisions import GIVES_UP
from tidemill.schemas.log.consumed import Position

DECISIVE = ("parent_version", "inputs", "exclusions", "seed", "config_hash")
"""Fields in which a step must equal its plan."""
BOUND = "policy_lag_bound"
TrainedMember = r.GroupMember | r.OnlineMember
NOTHING = -1
"""The version that a replica reports when it serves none, and the version of a rollout without a sampled token."""
_Published = dict[tuple[str, int], r.Manifest]
"""By branch and version."""


@check(
    "plans",
    "every step was planned before it was taken, and was taken as in its last plan; a restarted trainer changed a plan "
    "only if the settings or the gate's decisions had changed, or if retention or an erasure had deleted an input",
)
def plans(run: AuditedRun) -> Iterator[Finding]:
    planned: dict[int, tuple[Position, r.StepPlan]] = {}
    taken: dict[int, Position] = {}
    for at in run.plans_and_steps:
        record, number, problem = at.record, at.record.step, ""
        place, plan = planned.get(number, (None, None))
        fields = DECISIVE if plan is not None else ()
        field = next((name for name in fields if getattr(plan, name) != getattr(record, name)), "")
        if isinstance(record, r.StepPlan):
            if number in taken:
                problem = f"was planned after it was taken, at {taken[number]}"
            elif plan is not None and field and not _is_outdated(run, plan, record):
                problem = f"was planned at {place} with other {field}, and nothing in the log made that plan invalid"
            planned[number] = (at.place, record)
        else:
            if field:
                problem = f"was taken with other {field} than {place} planned"
            elif plan is None and planned:
                # A run from before the introduction of plans has none for its first steps.
                problem = "was taken without a plan"
            taken[number] = at.place
        if problem:
            yield Finding(at.place, f"step {number} {problem}")


def _is_outdated(run: AuditedRun, before: r.StepPlan, now: r.StepPlan) -> bool:
    """Whether a restarted trainer had to plan again. This is also so if an input was deleted at that time, or, if only
    the beginning of the log shows the deletion, is deleted now.

    A position before the beginning of its partition is deleted, and so is one of a compacted topic that holds no
    record. Claimed bytes are in the object store; the log does not show whether they still exist.
    """
    if before.trainer == now.trainer:
        return False
    # A trainer whose version was abandoned continues from another one.
    moved = before.parent_version != now.parent_version
    abandoned = moved and any(decision.record.verdict in GIVES_UP for decision in run.decisions)
    if before.config_hash != now.config_hash or abandoned:
        return True
    excluded = {one.group_id for one in before.exclusions if one.topic == Topic.INTERACTIONS}
    places = list(map(Position.of, before.inputs))
    for found in map(run.input_at, tuple(places)):
        if isinstance(found, r.Group):
            places += map(Position.of, _with_reward(found))
        elif found is not None:
            # The time of a deletion may be a little later than the plan's, since clocks differ.
            by = now.at + run.rules.grace_us
            members = (member for member in found.members if member.interaction_id not in excluded)
            if any(_is_answer_gone(run, member, by) for member in members):
                return True
    return not all(map(run.is_kept, places))


def _is_answer_gone(facts: Facts, member: r.OnlineMember, by: int) -> bool:
    erased_at = facts.erased.get(member.interaction_id)
    if erased_at is not None:
        return erased_at <= by
    served = facts.served_at_place.get(Position.of(member))
    if served is None:
        # Neither a tombstone nor a record is left: compaction removed both.
        return True
    return any(served.served_at <= asked <= by for asked in facts.erasures.get(member.user_id, ()))


@check(
    "inputs",
    "the inputs and exclusions of every step are at the recorded positions, and its rollouts, tokens and policy lag "
    "are those of its inputs, within the bound",
)
def inputs(run: AuditedRun) -> Iterator[Finding]:
    for step in run.steps:
        for reference in references(step.record):
            place = Position.of(reference)
            if not run.is_kept(place) or place.topic == Topic.INTERACTIONS:
                continue
            found, problem = run.input_at(place), ""
            name = found.group_id if isinstance(found, r.Group) else found.batch_id if found is not None else None
            if found is None or name != reference.group_id:
                problem = f"{reference.group_id} is not there; there is {name or 'no record of the run'}"
            elif isinstance(reference, r.StepExclusion):
                if reference.rollouts != len(found.members):
                    problem = f"counts {reference.rollouts} rollouts, it has {len(found.members)}"
            elif isinstance(found, r.Group) and (found.mode is r.Mode.EVAL or found.closed_by is r.CloseReason.LATE):
                why = f"{found.mode.value}, closed by {found.closed_by.value}"
                problem = f"{reference.group_id} must not be trained: {why}"
            if problem:
                what = "input" if isinstance(reference, r.StepInput) else "exclusion"
                yield Finding(step.place, f"step {step.record.step}: {what} at {place}: {problem}")
        for problem in _counts(run, step.record):
            yield Finding(step.place, f"step {step.record.step}: {problem}")


def _counts(facts: Facts, step: r.TrainStep) -> Iterator[str]:
    found = [facts.input_at(Position.of(place)) for place in step.inputs]
    if any(one is None for one in found):
        return
    trained = [member for one in found if one is not None for member in _trained(one, step)]
    tokens = sum(member.sampled_tokens for member in trained)
    counted = sum(count.tokens for count in step.lag)
    if (step.rollouts, step.tokens, counted) != (len(trained), tokens, tokens):
        yield (
            f"counts {step.rollouts} rollouts, {step.tokens} tokens and the lag of {counted}; its inputs have "
            f"{len(trained)} rollouts and {tokens} tokens"
        )
        return
    if trained and step.lag:
        lags = [count.lag for count in step.lag]
        parent = step.parent_version
        low, high = parent - max(m.version_max for m in trained), parent - min(m.version_min for m in trained)
        if (min(lags), max(lags)) != (low, high):
            yield f"records policy lag {min(lags)} to {max(lags)}; its inputs were sampled {low} to {high} behind"
    bound = step.metrics.get(BOUND)
    simulated = all(isinstance(member, r.GroupMember) for member in trained)
    if simulated and bound is not None and any(count.lag > bound for count in step.lag):
        yield f"trained tokens {max(count.lag for count in step.lag)} versions behind; the bound is {bound:g}"


def _with_reward(group: r.Group) -> list[r.GroupMember]:
    return [m for m in group.members if m.status is r.RolloutStatus.COMPLETED and m.reward is not None]


def _trained(found: r.Group | r.OnlineBatch, step: r.TrainStep) -> list[TrainedMember]:
    """Return the members of an input that a step trained on."""
    if isinstance(found, r.Group):
        return [*_with_reward(found)]
    excluded = {one.group_id for one in step.exclusions if one.topic == Topic.INTERACTIONS}
    kept: list[TrainedMember] = []
    seen: set[str] = set()
    for member in found.members:
        # A reward that is in a batch twice counts once; corrections are additional members.
        if member.interaction_id not in excluded and (member.correction or member.interaction_id not in seen):
            kept.append(member)
        if not member.correction:
            seen.add(member.interaction_id)
    return kept


@check("steps", "the steps are numbered without a gap, and each starts from the weights that an earlier step made")
def steps(run: AuditedRun) -> Iterator[Finding]:
    start = (one.record.fingerprint for one in run.manifests if one.record.version == 0)
    # None if the log does not show the weights that the run starts from.
    made: dict[int, str | None] = {0: next(start, None)}
    expected = 1
    for at in run.steps:
        step = at.record
        if expected == 1 and run.is_truncated(Topic.STEPS):
            expected = step.step
            made[step.parent_version] = step.parent_fingerprint
        if step.step != expected:
            yield Finding(at.place, f"step {step.step} where step {expected} was expected")
        parent, weights, problem = step.parent_version, made.get(step.parent_version), ""
        if step.version != step.step:
            problem = f"made version {step.version}; a step makes the version of its number"
        elif parent not in made or parent >= step.version:
            problem = f"starts from version {parent}, which nothing before it made"
        elif weights not in (None, step.parent_fingerprint):
            problem = f"starts from weights {step.parent_fingerprint}, and version {parent} was made with {weights}"
        if problem:
            yield Finding(at.place, f"step {step.step} {problem}")
        made.setdefault(step.version, step.fingerprint)
        expected = step.step + 1


@check("versions", "every published version continues a published one, and has the weights that its step made")
def versions(run: AuditedRun) -> Iterator[Finding]:
    steps = {step.record.version: step.record for step in run.steps}
    published: _Published = {}
    for at in run.manifests:
        manifest = at.record
        problems, made_by = list(_chain(run, published, manifest)), steps.get(manifest.version)
        # A trainer may have continued after its steps were read.
        was_read = run.rules.complete or manifest.step <= max(steps, default=0)
        if made_by is None:
            if steps and manifest.step > 0 and was_read and not run.is_truncated(Topic.STEPS):
                problems.append(f"names step {manifest.step}, and no step made it")
        elif manifest.fingerprint != made_by.fingerprint:
            problems.append(f"has weights {manifest.fingerprint}; step {made_by.step} made {made_by.fingerprint}")
        elif manifest.parent not in (None, made_by.parent_version):
            start = made_by.parent_version
            problems.append(f"continues version {manifest.parent}; step {made_by.step} started from {start}")
        for problem in problems:
            yield Finding(at.place, f"version {manifest.version} of branch {manifest.branch} {problem}")
        published.setdefault((manifest.branch, manifest.version), manifest)
    for skip in run.skips:
        branch, base, version = skip.record.branch, skip.record.base, skip.record.version
        if (branch, version) not in published or (branch, base) not in published:
            what = f"the skip-delta from version {base} to {version} of branch {branch} needs two published versions"
            yield Finding(skip.place, what)
    numbers = {version for _, version in published}
    for step in run.steps if run.rules.complete and numbers else ():
        if step.record.version not in numbers:
            what = f"step {step.record.step} made version {step.record.version}: never published"
            yield Finding(step.place, what)


def _chain(facts: Facts, published: _Published, manifest: r.Manifest) -> Iterator[str]:
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


@check(
    "served",
    "every version that a replica served, and every version under which tokens were sampled, was proved before from "
    "the replica's live tensors, with the published fingerprint; a refusal is no fault",
)
def served(run: AuditedRun) -> Iterator[Finding]:
    published = {(m.record.branch, m.record.version): m.record.fingerprint for m in run.manifests}
    proved: set[tuple[str, str, int]] = set()
    for at in run.acks:
        ack = at.record
        if ack.status is not r.AckStatus.REFUSED:
            proved.add((ack.replica_id, ack.incarnation, ack.version))
            wanted, problem = published.get((ack.branch, ack.version)), ""
            if wanted is None and not run.is_truncated(Topic.MANIFESTS):
                problem = "no such version is published"
            elif wanted not in (None, ack.fingerprint):
                problem = f"proved weights {ack.fingerprint}; it is published with {wanted}"
            if problem:
                yield Finding(at.place, f"{ack.replica_id}, version {ack.version}: {problem}")
        known = (ack.replica_id, ack.incarnation, ack.serving_version) in proved
        if ack.serving_version > NOTHING and not known and not run.is_truncated(Topic.ACKS):
            yield Finding(at.place, f"{ack.replica_id} serves version {ack.serving_version} and never proved it")
    if not run.acks or run.is_truncated(Topic.ACKS):
        return
    by_replica = {(replica, version) for replica, _, version in proved}
    numbers = {version for _, version in by_replica}
    for version, place in run.sampled_under.items():
        if version > NOTHING and version not in numbers:
            yield Finding(place, f"a rollout was sampled under version {version}, which no replica proved")
    for (replica, version), place in run.sampled_by.items():
        if replica and (replica, version) not in by_replica:
            yield Finding(place, f"a turn was sampled by {replica} under version {version}, which it never proved")
    for name, one in run.served.items():
        answer = one.record
        if answer.version_max > NOTHING and (answer.replica_id, answer.version_max) not in by_replica:
            what = f"interaction {name} was answered by {answer.replica_id} under version {answer.version_max}"
            yield Finding(one.place, f"{what}, which it never proved")


@check(
    "incarnations",
    "no step trained on what was sampled in another life of the version numbers, and every version is of its parent's",
)
def incarnations(run: AuditedRun) -> Iterator[Finding]:
    for step in run.steps:
        for name, incarnation in _sampled_in(run, step.record):
            if _differ(step.record.incarnation, incarnation):
                what = f"step {step.record.step} of incarnation {step.record.incarnation} trained on {name}"
                yield Finding(step.place, f"{what}, sampled in incarnation {incarnation}")
    of_step = {step.record.version: step.record.incarnation for step in run.steps}
    of_version = {(m.record.branch, m.record.version): m.record.incarnation for m in run.manifests}
    for at in run.manifests:
        manifest = at.record
        parent = "" if manifest.parent is None else of_version.get((manifest.branch, manifest.parent), "")
        for other, of in ((parent, "its parent"), (of_step.get(manifest.version, ""), "its step")):
            if _differ(manifest.incarnation, other):
                what = f"version {manifest.version} of incarnation {manifest.incarnation}, {of} of {other}"
                yield Finding(at.place, what)


def _differ(one: str, other: str) -> bool:
    """Whether two incarnations differ; a record from before the introduction of incarnations matches any."""
    return bool(one and other and one != other)


def _sampled_in(facts: Facts, step: r.TrainStep) -> Iterator[tuple[str, str]]:
    """Yield the rollouts and interactions that a step trained on, with the incarnation that sampled each."""
    for found in map(facts.input_at, map(Position.of, step.inputs)):
        for member in found.members if found is not None else ():
            if isinstance(member, r.GroupMember):
                record = facts.record_of(member.rollout_id, member)
                if record is not None and record.status is r.RolloutStatus.COMPLETED:
                    yield f"rollout {member.rollout_id}", record.incarnation
            elif (answer := facts.served_at_place.get(Position.of(member))) is not None:
                yield f"interaction {member.interaction_id}", answer.incarnation


CHECKS = (plans, inputs, steps, versions, served, incarnations)
