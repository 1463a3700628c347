"""The bytes of every state: what was written stays readable, and bytes that are none raise one error."""

from __future__ import annotations

from contextlib import suppress

import pytest
from fastavro.schema import fingerprint, to_parsing_canonical_form
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generated import damaged, records_of
from tidemill.streams.assembly import group_state
from tidemill.streams.join import join_state
from tidemill.streams.online import batch_state
from tidemill.streams.runner.journal import JournalHead, JournalPart
from tidemill.streams.state import StateBytes, StateError, _schema_of

SCHEMAS: dict[type, str] = {
    JournalHead: "57919a8f6708d2c1",
    JournalPart: "829895cb81b4e1d5",
    group_state._OpenBytes: "6116b70a7831ec8f",
    group_state._DoneBytes: "2d9a931fa772e8ff",
    group_state.AssemblyHead: "215dc3121113d29d",
    join_state.Case: "e3adc38702e592e9",
    join_state.Early: "a21488f7a90ad6ec",
    join_state.Wishes: "78cd92148216b42f",
    join_state.Activity: "3d3eeea86124c40d",
    join_state.JoinHead: "6b4f514c91278545",
    batch_state.Judged: "89eef1fbcdf3c4d9",
    batch_state.Waiting: "f7d24edb2442a469",
    batch_state.OpenBatch: "9d2b047370ab1a31",
    batch_state.ErasedUser: "f9e37a1c1a491dc1",
    batch_state.ServedUser: "45c2c538f943f096",
    batch_state.BatchHead: "0ee19680cd6bd5d3",
}
"""Fingerprints of the schemas that follow from the annotations."""


@pytest.mark.parametrize("kind", SCHEMAS, ids=lambda kind: kind.__name__)
def test_what_was_written_stays_readable(kind: type):
    assert fingerprint(to_parsing_canonical_form(_schema_of(kind)), "CRC-64-AVRO") == SCHEMAS[kind], (
        "states in the log were written with other fields, and a worker ends at the first of them: leave the fields as "
        "they are, or give the changed class a kind byte of its own, and read both"
    )


@pytest.mark.parametrize("kind", SCHEMAS, ids=lambda kind: kind.__name__)
def test_a_state_survives_its_bytes_and_other_bytes_raise_one_error(kind: type):
    state_bytes = StateBytes(kind)

    @settings(max_examples=25)
    @given(records_of(kind), st.data())
    def check(state, data):
        body = state_bytes.write(state)
        assert state_bytes.read(b"begin" + body, 5) == state
        for wrong in (body[: data.draw(st.integers(0, len(body) - 1))], body + b"\0"):
            with pytest.raises(StateError):
                state_bytes.read(wrong)
        with suppress(StateError):
            state_bytes.read(damaged(data, body))

    check()


OTHERS = [
    (join_state.BYTES, join_state.BYTES.encode(join_state.Early("b", 1))),
    (batch_state.BYTES, batch_state.BYTES.encode(batch_state.ServedUser("b"))),
    (group_state.GroupBytes(7), b"o"),
]


@pytest.mark.parametrize(("entry_bytes", "other"), OTHERS, ids=["join", "batches", "assembly"])
def test_an_entry_of_no_kind_or_under_another_key_is_refused(entry_bytes, other: bytes):
    for data in (b"", b"?", b"\0abc", other):
        with pytest.raises(StateError):
            entry_bytes.decode("early/a", data)
