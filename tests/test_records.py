"""The builder of tests' records fills in fields so that each record can be written to the log."""

from __future__ import annotations

from typing import get_args

import pytest

from tests.records import RELATED, build
from tidemill.schemas.codec import Codec
from tidemill.schemas.records import GateDecision, GateVerdict, Group, Manifest, Record, TrainStep

GIVEN = {"group_id": "g", "members": [], "version": 3, "task_id": "t", "step": 4}


@pytest.mark.parametrize("kind", get_args(Record), ids=lambda kind: kind.__name__)
def test_a_record_with_filled_in_fields_can_be_encoded(kind: type):
    given = {name: value for name, value in GIVEN.items() if kind in RELATED and name in kind.__annotations__}
    codec = Codec()
    made = build(kind, **given)
    assert codec.decode(codec.encode(made)) == made


def test_given_fields_are_kept_and_determine_related_fields():
    assert build(GateDecision, verdict=GateVerdict.HOLD).verdict is GateVerdict.HOLD
    made = build(Manifest, version=3)
    assert (made.run_id, made.parent, made.step, made.tensors) == ("run", 2, 3, [])
    assert build(Manifest, version=0).parent is None
    assert build(Manifest, version=3, parent=1).parent == 1
    assert build(TrainStep, step=4).parent_version == 3
    assert build(Group, group_id="g", members=[]).expected_size == 0


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="no_such_field"):
        build(Manifest, version=1, no_such_field=1)
