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


class _OffenderFound(Exception):
    """Carries an offender out."""

    def __init__(self, version: int, part: str, reason: object) -> None:
        super().__init__(reason)
        self.offender = Offender(version, part, str(reason))


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
        try:
            self._verify(first, report)
        except _OffenderFound as found:
            report.offender = found.offender
        return report

    def _verify(self, first: Manifest, report: Verification) -> None:
        try:
            self._mirror = self._builder.from_anchor(first)
        except Unusable as error:
            raise _OffenderFound(first.version, "anchor", error) from error
        for version in sorted(version for version in self._chain.manifests if version >= first.version):
            self._progress(report.versions, f"version {version}")
            if version in self._chain.forks:
                raise _OffenderFound(version, "manifest", self._chain.forks[version])
            if version != first.version:
                self._make(version, report)
            if self._chain.manifests[version].anchor is not None:
                self._progress(report.versions, f"anchor {version}")
                try:
                    self._builder.check_anchor(self._chain.manifests[version])
                except Unusable as error:
                    raise _OffenderFound(version, "anchor", error) from error
                report.anchors += 1
            self._check_skips(version, report)
            report.versions, report.end = report.versions + 1, version

    def _make(self, version: int, report: Verification) -> None:
        """Bring the mirror to a version by its own delta; one without a parent begins again from its anchor."""
        delta = self._chain.delta(version)
        if delta is None:
            manifest = self._chain.manifests[version]
            if manifest.anchor is None:
                raise _OffenderFound(version, "manifest", "it has neither a parent nor an anchor")
            try:
                self._mirror = self._builder.from_anchor(manifest)
            except Unusable as error:
                raise _OffenderFound(version, "anchor", error) from error
            return
        if (expired := self._chain.expired(delta.shards)) is not None:
            raise _OffenderFound(version, "delta", f"{expired}; verify from {default_start(self._chain)} instead")
        try:
            if self._mirror.version != delta.base:
                self._mirror = self._builder.build(self._chain, delta.base).mirror
            self._builder.apply(delta, self._mirror)
        except (Unusable, VersionError) as error:
            raise _OffenderFound(version, "delta", error) from error
        report.n_bytes += delta.n_bytes

    def _check_skips(self, base: int, report: Verification) -> None:
        for delta in self._chain.skip_deltas():
            if delta.base != base:
                continue
            if self._chain.expired(delta.shards):
                report.expired_skips += 1
                continue
            self._progress(report.versions, f"skip-delta {base} to {delta.version}")
            try:
                self._builder.check(delta, self._mirror)
            except Unusable as error:
                raise _OffenderFound(delta.version, f"skip-delta from {base}", error) from error
            report.skip_deltas += 1
            report.n_bytes += delta.n_bytes
