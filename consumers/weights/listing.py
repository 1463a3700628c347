"""The versions of a chain as rows, with what the log says of each."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.consumers.weights.chain import Chain
from tidemill.schemas.records import GateDecision, Manifest


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version of a chain."""

    version: int
    parent: int | None
    step: int
    learning_rate: float
    n_elements: int
    n_changed: int
    density: float
    """Changed elements of all elements."""
    delta_bytes: int
    bytes_per_changed: float | None
    """None where nothing changed."""
    shards: int
    anchor: str | None
    """Where the anchor lies."""
    skips: list[int]
    """Older versions from which a skip-delta leads here."""
    proved_by: list[str]
    """Replicas that proved the version from their live tensors."""
    refused_by: dict[str, str]
    """Replicas that refused it, with the reason."""
    decisions: list[str]
    """The gate's decisions on it, in order."""
    expired: bool
    """The log no longer keeps its delta."""
    fork: str
    """How it was published twice; empty when it was not."""
    fingerprint: str
    published_at: int
    serving_format: str
    """Format of few bits whose values the weights are; empty where they are of none."""


def rows(chain: Chain, newest: int | None = None) -> list[VersionRow]:
    """The versions in ascending order; the `newest` so many of them, or all."""
    versions = sorted(chain.manifests)
    return [_row(chain, chain.manifests[v]) for v in versions[-newest if newest else 0 :]]


def describe(decision: GateDecision) -> str:
    """A decision as one line."""
    version = "" if decision.version is None else f" {decision.version}"
    return f"{decision.verdict.value}{version} by {decision.decided_by}: {decision.reason}"


def _row(chain: Chain, manifest: Manifest) -> VersionRow:
    version = manifest.version
    return VersionRow(
        version=version,
        parent=manifest.parent,
        step=manifest.step,
        learning_rate=manifest.learning_rate,
        n_elements=manifest.n_elements,
        n_changed=manifest.n_changed,
        density=manifest.n_changed / manifest.n_elements if manifest.n_elements else 0.0,
        delta_bytes=manifest.delta_bytes,
        bytes_per_changed=manifest.delta_bytes / manifest.n_changed if manifest.n_changed else None,
        shards=len(manifest.shards),
        anchor=manifest.anchor.uri if manifest.anchor else None,
        skips=[delta.base for delta in chain.skip_deltas() if delta.version == version],
        proved_by=sorted(chain.proofs.get(version, ())),
        refused_by=dict(chain.refusals.get(version, {})),
        decisions=[describe(made) for made in chain.decisions if made.version == version],
        expired=chain.expired(manifest.shards) is not None,
        fork=chain.forks.get(version, ""),
        fingerprint=manifest.fingerprint,
        published_at=manifest.published_at,
        serving_format=manifest.serving_format,
    )
