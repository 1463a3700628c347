"""What is served was proved first."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.facts import Facts
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.records import AckStatus, WeightAck

NOTHING = -1
"""Version that a replica says it serves while it serves none, and that a rollout without a sampled token has."""


def _find(case: Case) -> Iterator[Finding]:
    facts = case.facts
    published = {(m.record.branch, m.record.version): m.record.fingerprint for m in facts.model.manifests}
    proved: set[tuple[str, str, int]] = set()
    for standing in facts.model.acks:
        ack = standing.record
        if ack.status is not AckStatus.REFUSED:
            proved.add((ack.replica_id, ack.incarnation, ack.version))
            problem = _proof(facts, published, ack)
            if problem:
                yield Finding(standing.place, f"{ack.replica_id}, version {ack.version}: {problem}")
        known = (ack.replica_id, ack.incarnation, ack.serving_version) in proved
        if ack.serving_version > NOTHING and not known and not facts.is_truncated(Topic.ACKS):
            yield Finding(standing.place, f"{ack.replica_id} serves version {ack.serving_version} and never proved it")
    if facts.model.acks and not facts.is_truncated(Topic.ACKS):
        yield from _sampled(facts, {(replica, version) for replica, _, version in proved})


def _proof(facts: Facts, published: dict[tuple[str, int], str], ack: WeightAck) -> str:
    wanted = published.get((ack.branch, ack.version))
    if wanted is None:
        return "" if facts.is_truncated(Topic.MANIFESTS) else "no such version is published"
    if ack.fingerprint != wanted:
        return f"proved weights {ack.fingerprint}; it is published with {wanted}"
    return ""


def _sampled(facts: Facts, proved: set[tuple[str, int]]) -> Iterator[Finding]:
    versions = {version for _, version in proved}
    for version, place in facts.played.sampled_under.items():
        if version > NOTHING and version not in versions:
            yield Finding(place, f"a rollout was sampled under version {version}, which no replica proved")
    for (replica, version), place in facts.played.sampled_by.items():
        if replica and (replica, version) not in proved:
            yield Finding(place, f"a turn was sampled by {replica} under version {version}, which it never proved")
    for served in facts.online.served.values():
        if served.version_max > NOTHING and (served.replica_id, served.version_max) not in proved:
            what = f"interaction {served.interaction_id} was answered by {served.replica_id} under version"
            yield Finding(served.place, f"{what} {served.version_max}, which it never proved")


CHECK = Check(
    "served",
    "every version that a replica served, and every version that something was sampled under, was proved before from "
    "the replica's live tensors, with the published fingerprint; a refusal is no fault",
    _find,
)
