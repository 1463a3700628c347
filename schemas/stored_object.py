"""Objects beside the log: bytes too large for records, in any store that fsspec reaches, checked as they are read.

A claim check is a record's pointer to such bytes.

Keeps true: an object is stored in full before a record names it; what is read has the size and the digest that the
record names, or there is an error; a reader never takes more than the named size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import fsspec
import xxhash

from tidemill.schemas.codec import Codec
from tidemill.schemas.records import Claim, Interaction, Rollout

PIECE_BYTES = 4 << 20
"""Bytes read from a store at a time."""


class StoredObjectError(ValueError):
    """An object is gone, or is not what was stored, or cannot be named: trying again cannot help."""


class StoreUnavailableError(ConnectionError):
    """The store did not do what was asked; it may later."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Where an object lies, and how to check it."""

    uri: str
    n_bytes: int
    digest: str
    """xxh3-128 of the bytes, hexadecimal."""


def put_object(uri: str, pieces: Iterable[bytes | memoryview]) -> StoredObject:
    """Write `pieces`, one after the other, as the object at `uri` (an fsspec URL or a path), replacing what is there.

    Give an object a name that only these bytes have (its digest, for instance): a reader of an older record then never
    finds other bytes under it. The returned URI is absolute.

    Raises StoredObjectError for a URL that no file system serves, StoreUnavailableError when the store fails.
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
    return StoredObject(filesystem.unstrip_protocol(path), n_bytes, state.hexdigest())


def object_pieces(stored: StoredObject, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """The bytes of an object in order, at most `piece_bytes` at a time. Only when the iterator ends are they checked.

    Raises StoredObjectError when the object is gone, cut short, too long or changed, StoreUnavailableError when the
    store fails.
    """
    state, n_bytes = xxhash.xxh3_128(), 0
    for piece in _read(stored, piece_bytes):
        state.update(piece)
        n_bytes += len(piece)
        yield piece
    if n_bytes != stored.n_bytes:
        raise StoredObjectError(f"{stored.uri} has {n_bytes} of {stored.n_bytes} bytes: it was cut short")
    if state.hexdigest() != stored.digest:
        raise StoredObjectError(
            f"{stored.uri} was changed after it was stored: its {n_bytes} bytes have another digest"
        )


def read_object(stored: StoredObject) -> bytes:
    """The whole object, checked. Raises like `object_pieces`."""
    return b"".join(object_pieces(stored))


def _read(stored: StoredObject, piece_bytes: int) -> Iterator[bytes]:
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
        raise StoredObjectError(f"{uri} is gone: there is no such object") from error
    except OSError as error:
        raise StoreUnavailableError(f"{uri}: the store failed: {error}") from error
    except (ValueError, ImportError) as error:
        raise StoredObjectError(f"{uri!r} cannot be reached: {error}") from error


class ClaimError(ValueError):
    """Claimed bytes are missing or are not the ones that were stored."""


class ForeignClaimError(ValueError):
    """Claimed bytes are whole, and are not the record that claims them."""


def store_claim(root: str, name: str, payload: bytes) -> Claim:
    """Write `payload` below `root` (an fsspec URL or directory); its claim check. Raises as `put_object`."""
    stored = put_object(f"{root.rstrip('/')}/{name}", [payload])
    return Claim(stored.uri, stored.n_bytes, stored.digest)


def load_claim(claim: Claim) -> bytes:
    """The claimed bytes. Raises ClaimError when they are missing, cut short or changed, or their URI is none."""
    try:
        filesystem, path = fsspec.core.url_to_fs(claim.uri)
        payload: bytes = filesystem.cat_file(path)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ClaimError(f"claimed bytes are gone: {claim.uri}") from error
    except ValueError as error:  # no file system serves such a URI: a record may hold any
        raise ClaimError(f"claimed bytes cannot be reached: {claim.uri!r}: {error}") from error
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
