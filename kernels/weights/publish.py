"""Publication of weight versions, for any trainer: a delta, an anchor if one is due, and the manifest that commits.

    with WeightPublisher.open(kafka, run, store, settings, base_model=directory) as publisher:
        publisher.publish(0, model.named_parameters())
        ...
        publisher.publish(step, model.named_parameters(), learning_rate=rate)

For one process or the ranks of a sharded model: each rank publishes its parts, and the first rank commits the version.

    ranks = open_ranks(timeout_s=600)
    with WeightPublisher.open(kafka, run, store, settings, base_model=directory, ranks=ranks) as publisher:
        publisher.publish(0, local_parts(model, first=ranks.is_first))      # on every rank, for every version

Invariants:

- a manifest is written only after the log has acknowledged every chunk that it names and its anchor is whole, so a
  version that a reader sees can be read in full; the publisher never waits for consumers;
- each version is published once: after a restart, a version whose manifest is in the log is compared, not rewritten;
- a delta starts from exactly the weights of its parent's manifest: the publisher keeps a copy of them, and rebuilds
  it from the log if it has none;
- the versions of a branch are a tree: a version continues the newest, or an older one after `go_back`;
- every rank gets the same result of a publication, and a version's tensors and fingerprints do not depend on the
  number of ranks. A rank holds its parts of the newest version, and one whole tensor while an anchor is written. Only
  when that version is rebuilt from the log, the first rank holds it whole, until the other ranks have their parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from tidemill.kernels.block import CodecSettings
from tidemill.kernels.fingerprint import ZERO
from tidemill.kernels.weights.anchor import anchor_uri, write_anchor
from tidemill.kernels.weights.bits import Weight, WeightLike, total_fingerprint
from tidemill.kernels.weights.commit import (
    ForkPoint,
    VersionLog,
    VersionMark,
    anchor_due,
    fork_source,
    read_versions,
    weights_folder,
)
from tidemill.kernels.weights.config import PublishSettings
from tidemill.kernels.weights.delta_shard import DeltaShard
from tidemill.kernels.weights.graph import VersionError, VersionGraph, require_same
from tidemill.kernels.weights.held import HeldVersion, rebuild_parts, rebuild_whole
from tidemill.kernels.weights.ranks import Ranks
from tidemill.kernels.weights.rebuild import rebuild
from tidemill.kernels.weights.skips import SkipPublisher
from tidemill.kernels.weights.tensor_parts import (
    PartInfos,
    ShardReport,
    TensorLike,
    Tensors,
    as_part,
    balanced,
    merged_tensors,
    named,
    part_info,
)
from tidemill.kernels.weights.tensor_table import with_tensors
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.producer import AckedWriter, RecordProducer
from tidemill.schemas.records import Anchor, Manifest, TensorInfo

__all__ = ["ForkPoint", "PublishSettings", "Tensors", "VersionError", "Weight", "WeightLike", "WeightPublisher"]

CLIENT = "tidemill-publisher"


class WeightPublisher:
    """Publisher of one branch's versions, in order; a context manager. Create it with `open`.

    It holds one copy of this rank's weights of the newest version, in the CPU's memory or on their own device
    (`PublishSettings.on_device`). Not safe for several threads. Several ranks call `open`, `publish` and `go_back`
    together, for the same version. An error of one rank is raised on all (see `Ranks`); if a rank is lost, the others
    raise RanksLostError: restart all of them then.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        run: RunSettings,
        store: StoreSettings,
        settings: PublishSettings,
        base_model: Path,
        manifests: AckedWriter | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._kafka, self._run, self._store, self._settings = kafka, run, store, settings
        self._base_model = base_model
        self._ranks = ranks or Ranks()
        self._codec = CodecSettings(**settings.codec.model_dump())
        self._folder = weights_folder(store, run)
        self._producer = RecordProducer(kafka, CLIENT)
        # Every rank has the graph; only the first rank reads the log and writes manifests.
        graph = self._ranks.from_first(lambda: read_versions(kafka, run))
        self._log = VersionLog(manifests or self._producer, run, store, graph, settings.incarnation)
        self.skips = SkipPublisher(kafka, run, settings, self._codec, self._folder, self._ranks)
        """The publisher of the skip-deltas, with its counts."""
        self._held: HeldVersion | None = None
        self._in_doubt = False

    @classmethod
    def open(
        cls,
        kafka: KafkaSettings,
        run: RunSettings,
        store: StoreSettings,
        settings: PublishSettings | None = None,
        *,
        base_model: Path | str,
        fork_from: ForkPoint | None = None,
        manifests: AckedWriter | None = None,
        ranks: Ranks | None = None,
    ) -> Self:
        """Open a publisher that continues at the end of the log.

        Args:
            kafka: the log; its topics exist.
            run: run and branch of the versions.
            store: object store for anchors, and for objects that are too large for the log.
            base_model: directory from which anchors copy configuration and tokenizer; the first rank reads it.
            fork_from: for a branch that is not in the log yet: the version of another branch that it begins with, under
                the same number. The branch gets its own anchor, and does not need the other branch afterwards.
            manifests: writer of the manifests, for a trainer that excludes other processes; the publisher's own
                producer if None. Only the first rank's is used.
            ranks: the ranks that publish together, each with its own call; None for this process alone.

        Raises VersionError if the log has a version twice with different weights, or the fork's version cannot be
        made, or the branch began with another one.
        """
        publisher = cls(kafka, run, store, settings or PublishSettings(), Path(base_model), manifests, ranks)
        if fork_from is not None:
            publisher._fork(fork_from)
        return publisher

    @property
    def versions(self) -> VersionGraph:
        """The versions in the log; to be read only. They are read again after a failed publication."""
        return self._log.graph

    def publish(
        self,
        version: int,
        tensors: Tensors,
        *,
        learning_rate: float = 0.0,
        step: int | None = None,
        parent: int | None = None,
        trained_at: int | None = None,
        serving_format: str = "",
        serving_activations: str = "",
    ) -> Manifest:
        """Publish weights as `version`; return its manifest after the log has acknowledged everything.

        A version that is in the log already is only compared with these weights. The first version of a branch is an
        anchor; every other one is a delta from the newest version, or from the one that `go_back` chose, and also an
        anchor if one is due.

        Args:
            version: number above all published versions, or a published version.
            tensors: every weight by its checkpoint name: torch tensors, or bit patterns (`Weight`), or on several ranks
                this rank's `TensorPart` of each. Each keeps its own type. They are read once, one by one, and may
                change after the return. With several shards, or if several ranks rebuild the newest version, they
                are read twice: the items of an iterator are all held in memory then.
            learning_rate: learning rate of the step that made the version, to be read together with its density.
            step: the optimizer step that made the version; `version` if None.
            parent: raise VersionError unless the version continues this one; not compared if None.
            trained_at: time at which that step ended, microseconds since the epoch; now if None.
            serving_format: the low-bit format to which the weights are rounded; empty without one.
            serving_activations: the format to which the inputs of these layers are rounded; empty without one.

        All arguments except the tensors are taken from the first rank.

        Raises VersionError if the version does not continue the chain, has other tensors, or the parts of the ranks
        are not one whole version, TypeError for a tensor type that a version cannot carry, DeliveryError if the log
        does not acknowledge a record, StoreUnavailableError if the store fails. The publisher can be used after each of
        these errors: it reads the log again.
        """
        self._read_again()

        def mark_of() -> VersionMark:
            """Return the version's metadata. Raises VersionError if it is neither published nor the next."""
            mark = VersionMark(
                version=version,
                parent=parent if self._log.graph.newest is None or parent is not None else self._log.head,
                step=version if step is None else step,
                learning_rate=learning_rate,
                trained_at=now_us() if trained_at is None else trained_at,
                serving_format=serving_format,
                serving_activations=serving_activations,
            )
            if version not in self._log.graph.manifests:
                self._log.require_next(version, mark.parent)
            return mark

        mark = self._ranks.from_first(mark_of)
        given = self._given(mark.version, version, tensors)
        done = self._log.graph.manifests.get(version)
        if done is not None:
            return self._confirm(done, given)
        if self._log.graph.newest is None:
            held, of_ranks = self._copied(version, given)
            whole = self._ranks.on_first(lambda: merged_tensors(of_ranks)) or []
            self._in_doubt = True
            manifest = self._commit(mark, [], whole, self._write_anchor(held))
            self._held, self._in_doubt = held, False
        else:
            manifest, held = self._continue(mark, given)
        self.skips.offer(self._log.graph, held)
        return manifest

    def go_back(self, version: int, tensors: Tensors) -> None:
        """Let the next version continue `version`, an older one in the log with the weights `tensors`.

        Raises VersionError if the log does not have the version, or has it with other weights.
        """
        self._read_again()
        given = self._given(self._ranks.from_first(lambda: version), version, tensors)
        done = self._log.graph.manifests.get(version)
        if done is not None:
            held, of_ranks = self._copied(version, given)
            self._ranks.from_first(lambda: _same(done, of_ranks))
            self._held = held
        self._log.go_back(version)

    def close(self) -> None:
        """Finish the work in progress and close. Raises DeliveryError if the log did not acknowledge a record."""
        self.skips.close()
        self._producer.flush()

    def _given(self, firsts: int, version: int, tensors: Tensors) -> Tensors:
        """Return the tensors, as a mapping if they are read more than once; `firsts` is the first rank's `version`."""
        rebuilt = self._held is None and self._log.graph.newest is not None and version not in self._log.graph.manifests
        several = self._settings.shards > 1 or (self._ranks.size > 1 and rebuilt)
        by_name: dict[str, TensorLike] = {}

        def take() -> None:
            if version != firsts:
                raise VersionError(f"it publishes version {version}, the first rank version {firsts}")
            if several:
                by_name.update(named(version, tensors))

        self._ranks.gather(take)
        return by_name if several else tensors

    def _continue(self, mark: VersionMark, tensors: Tensors) -> tuple[Manifest, HeldVersion]:
        if self._held is None:
            graph, head = self._log.graph, self._log.head
            self._held = rebuild_parts(
                lambda: _made_again(self._kafka, graph, head), mark.version, tensors, self._ranks
            )
        held = self._held
        if isinstance(tensors, Mapping):
            self._ranks.gather(lambda: held.check(mark.version, tensors))
        self._in_doubt = True
        sent = self._ranks.gather(lambda: self._send_delta(mark.version, held, tensors))
        shards = [shard for _, of_rank in sent for shard in of_rank]

        def merged() -> list[TensorInfo]:
            """Return the version's tensors. Raises VersionError for incomplete parts or another parent's weights."""
            tensors = merged_tensors([infos for infos, _ in sent])
            change = sum((shard.change for shard in shards), ZERO)
            made_from = (total_fingerprint(tensors) - change).hex()
            assert mark.parent is not None
            parent = self._log.graph.manifests[mark.parent]
            if made_from != parent.fingerprint:
                raise VersionError(
                    f"version {mark.version} was made from weights {made_from}, version {parent.version} in the log "
                    f"is {parent.fingerprint}: the weights of the ranks are not the ones they published"
                )
            return tensors

        whole = self._ranks.on_first(merged) or []
        since, n_bytes = self._log.graph.since_anchor(mark.parent), sum(shard.position.n_bytes for shard in shards)
        due = self._ranks.from_first(lambda: anchor_due(since, n_bytes, self._settings))
        manifest = self._commit(mark, shards, whole, self._write_anchor(held) if due else None)
        self._in_doubt = False
        return manifest, held

    def _copied(self, version: int, tensors: Tensors) -> tuple[HeldVersion, list[PartInfos]]:
        """Copy this rank's weights; also return, on the first rank, the parts of all ranks."""
        copies: list[HeldVersion] = []

        def copy() -> PartInfos:
            copies.append(HeldVersion.copy_of(version, tensors, on_device=self._settings.on_device))
            return copies[0].infos

        of_ranks = self._ranks.gather(copy)
        return copies[0], of_ranks

    def _send_delta(self, version: int, held: HeldVersion, tensors: Tensors) -> tuple[PartInfos, list[ShardReport]]:
        """Publish this rank's shards; return its parts of the version and the shards."""
        n_shards, shards, covered = self._settings.shards, [], []
        shard_of = balanced({name: part.n for name, part in held.parts.items()}, n_shards)
        for index in range(n_shards):
            names = None if n_shards == 1 else {name for name in shard_of if shard_of[name] == index}
            changes = held.take_over(version, tensors, names, on_device=self._settings.on_device)
            number = self._ranks.rank * n_shards + index
            with DeltaShard(version, held.version, changes, number, self._codec) as shard:
                shards.append(shard.send(self._producer, self._run, self._folder, self._settings.log_limit_bytes))
                covered.append(shard.covered)
        held.becomes(version, covered)
        return held.infos, shards

    def _commit(
        self, mark: VersionMark, shards: Sequence[ShardReport], tensors: Sequence[TensorInfo], anchor: Anchor | None
    ) -> Manifest:
        manifest = self._ranks.from_first(lambda: self._log.write(mark, shards, tensors, anchor))
        self._log.wrote(manifest)
        return manifest

    def _write_anchor(self, held: HeldVersion) -> Anchor:
        uri = anchor_uri(self._store.root, self._run.run_id, self._run.branch, held.version)
        return write_anchor(uri, self._base_model, held.parts, self._settings.anchor_file_bytes, self._ranks)

    def _confirm(self, done: Manifest, tensors: Tensors) -> Manifest:
        """Compare a published version; if it is the newest and there is no copy of it, keep one, and continue it."""
        held = None
        newest = done.version == self._log.graph.newest_version
        if newest and (self._held is None or self._held.version != done.version):
            held, of_ranks = self._copied(done.version, tensors)
        else:
            of_ranks = self._ranks.gather(
                lambda: {name: part_info(as_part(name, value)) for name, value in named(done.version, tensors)}
            )
        infos = self._ranks.from_first(lambda: _same(done, of_ranks))
        if held is not None:
            self._held = held
            self._log.go_back(done.version)
        return replace(done, tensors=infos)

    def _read_again(self) -> None:
        """Read the versions from the log again if a publication failed before its end."""
        if not self._in_doubt:
            return
        self._held = None
        self._log.read_again(self._ranks.from_first(lambda: read_versions(self._kafka, self._run)))
        self._in_doubt = False

    def _fork(self, point: ForkPoint) -> None:
        source = self._ranks.from_first(lambda: fork_source(self._kafka, self._run, self._log.graph, point))
        if source is None:
            return
        manifest = source.manifests[point.version]
        held = rebuild_whole(lambda: _made_again(self._kafka, source, point.version), self._ranks)
        whole = self._ranks.on_first(lambda: merged_tensors([held.infos])) or []
        mark = VersionMark(
            version=point.version,
            parent=None,
            step=manifest.step,
            learning_rate=manifest.learning_rate,
            trained_at=manifest.trained_at,
            serving_format=manifest.serving_format,
            serving_activations=manifest.serving_activations,
        )
        self._commit(mark, [], whole, self._write_anchor(held))
        # The cuts of the ranks are known only with the first version that they publish.
        self._held = held if self._ranks.size == 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # After an error, do not wait for records that the log has not acknowledged.
        (self.close if kind is None else self.skips.close)()


def _same(done: Manifest, of_ranks: Sequence[PartInfos]) -> list[TensorInfo]:
    """Return the tensors of all ranks. Raises VersionError unless they equal the published version's."""
    infos = merged_tensors(of_ranks)
    require_same(done, total_fingerprint(infos).hex())
    return infos


def _made_again(kafka: KafkaSettings, graph: VersionGraph, version: int | None) -> HeldVersion:
    """Rebuild a version in memory from the log."""
    newest = graph.newest
    path = None if version is None else graph.path(version)
    if newest is None or path is None:
        raise VersionError(f"no anchor leads to version {version} of run {graph.run_id}, branch {graph.branch}")
    return rebuild(kafka, path, with_tensors(newest).tensors)
