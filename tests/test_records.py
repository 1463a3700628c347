"""The builder of tests' records: whatever it fills in is a record that the log takes."""

from __future__ import annotations

from typing import get_args

import pytest

from tests.records import RELATED, build
from tidemill.schemas.codec import Codec
from tidemill.schemas.records import GateDecision, GateVerdict, Group, Manifest, Record, TrainStep

GIVEN = {"group_id": "g", "members": [], "version": 3, "task_id": "t", "step": 4}


@pytest.mark.parametrize("kind", get_args(Record), ids=lambda kind: kind.__name__)
def test_what_is_left_out_makes_a_record_of_the_log(kind: type):
    given = {name: value for name, value in GIVEN.items() if kind in RELATED and name in kind.__annotations__}
    codec = Codec()
    made = build(kind, **given)
    assert codec.decode(codec.encode(made)) == made


def test_what_is_given_stands_and_leads_to_what_follows_from_it():
    assert build(GateDecision, verdict=GateVerdict.HOLD).verdict is GateVerdict.HOLD
    made = build(Manifest, version=3)
    assert (made.run_id, made.parent, made.step, made.tensors) == ("run", 2, 3, [])
    assert build(Manifest, version=0).parent is None
    assert build(Manifest, version=3, parent=1).parent == 1
    assert build(TrainStep, step=4).parent_version == 3
    assert build(Group, group_id="g", members=[]).expected_size == 0


def test_a_field_that_is_none_is_refused():
    with pytest.raises(TypeError, match="no_such_field"):
        build(Manifest, version=1, no_such_field=1)
