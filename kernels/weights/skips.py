"""Skip-deltas: shorter paths to a version, for replicas that are behind, encoded while the trainer continues.

Every k-th version of a branch gets a delta from the version k before it, for each configured k: with 8 and 64, a
replica that is n versions behind needs about n/64 + 8 + 8 deltas instead of n. They are in the object store, so that
other replicas never read them, and only every k-th version has one of length k: over eight steps a delta grows to
about three or four times one step's size, over 64 to about ten times, so that 8 and 64 together add about 50 %.

Invariants: nothing here delays or fails a publication. Skip-deltas that are due while the backlog is full, or that
fail, are dropped and counted; a version is complete without them. Memory: a copy of the weights for each version that
waits or is in progress and, unless they are read again from the log, one for each k. Each of several ranks writes a
shard of its parts, in the same order; the first rank decides which to drop, and writes the record.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property

from tidemill.kernels.block import CodecSettings
from tidemill.kernels.elements import TensorChange
from tidemill.kernels.weights.config import PublishSettings
from tidemill.kernels.weights.delta_shard import DeltaShard
from tidemill.kernels.weights.graph import UpdatePath, VersionError, VersionGraph
from tidemill.kernels.weights.held import HeldVersion, rebuild_parts
from tidemill.kernels.weights.ranks import Ranks, RanksLostError
from tidemill.kernels.weights.rebuild import rebuild
from tidemill.kernels.weights.tensor_parts import ShardReport
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import SkipDelta, TensorInfo

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Skip:
    """One skip-delta that is due."""

    length: int
    base: int
    """The version that it starts from."""
    path: UpdatePath | None
    """Path to rebuild the base; None if no anchor leads to it."""


def skips_due(graph: VersionGraph, lengths: tuple[int, ...]) -> list[Skip]:
    """Return the skip-deltas that the newest version of a branch gets."""
    newest = -1 if graph.newest_version is None else graph.newest_version
    bases = ((length, graph.ancestor(newest, length)) for length in bases_due(graph, lengths))
    return [Skip(length, base.version, graph.path(base.version)) for length, base in bases if base is not None]


def bases_due(graph: VersionGraph, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths for which a later skip-delta starts from the newest version."""
    return tuple(length for length in lengths if graph.manifests and (len(graph.manifests) - 1) % length == 0)


class SkipPublisher:
    """Publisher of skip-deltas, which it makes in its own thread."""

    def __init__(
        self,
        kafka: KafkaSettings,
        run: RunSettings,
        settings: PublishSettings,
        codec: CodecSettings,
        folder: str,
        ranks: Ranks,
    ) -> None:
        self._kafka, self._run, self._settings = kafka, run, settings
        self._codec, self._folder = codec, folder
        self._ranks = ranks
        # The thread's calls run at the same time as the publisher's.
        self._beside = ranks.sibling() if settings.skips else ranks
        self._worker = ThreadPoolExecutor(1, "tidemill-skip-deltas")
        self._jobs: list[Future[None]] = []
        """One for each version that gets skip-deltas; some that have ended."""
        self._bases: dict[int, HeldVersion] = {}
        self._stop = threading.Event()
        self._lost = False
        """Whether a rank was lost: each further call would wait for it again."""
        self.published = 0
        """Skip-deltas in the log."""
        self.dropped = 0
        """Skip-deltas that were not made: the backlog was full, or an error occurred."""

    def offer(self, graph: VersionGraph, held: HeldVersion) -> None:
        """Queue the skip-deltas of the newest version of `graph`, with the weights `held`, which are copied if needed.

        Every rank calls it. Raises RanksLostError.
        """
        keep = self._settings.skip_bases == "memory"
        skips, lengths = skips_due(graph, self._settings.skips), bases_due(graph, self._settings.skips)
        if not skips and not (keep and lengths):
            return
        self._jobs = [job for job in self._jobs if not job.done()]
        waiting = sum(not job.running() for job in self._jobs)
        if self._ranks.from_first(lambda: waiting >= self._settings.skip_backlog):
            self.dropped += len(skips)
            _log.warning("version %d gets no skip-deltas: %d versions wait", held.version, waiting)
            return
        self._jobs.append(self._worker.submit(self._make, held.snapshot(), skips, lengths if keep else ()))

    def wait(self) -> None:
        """Wait until everything that was offered is published or dropped."""
        wait(self._jobs)

    def close(self) -> None:
        """End the thread: finish the version in progress, drop and count those that wait."""
        self._stop.set()
        self._worker.shutdown()

    @cached_property
    def _producer(self) -> RecordProducer:
        return RecordProducer(self._kafka, "tidemill-publisher-skips")

    def _make(self, weights: HeldVersion, skips: list[Skip], lengths: tuple[int, ...]) -> None:
        """Publish the skip-deltas that lead to `weights`, which are the next base for `lengths`."""
        left = len(skips)
        try:
            # Every rank takes up every job, so that none waits for another that is being closed.
            if self._lost or self._beside.from_first(self._stop.is_set):
                self.dropped += left
                return
            for skip in skips:
                try:
                    self._publish(weights, skip)
                except RanksLostError:
                    raise
                except Exception:  # noqa: BLE001 - after any error the version is whole without its skip-delta
                    self.dropped += 1
                    _log.exception("version %d gets no skip-delta from version %d", weights.version, skip.base)
                left -= 1
            self._bases.update(dict.fromkeys(lengths, weights))
        except RanksLostError:
            self._lost = True
            self.dropped += left
            _log.exception("version %d gets no more skip-deltas", weights.version)

    def _publish(self, new: HeldVersion, skip: Skip) -> None:
        base = self._base(skip, new)
        changes = (
            TensorChange(name, part.dtype, base.parts[name].bits, part.bits, part.start, part.total)
            for name, part in new.parts.items()
        )

        def send() -> ShardReport:
            with DeltaShard(new.version, base.version, changes, self._beside.rank, self._codec) as shard:
                return shard.send(self._producer, self._run, self._folder, limit_bytes=0)

        shards = self._beside.gather(send)

        def write() -> None:
            record = SkipDelta(
                run_id=self._run.run_id,
                branch=self._run.branch,
                version=new.version,
                base=base.version,
                n_changed=sum(shard.n_changed for shard in shards),
                n_bytes=sum(shard.position.n_bytes for shard in shards),
                shards=[shard.position for shard in shards],
                published_at=now_us(),
            )
            self._producer.send_acked(Topic.MANIFESTS, [(self._run.branch, record)])

        self._beside.on_first(write)
        self.published += 1

    def _base(self, skip: Skip, new: HeldVersion) -> HeldVersion:
        held = self._bases.get(skip.length)
        if held is not None and held.version == skip.base:
            return held

        def made_again() -> HeldVersion:
            if skip.path is None:
                raise VersionError(f"no anchor leads to version {skip.base}")
            tensors = [TensorInfo(part.name, part.dtype, list(part.shape), "") for part in new.parts.values()]
            return rebuild(self._kafka, skip.path, tensors)

        return rebuild_parts(made_again, new.version, new.parts, self._beside)
