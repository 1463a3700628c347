"""The redo log of the state topic: after a crash at any write, a restart finds the entries of the newest head."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.client_settings import MAX_RECORD_BYTES
from tidemill.streams.config import StreamSettings
from tidemill.streams.runner.base import Runner
from tidemill.streams.runner.journal import PART_BYTES, Journal, Written, partition_of_state
from tidemill.streams.runner.worker import group_assembly
from tidemill.streams.state import Changes, StateError

BATCHES = st.lists(
    st.dictionaries(st.sampled_from("abcd"), st.one_of(st.none(), st.binary(max_size=3)), max_size=4), max_size=6
)


Steps = tuple[Written, ...]


def take(journal: Journal, batch: dict[str, bytes | None], head: bytes) -> Steps:
    return journal.redo(Changes(batch, head))


def writes(steps: Steps) -> list[tuple[str, bytes | None]]:
    return [item for step in steps for item in step.items()]


def apply(topic: dict[str, bytes], written: list[tuple[str, bytes | None]]) -> None:
    for key, value in written:
        if value is None:
            topic.pop(key, None)
        else:
            topic[key] = value


@given(BATCHES, st.lists(st.integers(0, 12), max_size=8))
def test_repeated_restarts_lose_and_restore_nothing(batches, cuts):
    """The writes of a batch may end at any point; a new journal over the written records then repeats the batch."""
    topic: dict[str, bytes] = {}
    entries: dict[str, bytes] = {}
    left = list(cuts)
    journal = Journal(3)
    for number, batch in enumerate(batches):
        head = str(number).encode()
        while journal.state.head != head:
            changes = writes(take(journal, batch, head))
            cut = left.pop(0) if left else len(changes)
            apply(topic, changes[:cut])
            if cut >= len(changes):
                break
            journal = Journal(3, topic.items())
            done = dict(entries)
            apply(done, list(batch.items()))
            assert journal.state.entries == (done if journal.state.head == head else entries)
        apply(entries, list(batch.items()))
    assert Journal(3, topic.items()).state.entries == entries


@given(BATCHES, st.integers(0, 60), st.booleans())
def test_a_restart_finds_the_entries_of_its_head(batches, cut, backwards):
    """The writes end at any point, those of a step in either order; then the restarted journal writes one batch."""
    journal, topic, left = Journal(3), {}, cut
    by_head: dict[bytes | None, dict[str, bytes]] = {None: {}}
    entries: dict[str, bytes] = {}
    for number, batch in enumerate(batches):
        head = str(number).encode()
        apply(entries, list(batch.items()))
        by_head[head] = dict(entries)
        changes = take(journal, batch, head)
        if backwards:
            changes = tuple(dict(reversed(step.items())) for step in changes)
        apply(topic, writes(changes)[:left])
        left -= len(writes(changes))
        if left <= 0:
            break
    found = Journal(3, topic.items())
    assert found.state.entries == by_head[found.state.head]
    expected = dict(found.state.entries)
    apply(topic, writes(take(found, {"a": b"new", "b": None}, b"next")))
    apply(expected, [("a", b"new"), ("b", None)])
    again = Journal(3, topic.items())
    assert (again.state.entries, again.state.head) == (expected, b"next")
    apply(topic, writes(take(again, {}, b"last")))
    plain = {key: value for key, value in topic.items() if not key.startswith("\x00")}
    assert {key: value[5:] for key, value in plain.items()} == expected


def test_a_deletion_left_unwritten_by_two_crashes_still_holds():
    topic: dict[str, bytes] = {}
    journal = Journal(0)
    for batch, head in (({"a": b"1"}, b"1"), ({}, b"2")):
        apply(topic, writes(take(journal, batch, head)))
    assert "a" in topic
    for batch, head in (({"a": None}, b"3"), ({}, b"4"), ({}, b"5")):
        changes = take(journal, batch, head)
        apply(topic, writes(changes[:2]))
        journal = Journal(0, topic.items())
        assert journal.state.entries == {}
    apply(topic, writes(take(journal, {}, b"6")))
    assert "a" not in topic


def test_a_large_batch_is_written_in_records_of_legal_size_and_its_parts_are_deleted():
    journal, topic = Journal(0), {}
    apply(topic, writes(take(journal, {f"k{n}": b"x" * 1_000 for n in range(2_000)}, b"1")))
    parts = [value for key, value in topic.items() if "part" in key]
    assert len(parts) == 8
    assert PART_BYTES <= max(map(len, parts)) < MAX_RECORD_BYTES
    assert len(Journal(0, topic.items()).state.entries) == 2_000
    for head in (b"2", b"3"):
        apply(topic, writes(take(journal, {}, head)))
    assert not [key for key in topic if "part" in key]
    assert len(Journal(0, topic.items()).state.entries) == 2_000


def test_a_missing_part_is_an_error_and_not_an_older_state():
    journal, topic = Journal(0), {}
    apply(topic, writes(take(journal, {"a": b"1"}, b"1")))
    (part,) = [key for key in topic if "part" in key]
    with pytest.raises(StateError, match="records of the state topic are missing"):
        Journal(0, {key: value for key, value in topic.items() if key != part}.items())
    old = topic[part]
    for head in (b"2", b"3"):
        apply(topic, writes(take(journal, {"a": head}, head)))
    with pytest.raises(StateError, match="needs part 0"):
        Journal(0, {**topic, part: old}.items())


@given(st.binary(max_size=40))
def test_hostile_bytes_raise_one_error(data):
    with suppress(StateError):
        partition_of_state("a", data)
    with suppress(StateError):
        Journal(0, [("\x00head/0", data)])


def test_the_end_of_a_worker_with_unusable_state_names_the_topic_and_the_remedy():
    stream = StreamSettings(application="assembly")
    runner = Runner(KafkaSettings(topic_prefix="p."), RunSettings(), stream, group_assembly(RunSettings(), stream))
    with pytest.raises(StateError) as error:
        runner.make_machines({0: [("a", b"?")]})
    text = runner.ended(error.value)
    assert text.startswith("assembly ended: the state in the topic p.assembly.run-groups-changelog cannot be used: ")
    assert "delete this topic" in text
    assert runner.ended(OSError("gone")) == "assembly ended: gone"


def test_values_name_their_partition():
    journal = Journal(7)
    changes = take(journal, {"a": b"1"}, b"1")
    assert {partition_of_state(key, value) for key, value in writes(changes) if value is not None} == {7}
    with pytest.raises(StateError, match="begins with its kind"):
        partition_of_state("a", b"e")


@given(
    st.lists(
        st.tuples(st.booleans(), st.dictionaries(st.sampled_from("abcd"), st.one_of(st.none(), st.binary(max_size=3))))
    )
)
def test_a_state_written_in_one_way_continues_in_the_other(batches):
    topic: dict[str, bytes] = {}
    entries: dict[str, bytes] = {}
    for number, (whole, batch) in enumerate(batches):
        head = str(number).encode()
        journal = Journal(3, topic.items())
        assert journal.state.entries == entries
        changes = Changes(batch, head)
        apply(topic, writes((journal.commit(changes),) if whole else journal.redo(changes)))
        apply(entries, list(batch.items()))
        if whole:
            plain = {key: value[5:] for key, value in topic.items() if not key.startswith("\x00")}
            assert (plain, [key for key in topic if "part" in key]) == (entries, [])
    assert Journal(3, topic.items()).state.entries == entries
