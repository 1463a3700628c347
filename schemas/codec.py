"""Encoding of records: Avro single-object encoding, or the Confluent wire format if a registry is configured.

Invariants: each value contains the id of its writer's schema (CRC-64-AVRO fingerprint or registry id), so that a reader
never guesses; every recorded schema is readable; bytes that cannot be decoded raise only `DecodeError`.
"""

from __future__ import annotations

import io
import json
import logging
import re
from functools import cached_property, lru_cache
from http import HTTPStatus
from importlib.resources import files
from typing import Any, get_args

import fastavro
import msgspec
from fastavro.schema import fingerprint, to_parsing_canonical_form

from tidemill.schemas.avro_code import Read, Write, reader, writer
from tidemill.schemas.records import Record

SINGLE_OBJECT_MAGIC = b"\xc3\x01"
LOG = logging.getLogger(__name__)
CONFLUENT_MAGIC = b"\x00"
CONFLUENT_FRAME_BYTES = 5
REGISTRY_TIMEOUT_S = 5.0
"""Longest wait for one answer of a schema registry. Its client tries four times; its own default has no limit."""
RECORD_TYPES: dict[str, type[Record]] = {cls.__name__: cls for cls in get_args(Record)}


class DecodeError(ValueError):
    """A value that cannot be decoded; the message has the reason."""


class RegistryError(ConnectionError):
    """The schema registry does not answer, or refuses a request: whether a value can be decoded is not known."""


class _Schema:
    """A parsed schema, its fingerprint, and the record type it belongs to."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.record_type = RECORD_TYPES[document["name"]]
        self.fingerprint = bytes.fromhex(fingerprint(to_parsing_canonical_form(document), "CRC-64-AVRO"))
        self.mark = SINGLE_OBJECT_MAGIC + self.fingerprint
        """First ten bytes of a value in single-object encoding."""
        self.parsed = fastavro.parse_schema(_without_logical_types(document), named_schemas={})

    @cached_property
    def write(self) -> Write:
        """The writer of the record type; the schema must have the fields of the type."""
        return writer(self.document)

    @cached_property
    def read(self) -> Read:
        """The reader of the record type; the schema must have the fields of the type."""
        return reader(self.document, self.record_type)


def _without_logical_types(node: Any) -> Any:  # noqa: ANN401 - a JSON tree
    """Remove logical types, so that times stay integers: fastavro converts `timestamp-micros` to datetimes."""
    if isinstance(node, dict):
        return {k: _without_logical_types(v) for k, v in node.items() if k != "logicalType"}
    if isinstance(node, list):
        return [_without_logical_types(item) for item in node]
    return node


def schema_file_name(record_type: type) -> str:
    """Return the name of the schema's directory: `TrainStep` -> `train_step`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", record_type.__name__).lower()


@lru_cache(maxsize=1)
def _recorded() -> dict[type, tuple[_Schema, ...]]:
    """Return all schemas of each record type, oldest first: `avro/<record>/000n.avsc`."""
    avro = files("tidemill.schemas") / "avro"
    entries = {
        cls: sorted((avro / schema_file_name(cls)).iterdir(), key=lambda entry: entry.name)
        for cls in RECORD_TYPES.values()
    }
    return {cls: tuple(_Schema(json.loads(entry.read_text("utf-8"))) for entry in entries[cls]) for cls in entries}


def recorded_schemas(record_type: type) -> list[dict[str, Any]]:
    """Return all schemas with which records of this type were ever written, oldest first, as JSON."""
    return [schema.document for schema in _recorded()[record_type]]


def current_schema(record_type: type) -> dict[str, Any]:
    """Return the newest schema of this type, with which its records are written, as JSON."""
    return recorded_schemas(record_type)[-1]


@lru_cache(maxsize=1)
def _by_mark() -> dict[bytes, _Schema]:
    """Return all recorded schemas, by the first ten bytes of a value in single-object encoding."""
    every = (schema for schemas in _recorded().values() for schema in schemas)
    return {schema.mark: schema for schema in every}


@lru_cache(maxsize=1)
def _current() -> dict[type, _Schema]:
    """Return the schema with which each record type is written."""
    return {record_type: schemas[-1] for record_type, schemas in _recorded().items()}


def _read(data: bytes, begin: int, wrote: _Schema) -> Record:
    """Return the record whose body starts at `begin` of `data`, in the current record type. Raises DecodeError."""
    current = _current()[wrote.record_type]
    if wrote.fingerprint == current.fingerprint:
        try:
            record: Record = current.read(data, begin)
        except Exception:  # noqa: BLE001 - of any type, for all that fastavro alone can read, or can say what is wrong
            LOG.debug("%s: not as Tidemill writes it", wrote.record_type.__name__)
        else:
            return record
    buffer = io.BytesIO(data)
    buffer.seek(begin)
    try:
        fields = fastavro.schemaless_reader(buffer, wrote.parsed, current.parsed)
        if buffer.read(1):
            raise DecodeError(f"{wrote.record_type.__name__}: bytes left over after the record")
        return msgspec.convert(fields, wrote.record_type)
    except DecodeError:
        raise
    except Exception as error:  # fastavro raises errors of many types on hostile bytes; callers get one
        is_cut_off = isinstance(error, EOFError | IndexError) and not buffer.read(1)
        reason = "the value ends before the record does" if is_cut_off else f"{type(error).__name__}: {error}"
        raise DecodeError(f"{wrote.record_type.__name__}: {reason}") from error


def confluent_frame(schema_id: int) -> bytes:
    """Return the first bytes of a value in the Confluent wire format, which name its schema."""
    return CONFLUENT_MAGIC + schema_id.to_bytes(4, "big")


class Codec:
    """An encoder of records in one framing, and a decoder of both.

    Without `registry_url`, values use Avro single-object encoding and need no server. With it, they use the Confluent
    wire format, and each record type's schema is registered under `tidemill.<record type>` on first use.
    """

    def __init__(self, registry_url: str | None = None) -> None:
        self._registry = _Registry(registry_url) if registry_url else None

    def encode(self, record: Record) -> bytes:
        """Return the framed bytes of a record. Raises ValueError if a field does not fit its schema, RegistryError."""
        schema = _current().get(type(record))
        if schema is None:
            raise ValueError(f"{type(record).__name__} is not a record of the log")
        begin = schema.mark if self._registry is None else confluent_frame(self._registry.id_of(type(record)))
        try:
            return schema.write(record, begin)
        except Exception as error:  # a writer raises many types for a misfit value; callers get one
            raise ValueError(f"{type(record).__name__} does not fit its schema: {error}") from error

    def decode(self, data: bytes | None) -> Record:
        """Return the record of framed bytes, in either framing. Raises DecodeError, RegistryError."""
        if data is None:
            raise DecodeError("the record has no value (a tombstone)")
        schema = _by_mark().get(data[:10])
        if schema is not None:
            return _read(data, 10, schema)
        if data.startswith(SINGLE_OBJECT_MAGIC):
            raise DecodeError(f"no schema with fingerprint {data[2:10].hex()} among the recorded schemas")
        schema = self._registered(data)
        if schema is not None:
            return _read(data, CONFLUENT_FRAME_BYTES, schema)
        raise DecodeError(f"unknown framing: the value begins with {data[:4].hex() or 'nothing'}")

    def registered_schema(self, data: bytes) -> dict[str, Any] | None:
        """Return the schema, as JSON, that a value names by its id in the registry; None if it is framed otherwise or
        there is no registry. Raises DecodeError if it is not a schema of Tidemill, RegistryError."""
        schema = self._registered(data)
        return None if schema is None else schema.document

    def _registered(self, data: bytes) -> _Schema | None:
        if self._registry is None or not data.startswith(CONFLUENT_MAGIC) or len(data) < CONFLUENT_FRAME_BYTES:
            return None
        return self._registry.schema_of(int.from_bytes(data[1:CONFLUENT_FRAME_BYTES], "big"))


class _Registry:
    """A cache of the schema ids of a Confluent-compatible schema registry."""

    def __init__(self, url: str) -> None:
        from confluent_kafka.schema_registry import SchemaRegistryClient

        settings = {"url": url, "timeout": REGISTRY_TIMEOUT_S}
        self._client = (
            SchemaRegistryClient.new_client(settings) if url.startswith("mock://") else SchemaRegistryClient(settings)
        )
        self._ids: dict[type, int] = {}
        self._schemas: dict[int, _Schema] = {}

    def id_of(self, record_type: type) -> int:
        """Return the id of a type's current schema; registers the schema on first use. Raises RegistryError."""
        if record_type not in self._ids:
            from confluent_kafka.schema_registry import Schema

            schema = Schema(json.dumps(current_schema(record_type)), "AVRO")
            try:
                self._ids[record_type] = self._client.register_schema(f"tidemill.{record_type.__name__}", schema)
            except Exception as error:  # of the client's HTTP library, or its own
                raise _registry_error(error) from error
            self._schemas[self._ids[record_type]] = _current()[record_type]  # its own values need no further request
        return self._ids[record_type]

    def schema_of(self, schema_id: int) -> _Schema:
        """Return the writer's schema of an id. Raises DecodeError if it is not a schema of Tidemill, RegistryError."""
        if schema_id not in self._schemas:
            try:
                text = self._client.get_schema(schema_id).schema_str
            except Exception as error:  # of the client's HTTP library, or its own
                if getattr(error, "http_status_code", None) != HTTPStatus.NOT_FOUND:
                    raise _registry_error(error) from error
                raise DecodeError(f"the schema registry has no schema with id {schema_id}") from error
            try:
                self._schemas[schema_id] = _Schema(json.loads(text or "null"))
            except Exception as error:  # bad JSON and a foreign schema raise errors of many types; callers get one
                raise DecodeError(f"schema id {schema_id} of the registry is no schema of Tidemill: {error}") from error
        return self._schemas[schema_id]


def _registry_error(error: Exception) -> RegistryError:
    """Return the error for a request to the registry that failed."""
    return RegistryError(f"the schema registry failed: {error}. Check that it runs, and `kafka.registry_url`")
