"""A schema may change only if older records can still be read."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import json
import typing
from importlib.resources import files
from pathlib import Path
from typing import Any

import fastavro
import pytest
from confluent_kafka.schema_registry import Schema

from tidemill.schemas.codec import (
    RECORD_TYPES,
    Codec,
    DecodeError,
    confluent_frame,
    current_schema,
    recorded_schemas,
    schema_file_name,
)
from tidemill.schemas.records import Record

TYPES = sorted(RECORD_TYPES.values(), key=lambda cls: cls.__name__)


def example(node: Any, named: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return example(node[-1], named)
    if isinstance(node, str):
        known = {"string": "x", "long": 7, "double": 0.5, "boolean": True, "bytes": b"ab"}
        return known[node] if node in known else example(named[node.removeprefix("tidemill.")], named)
    kind = node["type"]
    if kind in ("record", "enum"):
        named[node["name"]] = node
    if kind == "record":
        return {field["name"]: example(field["type"], named) for field in node["fields"]}
    if kind == "enum":
        return node["symbols"][0]
    if kind == "array":
        return [example(node["items"], named)]
    if kind == "map":
        return {"k": example(node["values"], named)}
    return example(kind, named)


def written(schema: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    plain = json.loads(json.dumps(schema).replace('"timestamp-micros"', '"none"'))
    fastavro.schemaless_writer(buffer, fastavro.parse_schema(plain, named_schemas={}), example(schema, {}))
    return buffer.getvalue()


def read(body: bytes, writer: dict[str, Any]) -> Record:
    """Decode an Avro body that was written with any schema, as from a registry."""
    codec = Codec("mock://compatibility")
    client = codec._registry._client
    schema_id = client.register_schema(f"tidemill.{writer['name']}", Schema(json.dumps(writer), "AVRO"))
    return codec.decode(confluent_frame(schema_id) + body)


def digest(schema: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()[:16]


def recorded_digests() -> dict[str, str]:
    lines = (Path(__file__).parent / "recorded_schemas.txt").read_text("utf-8").splitlines()
    return dict(line.split() for line in lines)


@pytest.mark.parametrize("cls", TYPES, ids=lambda cls: cls.__name__)
def test_every_recorded_schema_is_readable(cls: type):
    for past in recorded_schemas(cls):
        assert isinstance(read(written(past), past), cls)


def test_a_recorded_schema_never_changes():
    found = {
        f"{schema_file_name(cls)}/{number:04}": digest(schema)
        for cls in TYPES
        for number, schema in enumerate(recorded_schemas(cls), 1)
    }
    assert found == recorded_digests(), (
        "leave a recorded schema as it is, since records in the log were written with it: put a changed one into the "
        "next file of its folder, and its digest into tests/schemas/recorded_schemas.txt"
    )
    changed = copy.deepcopy(current_schema(RECORD_TYPES["Tick"]))
    changed["fields"][0]["doc"] = "other words"
    assert digest(changed) not in recorded_digests().values()


def test_schema_files_are_numbered_without_a_gap():
    avro = Path(str(files("tidemill.schemas"))) / "avro"
    found = {str(path.relative_to(avro)) for path in avro.rglob("*") if path.is_file()}
    assert found == {f"{name}.avsc" for name in recorded_digests()}


@pytest.mark.parametrize("cls", TYPES, ids=lambda cls: cls.__name__)
def test_schema_and_record_name_the_same_fields(cls: type):
    names = [field["name"] for field in current_schema(cls)["fields"]]
    assert names == [field.name for field in dataclasses.fields(cls)]


@pytest.mark.parametrize("cls", TYPES, ids=lambda cls: cls.__name__)
def test_enumerations_have_a_default_for_readers_of_newer_symbols(cls: type):
    def enums(node: Any) -> typing.Iterator[dict[str, Any]]:
        children = node if isinstance(node, list) else node.values() if isinstance(node, dict) else []
        if isinstance(node, dict) and node.get("type") == "enum":
            yield node
        for child in children:
            yield from enums(child)

    assert all(enum["default"] in enum["symbols"] for enum in enums(current_schema(cls)))


def test_an_incompatible_change_would_be_noticed():
    past = current_schema(RECORD_TYPES["Tick"])
    without = copy.deepcopy(past)
    without["fields"] = [field for field in past["fields"] if field["name"] != "at"]
    with pytest.raises(DecodeError):
        read(written(without), without)
    other_type = copy.deepcopy(past)
    other_type["fields"][1]["type"] = "string"
    with pytest.raises(DecodeError):
        read(written(other_type), other_type)
