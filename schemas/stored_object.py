"""Objects in the object store: payloads too large for records, in any store that fsspec supports, checked when read.

A claim check is a record's reference to such a payload.

Invariants: an object is stored completely before a record refers to it; a payload that is read has the size and the
digest in the record, or an error is raised; a reader never accepts more bytes than that size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar
from uuid import uuid4

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from tidemill.schemas.codec import Codec
from tidemill.schemas.records import Claim, Interaction, Rollout

Claimed = TypeVar("Claimed", Rollout, Interaction)
PIECE_BYTES = 4 << 20
"""Number of bytes read from a store at a time."""
PARTIAL = ".partial"
"""End of the name of an unfinished object in a directory."""


class StoredObjectError(ValueError):
    """An object is missing, was changed, or has an invalid URL: a retry cannot help."""


class StoreUnavailableError(ConnectionError):
    """The store failed, or its driver is not installed here: the object may be there, and a retry may succeed."""


def put_object(uri: str, pieces: Iterable[bytes | memoryview]) -> Claim:
    """Write `pieces` in order as the object at `uri` (an fsspec URL or a path); an existing object is replaced at the
    end, so that its readers find it whole until then, also if the process is killed.

    Use a name that is unique to these bytes (for instance their digest): a reader of an older record then never finds
    other bytes under that name. The returned URI is absolute.

    Raises StoredObjectError for a URL that no file system supports, StoreUnavailableError if the store fails.
    """
    with _store_errors(uri):
        filesystem, path = fsspec.core.url_to_fs(uri)
        filesystem.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        # An object store replaces an object when it is closed, a directory when it is opened.
        written = f"{path}.{uuid4().hex}{PARTIAL}" if isinstance(filesystem, LocalFileSystem) else path
        opened = filesystem.open(written, "wb")
    state, n_bytes = xxhash.xxh3_128(), 0
    try:
        for piece in pieces:
            with _store_errors(uri):
                opened.write(piece)
            state.update(piece)
            n_bytes += len(piece)
        with _store_errors(uri):
            opened.close()
            if written != path:
                filesystem.mv(written, path)
    except BaseException:
        with suppress(OSError):
            if isinstance(opened, AbstractBufferedFile):
                # Closing it would complete the upload, with a part of the object.
                opened.closed = True
                opened.discard()
            else:
                opened.close()
        if written != path:
            with suppress(OSError):
                filesystem.rm_file(written)
        raise
    return Claim(filesystem.unstrip_protocol(path), n_bytes, state.hexdigest())


def object_pieces(stored: Claim, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """Yield the bytes of an object in order, at most `piece_bytes` at a time. They are checked only at the end.

    Raises StoredObjectError if the object is missing, truncated, too long or changed, StoreUnavailableError if the
    store fails.
    """
    state, n_bytes = xxhash.xxh3_128(), 0
    with _store_errors(stored.uri):
        filesystem, path = fsspec.core.url_to_fs(stored.uri)
        opened = filesystem.open(path, "rb")
    with opened:
        while True:
            with _store_errors(stored.uri):
                piece: bytes = opened.read(min(piece_bytes, stored.n_bytes - n_bytes + 1))
            if not piece:
                break
            n_bytes += len(piece)
            if n_bytes > stored.n_bytes:
                break
            state.update(piece)
            yield piece
    _check(stored, n_bytes, state.hexdigest())


def read_object(stored: Claim) -> bytes:
    """Return the whole object, checked. Raises as `object_pieces`."""
    with _store_errors(stored.uri):
        filesystem, path = fsspec.core.url_to_fs(stored.uri)
        payload: bytes = filesystem.cat_file(path, end=stored.n_bytes + 1)
    _check(stored, len(payload), digest(payload))
    return payload


def _check(stored: Claim, n_bytes: int, found_digest: str) -> None:
    if n_bytes > stored.n_bytes:
        raise StoredObjectError(f"{stored.uri} has more than the {stored.n_bytes} bytes that were stored")
    if n_bytes < stored.n_bytes:
        raise StoredObjectError(f"{stored.uri} has {n_bytes} of {stored.n_bytes} bytes: it was truncated")
    if found_digest != stored.digest:
        raise StoredObjectError(
            f"{stored.uri} was changed after it was stored: its {n_bytes} bytes have another digest"
        )


@contextmanager
def _store_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, IsADirectoryError) as error:
        raise StoredObjectError(f"{uri} does not exist in the store") from error
    except (OSError, ImportError) as error:
        raise StoreUnavailableError(f"{uri}: the store failed: {error}") from error
    except ValueError as error:
        raise StoredObjectError(f"{uri!r} cannot be reached: {error}") from error


class ForeignClaimError(ValueError):
    """Claimed bytes are complete, but contain another record than the one that refers to them."""


def store_claim(root: str, name: str, payload: bytes) -> Claim:
    """Write `payload` below `root` (an fsspec URL or directory), and return its claim check. Raises as `put_object`."""
    return put_object(f"{root.rstrip('/')}/{name}", [payload])


def claimed(record: Claimed, codec: Codec) -> Claimed:
    """Return a rollout or an interaction with its segments, which are read from the object store if it has a claim.

    Raises as `read_object`, DecodeError if the bytes are not a record, ForeignClaimError if they are another record.
    """
    if record.claim is None:
        return record
    whole, kind = codec.decode(read_object(record.claim)), type(record)
    name = "rollout_id" if kind is Rollout else "interaction_id"
    if not isinstance(whole, kind) or getattr(whole, name) != getattr(record, name):
        raise ForeignClaimError(f"{record.claim.uri} does not contain {kind.__name__.lower()} {getattr(record, name)}")
    return whole


def digest(payload: bytes) -> str:
    """Return the xxh3-128 of the bytes, hexadecimal."""
    return str(xxhash.xxh3_128_hexdigest(payload))
