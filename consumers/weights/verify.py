"""Verification of a chain without an engine: fetches, decodes, checks and applies every delta, compares every tensor.

Starting at an anchor, each version is made from its parent in memory, and its tensors' fingerprints are computed from
the resulting weights, not from the delta. Also checked: the anchors in between, skip-deltas (from the version that
they start from), and versions published twice. Verification stops at the first fault and names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tidemill.consumers.weights.builder import Builder, UnusableWeights
from tidemill.consumers.weights.chain import Chain
from tidemill.kernels.weights.graph import Unreachable, VersionError

Progress = Callable[[int, str], None]
"""Called before each piece of work, with the number of verified versions and the next piece."""


@dataclass(frozen=True, slots=True)
class FirstFault:
    version: int
    part: str
    """"manifest", "delta", "anchor", or "skip-delta from V"."""
    reason: str

    def __str__(self) -> str:
        return f"the {self.part} of version {self.version}: {self.reason}"


@dataclass(slots=True)
class Verification:
    """The result of a verification, up to the first fault."""

    start: int
    end: int
    """The last version that was verified."""
    versions: int = 0
    anchors: int = 0
    skip_deltas: int = 0
    n_bytes: int = 0
    """Bytes of the deltas and skip-deltas that were verified."""
    expired_before: list[int] = field(default_factory=list)
    """Versions older than the start whose chunks the log has deleted."""
    expired_skips: int = 0
    """Skip-deltas that were not verified because the log has deleted their chunks."""
    offender: FirstFault | None = None


def default_start(chain: Chain) -> int:
    """Return the oldest anchor after which the log has every delta; if there is none, the newest anchor.

    Raises Unreachable for a chain without an anchor.
    """
    anchors = [version for version, manifest in sorted(chain.manifests.items()) if manifest.anchor is not None]
    if not anchors:
        raise Unreachable(f"branch {chain.branch} of run {chain.run_id} has no anchor to verify from")
    last_expired = max((v for v, manifest in chain.manifests.items() if chain.expired(manifest.shards)), default=-1)
    return next((version for version in anchors if version >= last_expired), anchors[-1])


def verify_chain(
    chain: Chain, builder: Builder, start: int, progress: Progress = lambda _done, _next: None
) -> Verification:
    """Verify every version from `start`, which must have an anchor.

    Raises VersionError if `start` is unknown or has no anchor.
    """
    first = chain.manifest(start)
    if first.anchor is None:
        anchors = [version for version, manifest in sorted(chain.manifests.items()) if manifest.anchor]
        raise VersionError(
            f"version {start} has no anchor to verify from; these have one: {', '.join(map(str, anchors))}"
        )
    before = [v for v, m in sorted(chain.manifests.items()) if v < start and chain.expired(m.shards)]
    report = Verification(start, start, expired_before=before)
    at = start, "anchor"
    try:
        mirror = builder.from_anchor(first)
        for version in sorted(version for version in chain.manifests if version >= start):
            manifest, delta = chain.manifests[version], chain.delta(version)
            progress(report.versions, f"version {version}")
            at = version, "manifest"
            if version in chain.forks:
                raise UnusableWeights(chain.forks[version])
            if version != start and delta is None:
                # A version without a parent starts again from its anchor.
                if manifest.anchor is None:
                    raise UnusableWeights("it has neither a parent nor an anchor")
                at = version, "anchor"
                mirror = builder.from_anchor(manifest)
            elif version != start and delta is not None:
                at = version, "delta"
                if expired := chain.expired(delta.shards):
                    raise UnusableWeights(f"{expired}; verify from {default_start(chain)} instead")
                if mirror.version != delta.base:
                    mirror, _, _ = builder.build(chain, delta.base)
                builder.apply(delta, mirror)
                report.n_bytes += delta.n_bytes
            if manifest.anchor is not None:
                at = version, "anchor"
                progress(report.versions, f"anchor {version}")
                builder.check_anchor(manifest)
                report.anchors += 1
            for skip in (delta for delta in chain.skip_deltas() if delta.base == version):
                if chain.expired(skip.shards):
                    report.expired_skips += 1
                    continue
                at = skip.version, f"skip-delta from {version}"
                progress(report.versions, f"skip-delta {version} to {skip.version}")
                builder.apply(skip, mirror, keep=False)
                report.skip_deltas += 1
                report.n_bytes += skip.n_bytes
            report.versions, report.end = report.versions + 1, version
    except (UnusableWeights, VersionError) as error:
        report.offender = FirstFault(*at, str(error))
    return report
