"""The bytes of every state: written states stay readable, and other bytes raise one error."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from fastavro.schema import fingerprint, to_parsing_canonical_form
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generated import damaged, records_of
from tidemill.streams import assembly
from tidemill.streams.join import join_state
from tidemill.streams.online import batch_state
from tidemill.streams.runner.journal import JournalHead, JournalPart
from tidemill.streams.state import StateBytes, StateError, _schema_of

SCHEMAS: dict[type, str] = {
    JournalHead: "849e914703a55eaa",
    JournalPart: "723d7ae933328952",
    assembly._OpenBytes: "054e7344d257de92",
    assembly._DoneBytes: "2d9a931fa772e8ff",
    assembly.AssemblyHead: "1a40ca37704a5fd3",
    join_state.InteractionState: "9442d49a1bd6b3cd",
    join_state.EarlyFeedback: "c5b8e22bdc4d18b3",
    join_state.UserRequestState: "4b2a8bb005c98de3",
    join_state.Activity: "211ee75e7475afea",
    join_state.JoinHead: "53325abcfd24b8f1",
    batch_state.OutcomeState: "6d1bf3a1b3606f12",
    batch_state.PendingMember: "1badf3fadf0de509",
    batch_state.OpenBatch: "705f049b1b6dac5d",
    batch_state.ErasedUser: "c04e543b28221a47",
    batch_state.ServedUser: "bf827022d3e3a6f2",
    batch_state.BatchHead: "b91040985d354fde",
}
"""Fingerprints of the schemas derived from the annotations."""


@pytest.mark.parametrize("kind", SCHEMAS, ids=lambda kind: kind.__name__)
def test_written_states_stay_readable(kind: type):
    # The bytes contain no schema, so class names may change.
    form = re.sub(r'"[A-Z]\w*"', '"Record"', to_parsing_canonical_form(_schema_of(kind)))
    assert fingerprint(form, "CRC-64-AVRO") == SCHEMAS[kind], (
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
    (join_state.BYTES, join_state.BYTES.encode(join_state.EarlyFeedback("b", 1))),
    (batch_state.BYTES, batch_state.BYTES.encode(batch_state.ServedUser("b"))),
    (assembly.GroupBytes(7), b"o"),
]


@pytest.mark.parametrize(("entry_bytes", "other"), OTHERS, ids=["join", "batches", "assembly"])
def test_an_entry_of_an_unknown_kind_or_under_another_key_is_refused(entry_bytes, other: bytes):
    for data in (b"", b"?", b"\0abc", other):
        with pytest.raises(StateError):
            entry_bytes.decode("early/a", data)
