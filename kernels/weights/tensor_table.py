"""The tensors of a version: in its manifest, or in an object of the store if the list is too long for a record.

The object is an Avro container file of `TensorInfo` records, deflated; its name contains its digest. Read manifests
through `with_tensors`, which works for both.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import fastavro
import xxhash

from tidemill.schemas.codec import Codec, current_schema
from tidemill.schemas.records import Claim, Manifest, TensorInfo, TensorTable
from tidemill.schemas.stored_object import StoredObjectError, put_object, read_object

CODEC = "deflate"


def fit_record(manifest: Manifest, codec: Codec, folder: str, limit_bytes: int) -> Manifest:
    """Return the manifest if its record has at most `limit_bytes`, else one with its tensors in a table in `folder`.

    Raises the errors of `store_tensor_table`.
    """
    if not manifest.tensors or len(codec.encode(manifest)) <= limit_bytes:
        return manifest
    return replace(manifest, tensors=[], tensor_table=store_tensor_table(folder, manifest.tensors))


def with_tensors(manifest: Manifest) -> Manifest:
    """Return the manifest with its list of tensors, fetched if they are in a table.

    Raises StoredObjectError if the table is missing or does not match the manifest, StoreUnavailableError if the
    store fails.
    """
    if manifest.tensor_table is None:
        return manifest
    return replace(manifest, tensors=load_tensor_table(manifest.tensor_table), tensor_table=None)


def store_tensor_table(folder: str, tensors: Sequence[TensorInfo]) -> TensorTable:
    """Store a list of tensors below `folder`, an fsspec URL or a directory. Raises the errors of `put_object`."""
    buffer = io.BytesIO()
    # fastavro's random marker would give other bytes for the same list each time.
    marker = xxhash.xxh3_128_digest("\n".join(tensor.fingerprint for tensor in tensors).encode())
    fastavro.writer(buffer, _schema(), map(asdict, tensors), codec=CODEC, sync_marker=marker)
    payload = buffer.getvalue()
    stored = put_object(f"{folder.rstrip('/')}/tensors-{xxhash.xxh3_128_hexdigest(payload)}.avro", [payload])
    return TensorTable(stored.uri, len(tensors), stored.n_bytes, stored.digest)


def load_tensor_table(table: TensorTable) -> list[TensorInfo]:
    """Return the tensors of a table, in their order. Raises the errors of `with_tensors`."""
    payload = read_object(Claim(table.uri, table.n_bytes, table.digest))
    try:
        found = [TensorInfo(**fields) for fields in fastavro.reader(io.BytesIO(payload), _schema())]
    except Exception as error:  # fastavro raises errors of many types on invalid bytes; callers get one
        raise StoredObjectError(f"{table.uri} is not a tensor table: {type(error).__name__}: {error}") from error
    if len(found) != table.n_tensors:
        raise StoredObjectError(f"{table.uri} lists {len(found)} tensors, its manifest says {table.n_tensors}")
    return found


@lru_cache(maxsize=1)
def _schema() -> Any:  # noqa: ANN401 - fastavro ships no types
    """Return the schema of a `TensorInfo`, as it is in the manifest's schema."""
    fields = {field["name"]: field["type"] for field in current_schema(Manifest)["fields"]}
    return fastavro.parse_schema(fields["tensors"]["items"])
