"""The tensors of a version: in its manifest, or in an object beside the log where the list is too long for a record.

The object is an Avro container file of `TensorInfo` records, deflated, under a name that its digest is part of. Read
manifests through `with_tensors`, and where the list lies does not matter.
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
from tidemill.schemas.records import Manifest, TensorInfo, TensorTable
from tidemill.schemas.stored_object import StoredObject, StoredObjectError, put_object, read_object

CODEC = "deflate"


def fit_record(manifest: Manifest, codec: Codec, folder: str, limit_bytes: int) -> Manifest:
    """The manifest itself where its record has at most `limit_bytes`, else one with its tensors in a table in `folder`.

    Raises like `store_tensor_table`.
    """
    if not manifest.tensors or len(codec.encode(manifest)) <= limit_bytes:
        return manifest
    return replace(manifest, tensors=[], tensor_table=store_tensor_table(folder, manifest.tensors))


def with_tensors(manifest: Manifest) -> Manifest:
    """The manifest with its tensors listed in it, fetched where they lie in a table.

    Raises StoredObjectError when the table is gone or is not what the manifest names, StoreUnavailableError when the
    store fails.
    """
    if manifest.tensor_table is None:
        return manifest
    return replace(manifest, tensors=load_tensor_table(manifest.tensor_table), tensor_table=None)


def store_tensor_table(folder: str, tensors: Sequence[TensorInfo]) -> TensorTable:
    """Store a list of tensors below `folder`, an fsspec URL or a directory. Raises like `put_object`."""
    buffer = io.BytesIO()
    # A marker of its own choosing would make the same list other bytes each time.
    marker = xxhash.xxh3_128_digest("\n".join(tensor.fingerprint for tensor in tensors).encode())
    fastavro.writer(buffer, _schema(), map(asdict, tensors), codec=CODEC, sync_marker=marker)
    payload = buffer.getvalue()
    stored = put_object(f"{folder.rstrip('/')}/tensors-{xxhash.xxh3_128_hexdigest(payload)}.avro", [payload])
    return TensorTable(stored.uri, len(tensors), stored.n_bytes, stored.digest)


def load_tensor_table(table: TensorTable) -> list[TensorInfo]:
    """The tensors of a table, in their order. Raises like `with_tensors`."""
    payload = read_object(StoredObject(table.uri, table.n_bytes, table.digest))
    try:
        found = [TensorInfo(**fields) for fields in fastavro.reader(io.BytesIO(payload), _schema())]
    except Exception as error:  # fastavro raises errors of many types on other bytes; callers get one
        raise StoredObjectError(f"{table.uri} is no tensor table: {type(error).__name__}: {error}") from error
    if len(found) != table.n_tensors:
        raise StoredObjectError(f"{table.uri} lists {len(found)} tensors, its manifest says {table.n_tensors}")
    return found


@lru_cache(maxsize=1)
def _schema() -> Any:  # noqa: ANN401 - fastavro ships no types
    """The schema of a `TensorInfo`, as the manifest's own schema has it."""
    fields = {field["name"]: field["type"] for field in current_schema(Manifest)["fields"]}
    return fastavro.parse_schema(fields["tensors"]["items"])
