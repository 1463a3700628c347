"""Publishing weight versions, from any trainer: a delta, an anchor where one is due, the manifest that commits.

    with WeightPublisher.open(kafka, run, store, settings, base_model=directory) as publisher:
        publisher.publish(0, model.named_parameters())
        ...
        publisher.publish(step, model.named_parameters(), learning_rate=rate)

What this keeps true:

- a manifest is written only after the log has acknowledged every chunk it names and its anchor is whole, so a version
  that a reader sees can be read in full; consumers are never waited for;
- each version is published once: after a restart a version whose manifest is in the log is compared and left alone;
- a delta starts from the very weights that its parent's manifest stands for: the publisher keeps a copy of them, and
  makes it again from the log where it has none;
- the versions of a branch are a tree: a version continues the newest, or an older one after `go_back`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from tidemill.kernels.delta import CodecSettings
from tidemill.kernels.weights.anchor import anchor_uri, write_anchor
from tidemill.kernels.weights.bits import Weight, WeightLike, as_weight, tensor_info, total_fingerprint
from tidemill.kernels.weights.commit import VersionLog, VersionMark, anchor_due, read_versions, weights_folder
from tidemill.kernels.weights.config import PublishSettings
from tidemill.kernels.weights.delta_shard import DeltaShard, ShardClaims, ShardReport
from tidemill.kernels.weights.graph import VersionError, VersionGraph, require_same
from tidemill.kernels.weights.held import HeldVersion, Tensors, named
from tidemill.kernels.weights.rebuild import rebuild
from tidemill.kernels.weights.skips import SkipPublisher
from tidemill.kernels.weights.tensor_table import with_tensors
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.producer import AckedWriter, RecordProducer
from tidemill.schemas.records import Anchor, Manifest

__all__ = ["ForkPoint", "PublishSettings", "Tensors", "VersionError", "Weight", "WeightLike", "WeightPublisher"]

CLIENT = "tidemill-publisher"


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """A published version that a new branch begins with."""

    branch: str
    version: int


class WeightPublisher:
    """Publishes the versions of one branch, in order; a context manager. Make one with `open`.

    It holds one copy of the newest version's weights on the CPU. Not safe for several threads.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        run: RunSettings,
        store: StoreSettings,
        settings: PublishSettings,
        base_model: Path,
        manifests: AckedWriter | None = None,
    ) -> None:
        self._kafka, self._run, self._store, self._settings = kafka, run, store, settings
        self._base_model = base_model
        self._codec = CodecSettings(**settings.codec.model_dump())
        self._claims = ShardClaims(weights_folder(store, run), settings.log_limit_bytes)
        self._producer = RecordProducer(kafka, CLIENT)
        self._log = VersionLog(manifests or self._producer, run, store, read_versions(kafka, run), settings.incarnation)
        self._skips = SkipPublisher(kafka, run, settings, self._codec, self._claims.folder)
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
    ) -> Self:
        """A publisher that goes on where the log ends.

        Args:
            kafka: the log; its topics exist.
            run: run and branch that the versions belong to.
            store: where anchors lie, and what is too large for the log.
            base_model: directory whose configuration and tokenizer anchors take over.
            fork_from: for a branch that is not in the log yet: the version of another one that it begins with, under
                the same number. The branch gets an anchor of its own, and needs nothing of the other one from then on.
            manifests: what writes the manifests, for a trainer that other processes are to be kept out for; the
                publisher's own producer where it is not given.

        Raises VersionError when the log holds a version twice with different weights, or the fork's version cannot be
        made, or the branch began with another one.
        """
        publisher = cls(kafka, run, store, settings or PublishSettings(), Path(base_model), manifests)
        if fork_from is not None:
            publisher._fork(fork_from)
        return publisher

    @property
    def newest(self) -> Manifest | None:
        """The newest version in the log."""
        return self._log.graph.newest

    @property
    def incarnation(self) -> str:
        """Which life of the branch's version numbers its versions belong to; empty while it has none."""
        return self._log.graph.incarnation

    @property
    def skips(self) -> SkipPublisher:
        """What makes the skip-deltas, with its counts."""
        return self._skips

    def has(self, version: int) -> bool:
        """Whether the log holds a version."""
        return self._log.graph.manifests.get(version) is not None

    def publish(
        self,
        version: int,
        tensors: Tensors,
        *,
        learning_rate: float = 0.0,
        step: int | None = None,
        parent: int | None = None,
        trained_at: int | None = None,
    ) -> Manifest:
        """Publish weights as `version`; returns its manifest when the log has acknowledged all of it.

        A version that is in the log is compared with these weights and left alone. The first version of a branch is
        an anchor; every other one is a delta from the newest, or from the one gone back to, and an anchor too where one
        is due.

        Args:
            version: above every published one, or one of them.
            tensors: every weight by its checkpoint name: torch tensors, or bit patterns (`Weight`). Each is carried in
                its own type. They are read once, one after the other, and may change when this returns.
            learning_rate: of the step that made the version; it belongs beside its density.
            step: the optimizer step that made the version; `version` where it is not given.
            parent: raise VersionError unless this is the version that is continued; not compared where it is not given.
            trained_at: when that step ended, microseconds since the epoch; now where it is not given.

        Raises VersionError when the version does not continue the chain or has other tensors than it, TypeError for a
        tensor of a type that cannot be carried, DeliveryError when the log does not take it, StoreUnavailableError
        when the store fails. The publisher can go on after each of them: it reads again what the log holds.
        """
        if self._in_doubt:
            self._read_again()
        done = self._log.graph.manifests.get(version)
        if done is not None:
            return self._confirm(done, tensors)
        newest = self._log.graph.newest
        mark = VersionMark(
            version=version,
            parent=parent if newest is None or parent is not None else self._log.head,
            step=version if step is None else step,
            learning_rate=learning_rate,
            trained_at=now_us() if trained_at is None else trained_at,
        )
        self._log.require_next(version, mark.parent)
        manifest = self._begin(mark, tensors) if newest is None else self._continue(mark, tensors)
        self._skips.offer(self._log.graph, self._head_weights())
        return manifest

    def go_back(self, version: int, tensors: Tensors) -> None:
        """The next version continues `version`, an older one in the log, whose weights `tensors` are.

        Raises VersionError when the log does not have the version, or has it with other weights.
        """
        if self._in_doubt:
            self._read_again()
        done = self._log.graph.manifests.get(version)
        if done is not None:
            held = HeldVersion.copy_of(version, tensors)
            require_same(done, held.fingerprint.hex())
            self._held = held
        self._log.go_back(version)

    def close(self) -> None:
        """End it: what is under way is finished. Raises DeliveryError for what the log did not take."""
        self._skips.close()
        self._producer.flush()

    def _begin(self, mark: VersionMark, tensors: Tensors) -> Manifest:
        held = HeldVersion.copy_of(mark.version, tensors)
        self._in_doubt = True
        manifest = self._log.commit(mark, [], held.tensors, self._write_anchor(held))
        self._held, self._in_doubt = held, False
        return manifest

    def _continue(self, mark: VersionMark, tensors: Tensors) -> Manifest:
        held = self._head_weights()
        if isinstance(tensors, Mapping):
            held.check(mark.version, tensors)
        self._in_doubt = True
        report = self._send_delta(mark.version, held, tensors)
        due = anchor_due(self._log.graph.since_anchor(self._log.head), report.n_bytes, self._settings)
        anchor = self._write_anchor(held) if due else None
        manifest = self._log.commit(mark, [report], held.tensors, anchor)
        self._in_doubt = False
        return manifest

    def _send_delta(self, version: int, held: HeldVersion, tensors: Tensors) -> ShardReport:
        changes = held.take_over(version, tensors)
        with DeltaShard(version, held.version, changes, settings=self._codec) as shard:
            report = shard.report(shard.send(self._producer, self._run, self._claims))
        held.becomes(version, report.tensor_changes)
        return report

    def _write_anchor(self, held: HeldVersion) -> Anchor:
        uri = anchor_uri(self._store.root, self._run.run_id, self._run.branch, held.version)
        return write_anchor(uri, self._base_model, held.weights, self._settings.anchor_file_bytes)

    def _confirm(self, done: Manifest, tensors: Tensors) -> Manifest:
        """Compare; the newest version's weights are kept where there is no copy of them yet, and are continued."""
        newest = done.version == self._log.graph.newest_version
        if newest and (self._held is None or self._held.version != done.version):
            held = HeldVersion.copy_of(done.version, tensors)
            require_same(done, held.fingerprint.hex())
            self._held, infos = held, held.tensors
            self._log.go_back(done.version)
        else:
            infos = [tensor_info(name, as_weight(name, value)) for name, value in named(tensors)]
            require_same(done, total_fingerprint(infos).hex())
        return replace(done, tensors=infos)

    def _head_weights(self) -> HeldVersion:
        if self._held is None:
            self._held = _made_again(self._kafka, self._log.graph, self._log.head)
        return self._held

    def _read_again(self) -> None:
        """After a failure nobody knows what the log took: it is asked."""
        self._held = None
        self._log.read_again(read_versions(self._kafka, self._run))
        self._in_doubt = False

    def _fork(self, point: ForkPoint) -> None:
        if point.branch == self._run.branch:
            raise VersionError(
                f"branch {point.branch} cannot begin with one of its own versions: give the run another branch"
            )
        source = read_versions(self._kafka, self._run.model_copy(update={"branch": point.branch}))
        manifest = source.manifests.get(point.version)
        if manifest is None:
            raise VersionError(f"branch {point.branch} of run {self._run.run_id} has no version {point.version}")
        oldest = min(self._log.graph.manifests.values(), key=lambda begun: begun.version, default=None)
        if oldest is None:
            held = _made_again(self._kafka, source, point.version)
            mark = VersionMark(
                point.version, None, manifest.step, manifest.learning_rate, trained_at=manifest.trained_at
            )
            self._log.commit(mark, [], held.tensors, self._write_anchor(held))
            self._held = held
        elif (oldest.version, oldest.fingerprint) != (manifest.version, manifest.fingerprint):
            raise VersionError(
                f"branch {self._run.branch} begins with version {oldest.version}, not with version {point.version} of "
                f"branch {point.branch}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._skips.close()


def _made_again(kafka: KafkaSettings, graph: VersionGraph, version: int | None) -> HeldVersion:
    """A version in memory, from the log."""
    newest = graph.newest
    path = None if version is None else graph.path(version)
    if newest is None or path is None:
        raise VersionError(f"no anchor leads to version {version} of run {graph.run_id}, branch {graph.branch}")
    return rebuild(kafka, path, with_tensors(newest).tensors)
