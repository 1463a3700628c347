"""A schema may change, but never so that what was written before can no longer be read."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import typing
from typing import Any

import fastavro
import pytest

from tidemill.schemas.codec import (
    RECORD_TYPES,
    DecodeError,
    current_schema,
    read_body,
    recorded_history,
)

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


@pytest.mark.parametrize("cls", TYPES, ids=lambda cls: cls.__name__)
def test_every_recorded_schema_is_readable(cls: type):
    history = recorded_history(cls)
    assert history, f"{cls.__name__} has no recorded history: copy its schema to avro/history"
    for past in history:
        assert isinstance(read_body(written(past), past), cls)


@pytest.mark.parametrize("cls", TYPES, ids=lambda cls: cls.__name__)
def test_the_current_schema_is_recorded(cls: type):
    assert current_schema(cls) in recorded_history(cls), "record a changed schema as the next file of its history"


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
        read_body(written(without), without)
    other_type = copy.deepcopy(past)
    other_type["fields"][1]["type"] = "string"
    with pytest.raises(DecodeError):
        read_body(written(other_type), other_type)
