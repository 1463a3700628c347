"""Objects in the object store: payloads too large for records, in any store that fsspec supports, checked when read.

A claim check is a record's reference to such a payload.

Invariants: an object is stored completely before a record refers to it; a payload that is read has the size and the
digest in the record, or an error is raised; a reader never accepts more bytes than that size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import fsspec
import xxhash

from tidemill.schemas.codec import Codec
from tidemill.schemas.records import Claim, Interaction, Rollout

PIECE_BYTES = 4 << 20
"""Number of bytes read from a store at a time."""


class StoredObjectError(ValueError):
    """An object is missing, was changed, or has an invalid URL: a retry cannot help."""


class StoreUnavailableError(ConnectionError):
    """The store failed; a retry may succeed."""


def put_object(uri: str, pieces: Iterable[bytes | memoryview]) -> Claim:
    """Write `pieces` in order as the object at `uri` (an fsspec URL or a path); an existing object is replaced.

    Use a name that is unique to these bytes (for instance their digest): a reader of an older record then never finds
    other bytes under that name. The returned URI is absolute.

    Raises StoredObjectError for a URL that no file system supports, StoreUnavailableError if the store fails.
    """
    with _store_errors(uri):
        filesystem, path = fsspec.core.url_to_fs(uri)
        filesystem.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        opened = filesystem.open(path, "wb")
    state, n_bytes = xxhash.xxh3_128(), 0
    try:
        for piece in pieces:
            with _store_errors(uri):
                opened.write(piece)
            state.update(piece)
            n_bytes += len(piece)
    finally:
        with _store_errors(uri):
            opened.close()
    return Claim(filesystem.unstrip_protocol(path), n_bytes, state.hexdigest())


def object_pieces(stored: Claim, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """Yield the bytes of an object in order, at most `piece_bytes` at a time. They are checked only at the end.

    Raises StoredObjectError if the object is missing, truncated, too long or changed, StoreUnavailableError if the
    store fails.
    """
    state, n_bytes = xxhash.xxh3_128(), 0
    for piece in _read(stored, piece_bytes):
        state.update(piece)
        n_bytes += len(piece)
        yield piece
    if n_bytes != stored.n_bytes:
        raise StoredObjectError(f"{stored.uri} has {n_bytes} of {stored.n_bytes} bytes: it was truncated")
    if state.hexdigest() != stored.digest:
        raise StoredObjectError(
            f"{stored.uri} was changed after it was stored: its {n_bytes} bytes have another digest"
        )


def read_object(stored: Claim) -> bytes:
    """Return the whole object, checked. Raises as `object_pieces`."""
    return b"".join(object_pieces(stored))


def _read(stored: Claim, piece_bytes: int) -> Iterator[bytes]:
    left = stored.n_bytes
    with _store_errors(stored.uri):
        filesystem, path = fsspec.core.url_to_fs(stored.uri)
        opened = filesystem.open(path, "rb")
    with opened:
        while True:
            with _store_errors(stored.uri):
                piece: bytes = opened.read(min(piece_bytes, left + 1))
            if not piece:
                return
            if len(piece) > left:
                raise StoredObjectError(f"{stored.uri} has more than the {stored.n_bytes} bytes that were stored")
            left -= len(piece)
            yield piece


@contextmanager
def _store_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, IsADirectoryError) as error:
        raise StoredObjectError(f"{uri} does not exist in the store") from error
    except OSError as error:
        raise StoreUnavailableError(f"{uri}: the store failed: {error}") from error
    except (ValueError, ImportError) as error:
        raise StoredObjectError(f"{uri!r} cannot be reached: {error}") from error


class ClaimError(ValueError):
    """Claimed bytes are missing, or differ from those that were stored."""


class ForeignClaimError(ValueError):
    """Claimed bytes are complete, but contain another record than the one that refers to them."""


def store_claim(root: str, name: str, payload: bytes) -> Claim:
    """Write `payload` below `root` (an fsspec URL or directory), and return its claim check. Raises as `put_object`."""
    return put_object(f"{root.rstrip('/')}/{name}", [payload])


def load_claim(claim: Claim) -> bytes:
    """Return the claimed bytes. Raises ClaimError if they are missing, truncated or changed, or the URI is invalid."""
    try:
        filesystem, path = fsspec.core.url_to_fs(claim.uri)
        payload: bytes = filesystem.cat_file(path, end=claim.n_bytes + 1)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ClaimError(f"the claimed bytes do not exist in the store: {claim.uri}") from error
    except ValueError as error:  # no file system supports this URI: a record may contain any text
        raise ClaimError(f"claimed bytes cannot be reached: {claim.uri!r}: {error}") from error
    if len(payload) != claim.n_bytes or digest(payload) != claim.digest:
        raise ClaimError(
            f"claimed bytes at {claim.uri} are not the ones stored: {len(payload)} of {claim.n_bytes} bytes"
        )
    return payload


def claimed_rollout(rollout: Rollout, codec: Codec) -> Rollout:
    """Return the rollout with its segments, which are read from the object store if it has a claim.

    Raises ClaimError if the bytes are missing or changed, DecodeError if they are not a record, ForeignClaimError if
    they are another record.
    """
    if rollout.claim is None:
        return rollout
    record = codec.decode(load_claim(rollout.claim))
    if not isinstance(record, Rollout) or record.rollout_id != rollout.rollout_id:
        raise ForeignClaimError(f"{rollout.claim.uri} does not contain rollout {rollout.rollout_id}")
    return record


def claimed_interaction(interaction: Interaction, codec: Codec) -> Interaction:
    """Return the interaction with its segments, read from the store if it has a claim. Raises as `claimed_rollout`."""
    if interaction.claim is None:
        return interaction
    record = codec.decode(load_claim(interaction.claim))
    if not isinstance(record, Interaction) or record.interaction_id != interaction.interaction_id:
        raise ForeignClaimError(f"{interaction.claim.uri} does not contain interaction {interaction.interaction_id}")
    return record


def digest(payload: bytes) -> str:
    """Return the xxh3-128 of the bytes, hexadecimal."""
    return str(xxhash.xxh3_128_hexdigest(payload))
