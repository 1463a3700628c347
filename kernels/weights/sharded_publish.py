"""Publication from the ranks of a sharded model: each rank publishes what it holds, the first one commits the version.

What this keeps true:

- no process holds the whole state: a rank holds its parts of two versions, and one whole tensor while an anchor is
  written;
- the manifest is written when the shards of all ranks are acknowledged, cover every element of every tensor once and
  start from the parent's very weights; until then there is no such version;
- every rank learns the same end of a publication; after a failed one all of them still start from the version before,
  and may publish again;
- a version's tensors and fingerprints do not depend on the number of ranks.

    ranks = open_ranks(timeout_s=600)
    publisher = ShardedPublisher(producer, ranks, kafka, run, store, base_model=..., settings=...)
    publisher.publish(mark, local_parts(model, first=ranks.is_first))     # on every rank, for every version
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.kernels.delta import CodecSettings
from tidemill.kernels.fingerprint import ZERO
from tidemill.kernels.weights.anchor import anchor_uri
from tidemill.kernels.weights.bits import total_fingerprint
from tidemill.kernels.weights.commit import VersionLog, VersionMark, anchor_due, read_versions, weights_folder
from tidemill.kernels.weights.config import PublishSettings
from tidemill.kernels.weights.delta_shard import DeltaShard, PartChange, ShardClaims, ShardReport
from tidemill.kernels.weights.graph import VersionError, VersionGraph, require_same
from tidemill.kernels.weights.ranks import Ranks
from tidemill.kernels.weights.sharded_anchor import write_sharded_anchor
from tidemill.kernels.weights.sharded_parts import Parts, RankReport, TensorPart, deal, merged_tensors, part_infos
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import Anchor, Manifest, TensorInfo


@dataclass(frozen=True, slots=True)
class _HeldParts:
    """The version that this rank's next delta starts from."""

    version: int
    parts: Parts


@dataclass(frozen=True, slots=True)
class _Sent:
    """A version whose shards are all acknowledged and fit together."""

    shards: Sequence[ShardReport]
    tensors: Sequence[TensorInfo]
    anchor_due: bool


class ShardedPublisher:
    """Publishes the versions of one branch, in order; made and called by all ranks together.

    After a restart publish first the version that the weights are: the log has it, and the next one starts from it.

    Args:
        base_model: directory whose configuration and tokenizer anchors take over; the first rank reads it.
        settings: without skip-deltas, which are not made from ranks.
        shards_per_rank: shards that a rank splits its tensors over, each with chunks in order in one partition.

    Raises ValueError for settings that cannot be met, VersionError when the log has a version with different weights
    twice, RanksLostError.
    """

    def __init__(
        self,
        producer: RecordProducer,
        ranks: Ranks,
        kafka: KafkaSettings,
        run: RunSettings,
        store: StoreSettings,
        *,
        base_model: Path,
        settings: PublishSettings,
        shards_per_rank: int = 1,
    ) -> None:
        if settings.skips or shards_per_rank < 1:
            raise ValueError(
                f"ranks make no skip-deltas and at least one shard each: set publish.skips to [], not "
                f"{list(settings.skips)}, and shards_per_rank to 1 or more, not {shards_per_rank}"
            )
        self._producer = producer
        self._ranks = ranks
        self._kafka, self._run, self._store = kafka, run, store
        self._base_model = base_model
        self._settings = settings
        self._shards_per_rank = shards_per_rank
        self._codec = CodecSettings(**settings.codec.model_dump())
        self._claims = ShardClaims(weights_folder(store, run), settings.log_limit_bytes)
        self._held: _HeldParts | None = None
        self._in_doubt = False
        # The versions are the committer's: on the other ranks it stays empty.
        graph = ranks.on_first(lambda: read_versions(kafka, run))
        graph = VersionGraph(run.run_id, run.branch) if graph is None else graph
        self._log = VersionLog(producer, run, store, graph, settings.incarnation)

    def publish(self, mark: VersionMark, parts: Parts) -> Manifest:
        """Publish the weights of which every rank gives its `parts` as version `mark.version`; on every rank at once.

        Returns when the log has acknowledged all of it. A version that is in the log is compared and left alone.

        Raises on every rank what one of them fails with, VersionError when the parts do not continue the chain: the
        version is then not published. Raises RanksLostError when a rank is gone: start again, and publish it again.
        """
        published = self._ranks.from_first(lambda: self._published(mark))
        self._in_doubt = True
        reports = self._ranks.gather(lambda: self._send(mark, parts, published))
        sent = self._ranks.on_first(lambda: self._checked(mark, reports, published))
        due = self._ranks.from_first(lambda: sent is not None and sent.anchor_due)
        anchor = write_sharded_anchor(self._anchor_uri(mark), self._base_model, parts, self._ranks) if due else None
        manifest = published or self._ranks.from_first(lambda: self._commit(mark, sent, anchor))
        self._held, self._in_doubt = _HeldParts(mark.version, parts), False
        return manifest

    def _published(self, mark: VersionMark) -> Manifest | None:
        """The version as the log has it. Raises VersionError when it is neither there nor the next one."""
        if self._in_doubt:
            # After a failure nobody knows what the log took: it is asked.
            self._log.read_again(read_versions(self._kafka, self._run))
        published = self._log.graph.manifests.get(mark.version)
        if published is None:
            self._log.require_next(mark.version, mark.parent)
        return published

    def _send(self, mark: VersionMark, parts: Parts, published: Manifest | None) -> RankReport:
        shards = [] if published or mark.parent is None else list(self._send_shards(mark, mark.parent, parts))
        return RankReport(part_infos(parts), shards)

    def _send_shards(self, mark: VersionMark, parent: int, parts: Parts) -> Iterator[ShardReport]:
        if self._held is None or self._held.version != parent:
            held = "no version" if self._held is None else f"version {self._held.version}"
            raise VersionError(
                f"version {mark.version} starts from {parent}, this rank holds {held}: publish {parent} first"
            )
        _require_same_parts(self._held.parts, parts)
        dealt = deal({name: part.bits.size for name, part in parts.items()}, self._shards_per_rank)
        for hand in range(self._shards_per_rank):
            changes = (_change(self._held.parts[name], parts[name]) for name in parts if dealt[name] == hand)
            number = self._ranks.rank * self._shards_per_rank + hand
            with DeltaShard(mark.version, parent, changes, number, self._codec) as shard:
                yield shard.report(shard.send(self._producer, self._run, self._claims))

    def _checked(self, mark: VersionMark, reports: Sequence[RankReport], published: Manifest | None) -> _Sent:
        """What all ranks sent, once it is known to be the version. Raises VersionError, CoverageError."""
        tensors = merged_tensors(reports)
        shards = [shard for report in reports for shard in report.shards]
        if published is not None:
            require_same(published, total_fingerprint(tensors).hex())
            return _Sent(shards, tensors, anchor_due=False)
        if mark.parent is None:
            return _Sent(shards, tensors, anchor_due=True)
        self._require_base(mark, shards, tensors)
        n_bytes = sum(shard.n_bytes for shard in shards)
        return _Sent(shards, tensors, anchor_due(self._log.graph.since_anchor(self._log.head), n_bytes, self._settings))

    def _commit(self, mark: VersionMark, sent: _Sent | None, anchor: Anchor | None) -> Manifest:
        if sent is None:
            raise RuntimeError("only the first rank knows what was sent, and commits")
        return self._log.commit(mark, sent.shards, sent.tensors, anchor)

    def _require_base(self, mark: VersionMark, shards: Sequence[ShardReport], tensors: Sequence[TensorInfo]) -> None:
        change = sum((change for shard in shards for change in shard.tensor_changes.values()), ZERO)
        made_from = (total_fingerprint(tensors) - change).hex()
        parent = self._log.graph.newest
        if parent is not None and made_from != parent.fingerprint:
            raise VersionError(
                f"version {mark.version} was made from weights {made_from}, version {parent.version} in the log is "
                f"{parent.fingerprint}: the weights of the ranks are not the ones they published"
            )

    def _anchor_uri(self, mark: VersionMark) -> str:
        return anchor_uri(self._store.root, self._run.run_id, self._run.branch, mark.version)


def _change(old: TensorPart, new: TensorPart) -> PartChange:
    return PartChange(new.name, new.dtype, old.bits, new.bits, new.start, new.total)


def _require_same_parts(old: Parts, new: Parts) -> None:
    was, now = ({(p.name, p.dtype, p.shape, p.start, p.bits.size) for p in parts.values()} for parts in (old, new))
    if was != now:
        odd = sorted({name for name, *_ in was ^ now})
        raise VersionError(f"a delta keeps the tensors and where they are cut; this rank now holds others: {odd[:5]}")
