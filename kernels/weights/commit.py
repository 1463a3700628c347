"""The commit of a version: its manifest, written once everything that it names is acknowledged or stored.

This is the one step that publishing from one process and from many share. What it keeps true: a manifest that a reader
sees can be read in full; a version is committed once, and only as the next one of its branch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from tidemill.kernels.weights.bits import total_fingerprint
from tidemill.kernels.weights.chain import VersionChain
from tidemill.kernels.weights.shard_report import ShardReport
from tidemill.kernels.weights.tensor_table import fit_record
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import CLAIM_CHECK_BYTES, KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.producer import AckedWriter
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Anchor, Manifest, TensorInfo


@dataclass(frozen=True, slots=True)
class VersionMark:
    """What the trainer says of a version beside its weights."""

    version: int
    parent: int | None
    """The version that the step started from; None begins a chain, as an anchor only."""
    step: int
    learning_rate: float
    trained_at: int
    """When the optimizer step ended, microseconds since the epoch."""


def read_chain(kafka: KafkaSettings, run: RunSettings) -> VersionChain:
    """Every version of the run's branch in the log.

    Raises ChainError when a version was published twice with different weights.
    """
    chain = VersionChain(run.run_id, run.branch)
    with LogReader(kafka, [Topic.MANIFESTS], client_id="tidemill-publisher") as reader:
        for located in reader.read_to_end():
            if isinstance(located.record, Manifest):
                chain.observe(located.record)
    return chain


def weights_folder(store: StoreSettings, run: RunSettings) -> str:
    """Where the objects of a branch's versions lie that are too large for the log."""
    return f"{store.root.rstrip('/')}/{run.run_id}/weights/{run.branch}"


class VersionLog:
    """Commits the versions of one branch, in order.

    Args:
        producer: writes the manifests.
        incarnation: that a chain begun here has; empty: a new one.
    """

    def __init__(
        self,
        producer: AckedWriter,
        run: RunSettings,
        store: StoreSettings,
        chain: VersionChain,
        incarnation: str = "",
    ) -> None:
        self._producer = producer
        self._run = run
        self.chain = chain
        self._incarnation = incarnation
        self._fit = partial(fit_record, codec=Codec(), folder=weights_folder(store, run), limit_bytes=CLAIM_CHECK_BYTES)

    def commit(
        self,
        mark: VersionMark,
        shards: Sequence[ShardReport],
        tensors: Sequence[TensorInfo],
        anchor: Anchor | None,
    ) -> Manifest:
        """Write the manifest of a version and wait for the log; the manifest as it lies there.

        Args:
            mark: what the trainer says of the version.
            shards: every shard of the delta from `mark.parent`, acknowledged; empty where that is None.
            tensors: every tensor of the version.
            anchor: the version's anchor, whole.

        Raises ChainError when the version is not the next one, DeliveryError when the log does not take it (it may hold
        it all the same), StoreUnavailableError when the store fails.
        """
        self.chain.require_next(mark.version, mark.parent)
        manifest = self._fit(self._manifest(mark, shards, tensors, anchor))
        self._producer.send_acked(Topic.MANIFESTS, [(self._run.branch, manifest)])
        self.chain.observe(manifest)
        return manifest

    def _manifest(
        self,
        mark: VersionMark,
        shards: Sequence[ShardReport],
        tensors: Sequence[TensorInfo],
        anchor: Anchor | None,
    ) -> Manifest:
        ordered = sorted(shards, key=lambda shard: shard.position.shard)
        fingerprint, published_at = total_fingerprint(tensors).hex(), now_us()
        begun = self.chain.newest is not None
        return Manifest(
            run_id=self._run.run_id,
            branch=self._run.branch,
            version=mark.version,
            parent=mark.parent,
            step=mark.step,
            learning_rate=mark.learning_rate,
            n_elements=sum(prod(tensor.shape) for tensor in tensors),
            n_changed=sum(shard.n_changed for shard in ordered),
            delta_bytes=sum(shard.n_bytes for shard in ordered),
            shards=[shard.position for shard in ordered],
            tensors=list(tensors),
            fingerprint=fingerprint,
            anchor=anchor,
            trained_at=mark.trained_at,
            published_at=published_at,
            incarnation=self.chain.incarnation if begun else self._first_incarnation(fingerprint, published_at),
        )

    def _first_incarnation(self, fingerprint: str, published_at: int) -> str:
        said = f"{self._run.run_id}/{self._run.branch}/{fingerprint}/{published_at}"
        return self._incarnation or hashlib.sha256(said.encode()).hexdigest()[:16]
