"""A list of tensors that is too long for a record is stored in an object. Reading gives the same list or an error."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import fastavro
import pytest
import xxhash

from tests.records import build
from tidemill.kernels.weights.tensor_table import (
    fit_record,
    load_tensor_table,
    store_tensor_table,
    with_tensors,
)
from tidemill.schemas.codec import Codec
from tidemill.schemas.records import Manifest, TensorInfo, TensorTable
from tidemill.schemas.stored_object import StoredObjectError, put_object


def tensors(n: int, seed: int = 0) -> list[TensorInfo]:
    """Return tensors with the names of a mixture of experts."""
    return [
        TensorInfo(
            f"model.layers.{i % 48}.mlp.experts.{i // 48}.down_proj.weight",
            "bfloat16",
            [2048, 768],
            xxhash.xxh3_128_hexdigest(f"{seed}/{i}".encode()),
        )
        for i in range(n)
    ]


def manifest(listed: list[TensorInfo]) -> Manifest:
    return build(Manifest, version=1, learning_rate=1e-6, n_elements=1, n_changed=1, delta_bytes=1, tensors=listed,
                 fingerprint="0" * 32)  # fmt: skip


def test_a_short_list_stays_in_its_record_and_a_long_one_does_not(tmp_path: Path):
    short, long = manifest(tensors(100)), manifest(tensors(12_000))
    assert fit_record(short, Codec(), str(tmp_path), 900_000) is short
    fitted = fit_record(long, Codec(), str(tmp_path), 900_000)
    assert fitted.tensors == [] and fitted.tensor_table is not None
    assert len(Codec().encode(fitted)) < 1000
    read = with_tensors(Codec().decode(Codec().encode(fitted)))
    assert read == long
    assert with_tensors(short) is short


def test_equal_lists_have_the_same_object_and_different_lists_have_different_objects(tmp_path: Path):
    first, again = (store_tensor_table(str(tmp_path), tensors(10)) for _ in range(2))
    other = store_tensor_table(str(tmp_path), tensors(10, seed=1))
    assert first == again
    assert other.uri != first.uri
    assert load_tensor_table(first) == tensors(10) and first.n_tensors == 10
    assert load_tensor_table(store_tensor_table(str(tmp_path), [])) == []


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"x" + data[1:]])
def test_a_damaged_table_is_refused(tmp_path: Path, damage):
    table = store_tensor_table(str(tmp_path), tensors(10))
    file = Path(table.uri.removeprefix("file://"))
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(StoredObjectError):
        load_tensor_table(table)


def other_records() -> bytes:
    schema = {"type": "record", "name": "Other", "fields": [{"name": "x", "type": "long"}]}
    buffer = io.BytesIO()
    fastavro.writer(buffer, schema, [{"x": 1}])
    return buffer.getvalue()


@pytest.mark.parametrize("payload", [b"", b"not avro", b"Obj\x01" + bytes(50), other_records()])
def test_undamaged_bytes_that_are_not_a_table_are_refused(tmp_path: Path, payload: bytes):
    stored = put_object(str(tmp_path / "table"), [payload])
    with pytest.raises(StoredObjectError, match="not a tensor table"):
        load_tensor_table(TensorTable(stored.uri, 1, stored.n_bytes, stored.digest))


def test_a_table_with_another_number_of_tensors_is_refused(tmp_path: Path):
    table = store_tensor_table(str(tmp_path), tensors(10))
    with pytest.raises(StoredObjectError, match="lists 10 tensors, its manifest says 11"):
        load_tensor_table(replace(table, n_tensors=11))
