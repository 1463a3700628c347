"""Verifies a chain without an engine: every delta fetched, decoded, guarded and applied, every tensor compared.

From an anchor on, each version is made from its parent in memory and its tensors' fingerprints are computed again from
the weights that came out, not from the delta. What this also checks: anchors on the way, skip-deltas (from the version
that they start from), and versions published twice. It stops at the first thing that is wrong and names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tidemill.consumers.weights.builder import Builder, Unusable
from tidemill.consumers.weights.chain import Chain
from tidemill.kernels.weights.graph import Unreachable, VersionError
from tidemill.schemas.records import Manifest

Progress = Callable[[int, str], None]
"""Called before each piece of work with the versions done so far and what comes next."""


@dataclass(frozen=True, slots=True)
class Offender:
    """The first thing that is wrong."""

    version: int
    part: str
    """"manifest", "delta", "anchor", or "skip-delta from V"."""
    reason: str

    def __str__(self) -> str:
        return f"the {self.part} of version {self.version}: {self.reason}"


@dataclass(slots=True)
class Verification:
    """What was verified, up to the first offender."""

    start: int
    end: int
    """The last version that was verified."""
    versions: int = 0
    anchors: int = 0
    skip_deltas: int = 0
    n_bytes: int = 0
    """Bytes of the deltas and skip-deltas that were verified."""
    expired_before: list[int] = field(default_factory=list)
    """Versions older than the start whose chunks the log no longer keeps."""
    expired_skips: int = 0
    """Skip-deltas passed over because the log no longer keeps their chunks."""
    offender: Offender | None = None


def default_start(chain: Chain) -> int:
    """The oldest anchor from which every newer delta is still kept; where there is none, the newest anchor.

    Raises Unreachable for a chain without an anchor.
    """
    anchors = [version for version, manifest in sorted(chain.manifests.items()) if manifest.anchor is not None]
    if not anchors:
        raise Unreachable(f"branch {chain.branch} of run {chain.run_id} has no anchor to verify from")
    last_expired = max((v for v, manifest in chain.manifests.items() if chain.expired(manifest.shards)), default=-1)
    return next((version for version in anchors if version >= last_expired), anchors[-1])


class Verifier:
    """Verifies one chain from an anchor on."""

    def __init__(self, chain: Chain, builder: Builder, progress: Progress = lambda _done, _next: None) -> None:
        self._chain, self._builder, self._progress = chain, builder, progress

    def run(self, start: int) -> Verification:
        """Verify every version from `start`, which must have an anchor.

        Raises UnknownVersion, or VersionError when `start` has no anchor.
        """
        first = self._chain.manifest(start)
        if first.anchor is None:
            anchors = [version for version, manifest in sorted(self._chain.manifests.items()) if manifest.anchor]
            raise VersionError(
                f"version {start} has no anchor to verify from; these have one: {', '.join(map(str, anchors))}"
            )
        before = [v for v, m in sorted(self._chain.manifests.items()) if v < start and self._chain.expired(m.shards)]
        report = Verification(start, start, expired_before=before)
        self._at = start, "anchor"
        try:
            self._verify(first, report)
        except (Unusable, VersionError) as error:
            report.offender = Offender(*self._at, str(error))
        return report

    def _verify(self, first: Manifest, report: Verification) -> None:
        """Raises Unusable or VersionError at what is wrong, which `_at` names."""
        chain, builder = self._chain, self._builder
        mirror = builder.from_anchor(first)
        for version in sorted(version for version in chain.manifests if version >= first.version):
            manifest, delta = chain.manifests[version], chain.delta(version)
            self._progress(report.versions, f"version {version}")
            self._at = version, "manifest"
            if version in chain.forks:
                raise Unusable(chain.forks[version])
            if version != first.version and delta is None:
                # One without a parent begins again from its anchor.
                if manifest.anchor is None:
                    raise Unusable("it has neither a parent nor an anchor")
                self._at = version, "anchor"
                mirror = builder.from_anchor(manifest)
            elif version != first.version and delta is not None:
                self._at = version, "delta"
                if (expired := chain.expired(delta.shards)) is not None:
                    raise Unusable(f"{expired}; verify from {default_start(chain)} instead")
                if mirror.version != delta.base:
                    mirror = builder.build(chain, delta.base).mirror
                builder.apply(delta, mirror)
                report.n_bytes += delta.n_bytes
            if manifest.anchor is not None:
                self._at = version, "anchor"
                self._progress(report.versions, f"anchor {version}")
                builder.check_anchor(manifest)
                report.anchors += 1
            for skip in (delta for delta in chain.skip_deltas() if delta.base == version):
                if chain.expired(skip.shards):
                    report.expired_skips += 1
                    continue
                self._at = skip.version, f"skip-delta from {version}"
                self._progress(report.versions, f"skip-delta {version} to {skip.version}")
                builder.check(skip, mirror)
                report.skip_deltas += 1
                report.n_bytes += skip.n_bytes
            report.versions, report.end = report.versions + 1, version
