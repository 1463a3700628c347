"""Records survive the round trip in both framings, and bad bytes raise only DecodeError."""

from __future__ import annotations

import io
import json
import math
import socket
import tracemalloc
import typing
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import fastavro
import msgspec
import numpy as np
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, SchemaRegistryError
from fastavro.schema import fingerprint, to_parsing_canonical_form
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.generated import LONG, damaged, records_of
from tests.records import neutral
from tests.schemas.test_compatibility import read, written
from tidemill.schemas import avro_code
from tidemill.schemas.codec import RECORD_TYPES, Codec, DecodeError, RegistryError, current_schema
from tidemill.schemas.records import Document, Record, Task, Tick, VersionSpan

RECORDS = st.one_of(*(records_of(cls) for cls in RECORD_TYPES.values()))


@settings(max_examples=50)
@given(record=RECORDS)
def test_round_trip(record: Record):
    for codec in (codec_of(None), codec_of("mock://codec")):
        assert codec.decode(codec.encode(record)) == record


@cache
def codec_of(url: str | None) -> Codec:
    # A registry's client reads the certificates of the machine: once is enough.
    return Codec(url)


def body_of(record: Record) -> bytes:
    """Return the record's body as fastavro writes it."""
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, plain_schema(type(record)), msgspec.to_builtins(record, builtin_types=(bytes,)))
    return buffer.getvalue()


@cache
def plain_schema(record_type: type) -> Any:
    text = json.dumps(current_schema(record_type)).replace('"timestamp-micros"', '"none"')
    return fastavro.parse_schema(json.loads(text), named_schemas={})


@pytest.mark.parametrize("record_type", RECORD_TYPES.values(), ids=RECORD_TYPES)
def test_writers_and_readers_are_fastavro_s(record_type: type):
    write, read = (
        avro_code.writer(current_schema(record_type)),
        avro_code.reader(current_schema(record_type), record_type),
    )

    @settings(max_examples=25)
    @given(record=records_of(record_type), data=st.data())
    def check(record: Record, data: st.DataObject):
        body = body_of(record)
        assert write(record, b"begin") == b"begin" + body and read(b"begin" + body, 5) == record
        wrong = damaged(data, body)
        try:
            found = read(wrong, 0)
        except Exception:  # noqa: BLE001 - a reader may refuse anything: fastavro has the last word
            return
        buffer = io.BytesIO(wrong)
        fields = fastavro.schemaless_reader(buffer, plain_schema(record_type), None)
        assert not buffer.read() and repr(msgspec.convert(fields, record_type)) == repr(found)

    check()


@settings(max_examples=200)
@given(value=LONG | st.integers(-70, 70) | st.sampled_from([2**k + d for k in range(64) for d in (-1, 0)]))
def test_longs_are_fastavro_s(value: int):
    assume(value < 2**63)
    assert Codec().encode(Tick("", value))[10:] == body_of(Tick("", value))


def test_framings_are_the_standard_ones():
    tick = Tick("worker", 5)
    single = Codec().encode(tick)
    mark = fingerprint(to_parsing_canonical_form(current_schema(Tick)), "CRC-64-AVRO")
    assert single[:2] == b"\xc3\x01" and single[2:10] == bytes.fromhex(mark)
    confluent = codec_of("mock://codec").encode(tick)
    assert confluent[:1] == b"\x00" and confluent[5:] == single[10:]


def test_a_reader_with_a_registry_reads_single_objects_too():
    tick = Tick("worker", 5)
    assert codec_of("mock://codec").decode(Codec().encode(tick)) == tick


def test_the_reason_says_that_a_value_is_cut_off():
    whole = Codec().encode(Tick("worker", 2**40))
    for cut in range(10, len(whole)):
        with pytest.raises(DecodeError, match=r"^Tick: the value ends before the record does$"):
            Codec().decode(whole[:cut])


@settings(max_examples=300)
@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes):
    with pytest.raises(DecodeError):
        Codec().decode(data)


@settings(max_examples=300)
@given(record=RECORDS, data=st.data())
def test_damaged_bytes_are_refused_or_read_as_some_record(record: Record, data: st.DataObject):
    whole = Codec().encode(record)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(DecodeError):
        Codec().decode(whole[:cut])
    with pytest.raises(DecodeError):
        Codec().decode(whole + b"\x00")
    flipped = bytearray(whole)
    flipped[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        Codec().decode(bytes(flipped))
    except DecodeError:
        return


@pytest.mark.parametrize("value", [None, b"", b"\xc3", b"\xc3\x01", b"\xc3\x01" + bytes(8), b"\x00\x00\x00\x00\x07x"])
def test_what_has_no_schema_is_refused(value: bytes | None):
    with pytest.raises(DecodeError):
        Codec().decode(value)


def test_a_registry_id_of_a_foreign_schema_is_refused():
    codec = Codec("mock://foreign")
    other = Schema('{"type":"record","name":"Other","fields":[]}', "AVRO")
    foreign = codec._registry._client.register_schema("s", other)
    with pytest.raises(DecodeError, match="is no schema of Tidemill"):
        codec.decode(b"\x00" + foreign.to_bytes(4, "big"))


def test_an_unknown_registry_id_is_refused():
    with pytest.raises(DecodeError, match="no schema with id 7"):
        codec_of("mock://unknown").decode(b"\x00" + (7).to_bytes(4, "big"))


def test_a_registry_that_does_not_answer_refuses_no_record(monkeypatch: pytest.MonkeyPatch):
    # Otherwise every record that is read during an outage would become a dead letter.
    def no_answer(*_given: object) -> None:
        raise SchemaRegistryError(503, 50003, "the leader does not answer")

    value = codec_of("mock://codec").encode(Tick("w", 5))
    codec = Codec("mock://outage")
    for name in ("get_schema", "register_schema"):
        monkeypatch.setattr(type(SchemaRegistryClient.new_client({"url": "mock://outage"})), name, no_answer)
    with pytest.raises(RegistryError, match=r"failed: .*does not answer.* Check that it runs"):
        codec.decode(value)
    with pytest.raises(RegistryError):
        codec.encode(Tick("w", 5))


def test_a_registry_that_accepts_a_request_and_never_answers_has_failed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tidemill.schemas.codec.REGISTRY_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        codec = Codec(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(RegistryError, match="timed out"):
            codec.encode(Tick("w", 5))


@pytest.mark.parametrize(
    "misfit",
    [
        Document(document_id=3, source="s", text="t"),  # type: ignore[arg-type]
        Document(document_id=None, source="s", text="t"),  # type: ignore[arg-type]
        Document(document_id="\ud800", source="s", text="t"),
        Tick("w", 2**63),
        Tick("w", 1.0),  # type: ignore[arg-type]
        Tick("w", None),  # type: ignore[arg-type]
    ],
)
def test_a_misfit_is_refused_before_it_is_written(misfit: Record):
    with pytest.raises(ValueError, match=f"{type(misfit).__name__} does not fit its schema"):
        Codec().encode(misfit)


STRANGE = [
    *(None, False, True, 0, 7, 2**63, -(2**64), 0.5, math.nan, math.inf, "", "x", "\ud800", object(), Tick("", 0)),
    *(b"", b"xy", bytearray(b"xy"), memoryview(b"wxyz").cast("I"), np.arange(3), np.bool_(True), np.int64(7)),
    *([], [0.5], ["x"], [b"x"], [None], (), {}, {"x": 0.5}, {"x": "x"}, {1: 7}),
]
"""Values of which most fit no field."""


@pytest.mark.parametrize("record_type", RECORD_TYPES.values(), ids=RECORD_TYPES)
def test_what_was_written_is_read_or_was_refused(record_type: type):
    hints = typing.get_type_hints(record_type)
    plain = record_type(**{name: neutral(name, hint) for name, hint in hints.items()})
    for name in hints:
        for value in STRANGE:
            try:
                whole = Codec().encode(replace(plain, **{name: value}))
            except ValueError:
                continue
            found = getattr(Codec().decode(whole), name)
            assert found == value or repr(found) == repr(value) or (found, value) == ([], ()), name


@pytest.mark.parametrize("record_type", RECORD_TYPES.values(), ids=RECORD_TYPES)
def test_a_size_of_what_is_not_there_takes_no_memory(record_type: type):
    codec, body = Codec(), written(current_schema(record_type))
    whole = codec.encode(read(body, current_schema(record_type)))
    tracemalloc.start()
    for place in range(len(whole) - len(body), len(whole)):
        for size in (2**62, -(2**40)):
            with suppress(DecodeError):
                codec.decode(whole[:place] + avro_code.write_long(size) + whole[place + 1 :])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("other", [None, VersionSpan(1, 0, 1), type("Tock", (Tick,), {})("w", 1)])
def test_what_is_no_record_of_the_log_is_refused(other: Any):
    with pytest.raises(ValueError, match="is not a record of the log"):
        Codec().encode(other)


def test_times_stay_integers():
    assert fastavro.parse_schema(current_schema(Task))  # the logical type is one that Avro defines
    assert Codec().decode(Codec().encode(Tick("w", 1_700_000_000_000_000))) == Tick("w", 1_700_000_000_000_000)
