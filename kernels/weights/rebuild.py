"""A version made again from the log: an anchor where the path begins with one, then the deltas, each step checked.

One way for all who follow an update path: a publisher without a copy, a replica that joins, keeps up or goes back, the
operator's commands. What it keeps true:

- after each step the mirror is a version whose fingerprint is its manifest's; at the end, and with `recount` after each
  step, tensor by tensor; every block of a delta was checked against the very weights that it changes;
- a path that cannot be followed leaves the mirror as it was, and the error names the anchor or the delta;
- memory, where the mirror was empty: one copy of the weights, the blocks under way, and what the fetcher holds; else
  also what leads back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tidemill.kernels.delta import DeltaError, FingerprintMismatch
from tidemill.kernels.elements import BY_NAME
from tidemill.kernels.weights.anchor import anchor_weights, discard_copy, fetch_anchor
from tidemill.kernels.weights.checkpoint import WeightFilesError, map_checkpoint
from tidemill.kernels.weights.decode import Decoder
from tidemill.kernels.weights.delta_fetch import CorruptDeltaError, ShardSource, open_fetcher
from tidemill.kernels.weights.exchange import exchange, spans_of_all
from tidemill.kernels.weights.graph import Delta, UpdatePath, VersionError
from tidemill.kernels.weights.held import HeldVersion
from tidemill.kernels.weights.mirror import Draft, Mirror
from tidemill.kernels.weights.ranks import Ranks
from tidemill.kernels.weights.tensor_parts import Place, TensorPart, Tensors, named, place_of
from tidemill.kernels.weights.tensor_table import with_tensors
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import Manifest, TensorInfo
from tidemill.schemas.stored_object import StoredObjectError

CHUNK_WAIT_S = 60.0
"""Longest wait of a publisher for one chunk that the log holds."""

PathStep = Manifest | Delta
"""A step of an update path: the manifest of the anchor that it begins with, or a delta."""


class RefusedDeltaError(ValueError):
    """A delta's bytes are wrong, or do not lead from its base to its version."""

    def __init__(self, delta: Delta, reason: str) -> None:
        super().__init__(reason)
        self.delta = delta


class RefusedAnchorError(ValueError):
    """An anchor cannot be read, or is not the version that its manifest names."""

    def __init__(self, manifest: Manifest, reason: str) -> None:
        super().__init__(reason)
        self.manifest = manifest


@dataclass(frozen=True, slots=True)
class FollowedPath:
    """How a path was followed."""

    anchor: Path | None
    """Local directory of the anchor that it began with; None without one, and where its files are not kept."""
    fetch_ms: float
    """Milliseconds that the bytes of deltas were waited for."""


class Rebuilder:
    """Follows update paths, one at a time. Close it before the process forks.

    Args:
        shards: where the bytes of deltas come from.
        threads: that decode the blocks of a delta.
        directory: where the files of anchors of a remote store are copied to, with configuration and tokenizer. Without
            one they are read file by file, and at most one of them is on the disk.
    """

    def __init__(self, shards: ShardSource, threads: int, directory: Path | None = None) -> None:
        self._shards, self._directory = shards, directory
        self._decoder = Decoder(threads)

    def follow(
        self,
        path: UpdatePath,
        draft: Draft,
        *,
        recount: bool = False,
        outline: Sequence[TensorInfo] = (),
        progress: Callable[[PathStep], None] = lambda _: None,
    ) -> FollowedPath:
        """Take a mirror to the version that a path leads to. The draft is still to be kept, or reverted.

        Args:
            recount: compare every tensor of every version on the way, and compute the fingerprints of changed tensors
                from the weights themselves; else those of the last version are compared, as the deltas claim them.
            outline: names, types and shapes of the tensors, for an anchor whose manifest does not list them.
            progress: called with each step before it is taken.

        Raises:
            RefusedAnchorError: the anchor cannot be used.
            RefusedDeltaError: a delta's bytes are wrong, no longer kept, or do not fit.
            FetchTimeoutError, StoreUnavailableError: the log or the store does not answer. The draft was reverted after
                every error.
        """
        anchor, fetch_ms = None, 0.0
        try:
            if path.anchor is not None:
                progress(path.anchor)
                anchor = self._load(path.anchor, draft, outline)
            for delta in path.deltas:
                progress(delta)
                fetch_ms += self._advance(delta, draft, compare=recount or delta is path.deltas[-1], recount=recount)
        except BaseException:
            draft.revert()
            raise
        return FollowedPath(anchor, fetch_ms)

    def close(self) -> None:
        """End the threads."""
        self._decoder.close()

    def _load(self, manifest: Manifest, draft: Draft, outline: Sequence[TensorInfo]) -> Path | None:
        if manifest.anchor is None:
            raise RefusedAnchorError(manifest, f"version {manifest.version} has no anchor")
        uri = manifest.anchor.uri
        try:
            if self._directory is None:
                draft.load(anchor_weights(uri), uri, with_tensors(manifest), outline)
                return None
            files = fetch_anchor(uri, self._directory)
            draft.load(map_checkpoint(files).items(), uri, with_tensors(manifest), outline)
        except (WeightFilesError, StoredObjectError) as error:
            raise RefusedAnchorError(manifest, str(error)) from error
        if not draft.fresh:
            discard_copy(uri, files)
        return files

    def _advance(self, delta: Delta, draft: Draft, *, compare: bool, recount: bool) -> float:
        try:
            if draft.mirror.version != delta.base:
                raise FingerprintMismatch(
                    f"it starts from version {delta.base}, version {draft.mirror.version} is held"
                )
            decoded = self._decoder.decode(delta, self._shards.pieces, draft.resolve)
            draft.advance(decoded.changes, delta.manifest)
            if compare:
                draft.check(with_tensors(delta.manifest))
            if recount:
                draft.recount(change.name for change in decoded.changes)
        except (CorruptDeltaError, DeltaError, StoredObjectError) as error:
            raise RefusedDeltaError(delta, str(error)) from error
        return decoded.fetch_ms


def rebuild(kafka: KafkaSettings, path: UpdatePath, tensors: Sequence[TensorInfo]) -> HeldVersion:
    """The weights of the version that `path`, from an anchor on, leads to, whole, for a publisher to continue.

    Args:
        tensors: of any version of the chain, for their types; a file format knows fewer than a version can have. Their
            fingerprints are not read.

    Raises VersionError when the anchor or a delta is gone or damaged, TimeoutError or StoreUnavailableError when the
    log or the store does not answer.
    """
    assert path.anchor is not None
    last = path.deltas[-1].manifest if path.deltas else path.anchor
    mirror = Mirror()
    # One thread: this runs beside a step of training.
    with (
        open_fetcher(kafka, CHUNK_WAIT_S, 1, "tidemill-publisher-deltas") as shards,
        closing(Rebuilder(shards, threads=1)) as rebuilder,
    ):
        try:
            rebuilder.follow(path, Draft(mirror), outline=tensors)
        except (RefusedAnchorError, RefusedDeltaError) as error:
            raise VersionError(
                f"version {last.version} of run {last.run_id}, branch {last.branch}, cannot be made again: {error}"
            ) from error
    parts = {one.name: TensorPart(one.name, one.dtype, tuple(one.shape), 0, mirror.bits(one.name)) for one in tensors}
    return HeldVersion(last.version, parts)


def rebuild_whole(make: Callable[[], HeldVersion], ranks: Ranks) -> HeldVersion:
    """A version that `make` makes whole on the first rank; the other ranks hold none of its elements.

    Raises what `make` raises, on every rank.
    """
    made = ranks.on_first(make)
    version, places = ranks.from_first(lambda: _places(made))
    if made is not None:
        return made
    return HeldVersion(
        version,
        {
            name: TensorPart(name, place.dtype, place.shape, 0, np.empty(0, BY_NAME[place.dtype].bits))
            for name, place in places.items()
        },
    )


def rebuild_parts(make: Callable[[], HeldVersion], version: int, like: Tensors, ranks: Ranks) -> HeldVersion:
    """A version that `make` makes whole on the first rank, and then each rank has its part of.

    The first rank holds all of it, and sends it away tensor by tensor.

    Args:
        version: that will continue it.
        like: tensors of that version; on several ranks a mapping with this rank's parts, which are where these are cut.

    Raises what `make` raises, and VersionError for `like` with other tensors, on every rank.
    """
    whole = rebuild_whole(make, ranks)
    if ranks.size == 1:
        return whole
    given = dict(named(like))
    ranks.gather(lambda: whole.check(version, given, cuts=False))
    wanted = spans_of_all({name: place_of(name, value)[2:] for name, value in given.items()}, ranks)
    held = spans_of_all({name: place_of(name, part)[2:] for name, part in whole.parts.items()}, ranks)
    names = list(whole.parts)
    return HeldVersion(
        whole.version, {name: exchange(whole.parts.pop(name), held[name], wanted[name], ranks) for name in names}
    )


def _places(held: HeldVersion | None) -> tuple[int, dict[str, Place]]:
    assert held is not None
    return held.version, {name: place_of(name, part) for name, part in held.parts.items()}
