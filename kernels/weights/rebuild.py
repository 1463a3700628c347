"""A version made again from the log: the nearest anchor, then the deltas after it, each step checked.

Memory: one copy of the weights, a block of a delta, and what the fetcher holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tidemill.kernels.delta import DeltaError, decode_delta, resolve_all
from tidemill.kernels.fingerprint import ZERO, Fingerprint
from tidemill.kernels.weights.anchor import AnchorError, anchor_weights
from tidemill.kernels.weights.bits import Weight, tensor_info
from tidemill.kernels.weights.checkpoint import WeightFilesError
from tidemill.kernels.weights.delta_fetch import ChunkFetcher, CorruptDeltaError
from tidemill.kernels.weights.graph import Delta, UpdatePath, VersionError
from tidemill.kernels.weights.held import HeldVersion
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Manifest, TensorInfo
from tidemill.schemas.stored_object import StoredObjectError

CHUNK_WAIT_S = 60.0
"""Longest wait for one chunk that the log holds."""


def rebuild(kafka: KafkaSettings, path: UpdatePath, tensors: Sequence[TensorInfo]) -> HeldVersion:
    """The weights of the version that `path`, from an anchor on, leads to.

    Args:
        tensors: of any version of the chain, for their types; a file format knows fewer than a version can have.

    Raises VersionError when the anchor or a delta is gone or damaged, TimeoutError or StoreUnavailableError when the
    log or the store does not answer.
    """
    assert path.anchor is not None
    last = path.deltas[-1].manifest if path.deltas else path.anchor
    try:
        held = _from_anchor(path.anchor, tensors)
        if path.deltas:
            with LogReader(kafka, [Topic.DELTAS], start="end", client_id="tidemill-publisher-deltas") as log:
                fetcher = ChunkFetcher(log, CHUNK_WAIT_S)
                for delta in path.deltas:
                    _step(held, delta, fetcher)
    except (WeightFilesError, CorruptDeltaError, DeltaError, StoredObjectError) as error:
        raise VersionError(
            f"version {last.version} of run {last.run_id}, branch {last.branch}, cannot be made again: {error}"
        ) from error
    return held


def _from_anchor(manifest: Manifest, tensors: Sequence[TensorInfo]) -> HeldVersion:
    if manifest.anchor is None:
        raise AnchorError(f"version {manifest.version} has no anchor")
    dtypes = {tensor.name: tensor.dtype for tensor in tensors}
    weights: dict[str, Weight] = {}
    for name, weight in anchor_weights(manifest.anchor.uri):
        weights[name] = Weight(dtypes.get(name, weight.dtype), np.array(weight.bits, copy=True, order="C"))
    if weights.keys() != dtypes.keys():
        raise AnchorError(f"anchor {manifest.anchor.uri} does not hold the tensors of the chain")
    held = HeldVersion(manifest.version, weights, [tensor_info(name, weights[name]) for name in dtypes])
    _require(held, manifest)
    return held


def _step(held: HeldVersion, delta: Delta, fetcher: ChunkFetcher) -> None:
    manifest = delta.manifest
    changes: dict[str, Fingerprint] = {}
    bits = {name: weight.bits for name, weight in held.weights.items()}
    for shard in delta.shards:
        for block in decode_delta(fetcher.pieces(manifest, shard), manifest.version, held.version):
            for change in resolve_all(block, bits):
                held.apply(change)
                changes[change.name] = changes.get(change.name, ZERO) + change.target - change.base
    held.becomes(manifest.version, changes)
    _require(held, manifest)


def _require(held: HeldVersion, manifest: Manifest) -> None:
    if held.fingerprint.hex() != manifest.fingerprint:
        raise DeltaError(
            f"what was read of version {manifest.version} has fingerprint {held.fingerprint.hex()}, not "
            f"{manifest.fingerprint}"
        )
