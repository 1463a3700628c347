"""Claim check: bytes too large for the log lie in an object store, and a record points to them.

Bytes are stored before the record that claims them is written, and read only when their digest matches.
"""

from __future__ import annotations

import fsspec
import xxhash

from tidemill.schemas.codec import Codec
from tidemill.schemas.records import Claim, Interaction, Rollout


class ClaimError(ValueError):
    """Claimed bytes are missing or are not the ones that were stored."""


class ForeignClaimError(ValueError):
    """Claimed bytes are whole, and are not the record that claims them."""


def store_claim(root: str, name: str, payload: bytes) -> Claim:
    """Write `payload` below `root` (an fsspec URL or directory) and return its claim check."""
    uri = f"{root.rstrip('/')}/{name}"
    filesystem, path = fsspec.core.url_to_fs(uri)
    filesystem.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
    filesystem.pipe_file(path, payload)
    return Claim(uri=uri, n_bytes=len(payload), digest=digest(payload))


def load_claim(claim: Claim) -> bytes:
    """The claimed bytes. Raises ClaimError when they are missing, cut short or changed."""
    filesystem, path = fsspec.core.url_to_fs(claim.uri)
    try:
        payload: bytes = filesystem.cat_file(path)
    except FileNotFoundError as error:
        raise ClaimError(f"claimed bytes are gone: {claim.uri}") from error
    if len(payload) != claim.n_bytes or digest(payload) != claim.digest:
        raise ClaimError(
            f"claimed bytes at {claim.uri} are not the ones stored: {len(payload)} of {claim.n_bytes} bytes"
        )
    return payload


def claimed_rollout(rollout: Rollout, codec: Codec) -> Rollout:
    """The rollout with its segments, fetched where they were claimed.

    Raises ClaimError when the bytes are missing or changed, DecodeError when they are no record, ForeignClaimError when
    they are another one.
    """
    if rollout.claim is None:
        return rollout
    record = codec.decode(load_claim(rollout.claim))
    if not isinstance(record, Rollout) or record.rollout_id != rollout.rollout_id:
        raise ForeignClaimError(f"{rollout.claim.uri} does not hold rollout {rollout.rollout_id}")
    return record


def claimed_interaction(interaction: Interaction, codec: Codec) -> Interaction:
    """The interaction with its segments, fetched where they were claimed. Raises like `claimed_rollout`."""
    if interaction.claim is None:
        return interaction
    record = codec.decode(load_claim(interaction.claim))
    if not isinstance(record, Interaction) or record.interaction_id != interaction.interaction_id:
        raise ForeignClaimError(f"{interaction.claim.uri} does not hold interaction {interaction.interaction_id}")
    return record


def digest(payload: bytes) -> str:
    """xxh3-128, hexadecimal."""
    return str(xxhash.xxh3_128_hexdigest(payload))
