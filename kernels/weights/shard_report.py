"""What whoever published one shard of a version tells whoever commits the version.

A version is committed from the reports of all of its shards alone: the weights stay where they are. Changes are linear
fingerprints, so those of the shards add up to the tensor's whatever the number of shards and wherever they were cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.kernels.fingerprint import Fingerprint
from tidemill.schemas.records import ShardPosition


@dataclass(frozen=True, slots=True)
class ShardReport:
    """One shard of a version, acknowledged by the log or whole in the store."""

    position: ShardPosition
    n_bytes: int
    """Encoded bytes."""
    n_changed: int
    """Changed elements."""
    tensor_changes: Mapping[str, Fingerprint]
    """What the shard adds to the fingerprint of each tensor that it changes, by name."""
