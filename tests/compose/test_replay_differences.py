"""Comparison of two sets of records: by identity, field by field; the first difference in event time is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.records import build
from tests.streams.stream_support import rollout
from tidemill.compose.cli.replay_stage import comparison_document, comparison_lines, field_lines
from tidemill.compose.cli.replay_steps import step_range
from tidemill.compose.output import moment_us
from tidemill.consumers.operate.replay.differences import (
    DifferenceKind,
    Item,
    compare,
    field_changes,
    named,
    out_of_order,
)
from tidemill.schemas.codec import Codec
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.records import CloseReason, Document, Group, GroupMember, Record, RolloutStatus

CODEC = Codec()


def member(name: str, reward: float) -> GroupMember:
    return GroupMember(name, "rollouts", 0, 1, RolloutStatus.COMPLETED, reward, 0.0, True, 7, 1, 2)


def group(name: str, closed_at: int = 10, reward: float = 1.0, **changes: object) -> Group:
    made = build(Group, group_id=name, task_id="t", environment="e", expected_size=1,
                 members=[member(f"{name}/0", reward)], mean_reward=reward, closed_at=closed_at)  # fmt: skip
    return replace(made, **changes)


def items(*records: Record, partition: int = 0) -> list[Item]:
    return [
        Item(b"key", CODEC.encode(record), record, Position("groups", partition, offset), 7)
        for offset, record in enumerate(records)
    ]


def test_equal_sides_are_identical_and_repetitions_count_once():
    there, here = items(group("a"), group("b"), group("a")), items(group("b"), group("a"))
    found = compare(there, here)
    assert (found.identical, found.total, found.repeated_there, found.repeated_here) == (2, 2, 1, 0)
    assert found.first is None
    assert comparison_lines(found, "the log", "the replay", 3) == [
        "identical: 2 of 2",
        "repeated in the log, byte for byte: 1",
    ]


def test_the_first_difference_is_the_earliest_in_event_time_with_its_fields():
    there = items(group("late", 30), group("early", 20), group("same", 1))
    here = items(group("late", 30, reward=2.0), group("early", 25, reward=3.0), group("same", 1))
    found = compare(there, here)
    assert [d.name for d in found.differences] == ["early", "late"]
    assert found.first is not None
    assert (found.first.kind, found.first.there, found.identical) == (
        DifferenceKind.CHANGED,
        Position("groups", 0, 1),
        1,
    )
    assert field_lines(found.first) == [
        "  members[0].reward: 1.0 -> 3.0",
        "  mean_reward: 1.0 -> 3.0",
        "  closed_at: 20 -> 25",
    ]
    text = comparison_lines(found, "the log", "the replay", 2)
    assert text[2] == "first difference: early changed, the log groups[0]@1, the replay groups[0]@1"
    assert text[-1].startswith("then: late changed")


def test_a_record_that_only_one_side_has():
    found = compare(items(group("a"), group("b")), items(group("b"), group("c", 5)))
    assert [(d.name, d.kind) for d in found.differences] == [
        ("c", DifferenceKind.ONLY_HERE),
        ("a", DifferenceKind.ONLY_THERE),
    ]
    lines = comparison_lines(found, "A", "B", 5)
    assert lines[:2] == ["identical: 1 of 3", "only in A: 1, only in B: 1"]
    assert lines[2] == "first difference: c is only in B, groups[0]@1"
    assert comparison_document(found, 1)["first"].name == "c"


def test_stragglers_and_groups_that_came_twice_have_identities_of_their_own():
    late = group("g", closed_by=CloseReason.LATE, members=[member("g/3", 1.0)])
    found, repeated = named(items(group("g"), late, group("g", reward=2.0), late))
    assert list(found) == ["g", "g, late g/3", "g#2"] and repeated == 1


def test_a_window_compares_records_that_ended_within_it_on_either_side():
    there = items(group("before", 5), group("in", 10), group("moved", 25), group("after", 30))
    here = items(group("before", 4), group("in", 11), group("moved", 19), group("after", 31))
    found = compare(there, here, 10, 20)
    assert [d.name for d in found.differences] == ["in", "moved"]
    assert compare(there, here, begin=31).total == 1 and compare(there, here, end=5).total == 1


def test_the_order_is_compared_over_records_of_both_sides():
    a, b, c = group("a"), group("b"), group("c")
    assert out_of_order(items(a, b, c), items(a, c)) is None
    moved = out_of_order(items(a, b, c), items(b, a, c))
    assert moved is not None and [item.place.offset for item in moved] == [0, 0]


def test_fields_of_every_shape():
    one = rollout("g", 0)
    other = replace(one, reward=None, index=1, rewards=[])
    assert [(f.path, f.there, f.here) for f in field_changes(one, other)] == [
        ("index", "0", "1"),
        ("reward", "0.5", "None"),
    ]
    longer = group("g", members=[member("a", 1.0), member("b", 1.0)])
    (added,) = field_changes(group("g", members=[member("a", 1.0)]), longer)
    assert (added.path, added.there) == ("members[1]", "nothing") and "rollout_id='b'" in added.here
    assert [f.path for f in field_changes({"a": 1, "b": 2}, {"b": 3, "c": 4}, "metrics")] == [
        "metrics[a]",
        "metrics[b]",
        "metrics[c]",
    ]
    (bytes_differ,) = field_changes(b"\x00" * 40, b"\x01", "token_ids")
    assert bytes_differ.there == f"40 bytes {'00' * 16}..." and bytes_differ.here == "1 bytes 01"
    assert list(field_changes(float("nan"), float("nan"), "x")) == []


def test_records_that_cannot_be_read_and_records_without_a_name():
    junk = [Item(None, value, None, Position("groups", 0, 0), 1) for value in (b"a", b"b")]
    found = compare(junk[:1], junk[1:])
    assert found.first is not None and [f.path for f in found.first.fields] == ["value"]
    elsewhere = Item(None, b"b", None, Position("groups", 1, 0), 1)
    assert [one.kind for one in compare(junk[:1], [elsewhere]).differences] == ["only_there", "only_here"]
    document = Document("d", "s", "text")
    keyed = Item(b"\xffd", CODEC.encode(document), document, Position("documents", 0, 0), 1)
    assert list(named([keyed])[0]) == ["\\xffd"]


def test_moments_and_ranges_are_read_or_refused():
    assert moment_us(None) is None
    assert moment_us("1970-01-01T00:00:01.000001") == 1_000_001
    assert moment_us("1970-01-01T02:00:00+02:00") == 0
    with pytest.raises(ValueError, match="'yesterday' is not a time: write it like"):
        moment_us("yesterday")
    assert (step_range("3..7"), step_range("4")) == ((3, 7), (4, 4))
    for text in ("7..3", "0", "x", "1..", "..2", "1-2"):
        with pytest.raises(ValueError, match=r"is no range of steps: write FROM\.\.TO"):
            step_range(text)
