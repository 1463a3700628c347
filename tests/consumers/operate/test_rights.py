"""The records that the log holds about a user, and which may be deleted for them: the pure parts."""

from __future__ import annotations

from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st

from tests.consumers.product_support import feedback, interaction, outcome, request
from tests.consumers.sink_support import START_US
from tidemill.consumers.operate.rights.erase import Cleared, delete_claims
from tidemill.consumers.operate.rights.records import (
    UserRecords,
    checked_pseudonym,
    new_request,
    requests_among,
    standing,
)
from tidemill.schemas.catalogue import Topic, feedback_key
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Claim, Feedback, Interaction, Outcome, Record, Tick, UserWish
from tidemill.schemas.stored_object import store_claim

TOPIC_OF = {Interaction: Topic.INTERACTIONS, Outcome: Topic.OUTCOMES, Feedback: Topic.FEEDBACK}
USERS = st.sampled_from(["ann", "bob"])
NAMES = st.sampled_from(["i0", "i1", "i2", "i3"])


def placed(record: Record, key: str, offset: int = 0, partition: int = 0) -> ConsumedRecord:
    return ConsumedRecord(TOPIC_OF.get(type(record), Topic.FEEDBACK), partition, offset, 0, key.encode(), b"v", record)


def tombstone(topic: Topic, key: str, partition: int = 0) -> ConsumedRecord:
    return ConsumedRecord(topic, partition, 9, 0, key.encode(), None, None, "a tombstone")


def observed(*records: ConsumedRecord) -> UserRecords:
    holdings = UserRecords("ann")
    for located in records:
        holdings.observe(located)
    return holdings


def test_a_users_own_records_and_others_feedback_on_their_interactions_are_held():
    served, foreign = interaction("i0", "ann"), interaction("i1", "bob")
    found = observed(
        placed(served, "i0"),
        placed(foreign, "i1"),
        placed(outcome(served, 1.0), "i0"),
        placed(outcome(foreign, 1.0), "i1"),
        placed(feedback("e0", "i0", "judge"), "i0/e0"),
        placed(feedback("e1", "i1", "ann"), "i1/e1"),
        placed(feedback("e2", "i1", "bob"), "i1/e2"),
    )
    assert [(topic, key) for topic, _, key in found.held] == [
        (Topic.INTERACTIONS, b"i0"),
        (Topic.OUTCOMES, b"i0"),
        (Topic.FEEDBACK, b"i0/e0"),
        (Topic.FEEDBACK, b"i1/e1"),
    ]
    assert found.counts == {"interactions": 1, "outcomes": 1, "feedback": 2}


def test_a_tombstone_deletes_only_its_own_slot():
    two = [placed(interaction("i0", "ann"), "i0", partition=p) for p in (0, 1)]
    found = observed(*two, tombstone(Topic.INTERACTIONS, "i0", 1), tombstone(Topic.OUTCOMES, "i0"))
    assert [partition for _, partition, _ in found.held] == [0]
    assert len(found.slots) == 2


def test_feedback_on_an_erased_interaction_is_still_found():
    served = placed(interaction("i0", "ann"), "i0")
    said = placed(feedback("e0", "i0", "judge"), "i0/e0")
    assert observed(served, tombstone(Topic.INTERACTIONS, "i0"), said).counts == {"feedback": 1}


def test_unreadable_records_are_counted_and_other_kinds_pass():
    broken = ConsumedRecord(Topic.FEEDBACK, 0, 0, 0, b"x", b"\xff", None, "unknown framing")
    found = observed(broken, placed(Tick("t", 1), "tick"))
    found.observe(broken)
    assert (found.unreadable, found.held) == ({"feedback": 1}, {})


@given(st.lists(st.tuples(NAMES, USERS, st.booleans()), max_size=20))
def test_the_held_records_are_those_that_a_reader_of_the_compacted_log_gets(writes: list[tuple[str, str, bool]]):
    holdings, live = UserRecords("ann"), {}
    owner = dict.fromkeys(["i0", "i2"], "ann") | dict.fromkeys(["i1", "i3"], "bob")
    for name, _user, alive in writes:
        record = placed(interaction(name, owner[name]), name) if alive else tombstone(Topic.INTERACTIONS, name)
        holdings.observe(record)
        live[name] = alive
    assert {key.decode() for _, _, key in holdings.held} == {
        n for n, alive in live.items() if alive and owner[n] == "ann"
    }


def test_every_claim_that_a_key_ever_had_is_remembered():
    claims = [Claim(f"/s/{n}", 1, str(n)) for n in range(2)]
    found = observed(*(placed(interaction("i0", "ann", claim=claim), "i0") for claim in [*claims, claims[0]]))
    ((_, held),) = found.held.values()
    assert held == tuple(claims)


def test_dead_letters_belong_to_a_user_by_key_or_by_name():
    found = observed(placed(interaction("i0", "ann"), "i0"))
    assert found.owns_key(feedback_key("i0", "e").encode(), None)
    assert found.owns_key(b"unknown", "ann")
    assert not found.owns_key(b"i1/e", "bob")
    assert not found.owns_key(b"\xff\xfe", None)


def test_requests_of_one_user_are_in_order_and_count_once():
    out, back = request("ann", UserWish.OPT_OUT, 1), request("ann", UserWish.OPT_IN, 2)
    requests = requests_among((out, request("bob", UserWish.ERASE, 1), Tick("t", 1), back, out, back), "ann")
    assert requests == [out, back]
    assert standing(requests, UserWish.OPT_IN) == back
    assert standing(requests, UserWish.OPT_OUT) is None
    assert standing([], UserWish.ERASE) is None


@pytest.mark.parametrize("user", ["", "x" * 201, "a\x00b", "a\nb"], ids=["empty", "huge", "nul", "newline"])
def test_an_invalid_user_is_refused(user: str):
    with pytest.raises(ValueError, match=r"user id is empty|printable"):
        checked_pseudonym(user)
    with pytest.raises(ValueError, match=r"user id is empty|printable"):
        new_request(user, UserWish.ERASE, "tester", START_US)


@pytest.mark.parametrize("name", ["", "  ", "x" * 201])
def test_a_request_needs_the_name_of_its_author(name: str):
    with pytest.raises(ValueError, match="--by"):
        new_request("ann", UserWish.ERASE, name, START_US)


def test_only_claimed_bytes_below_the_root_are_deleted(tmp_path: Path):
    root = tmp_path / "store"
    inside = store_claim(str(root), "run/claims/a", b"bytes")
    outside = store_claim(str(tmp_path / "storekeeper"), "a", b"bytes")
    sneaky = Claim(f"{root}/../storekeeper/a", 5, "d")
    elsewhere = Claim("memory://store/a", 5, "d")
    folder = Claim(str(root / "run"), 5, "d")
    cleared = Cleared()
    delete_claims(str(root), [inside, inside, outside, sneaky, elsewhere, folder], cleared)
    assert (cleared.deleted, cleared.absent) == (1, 1)
    assert cleared.foreign == [outside.uri, sneaky.uri, elsewhere.uri, folder.uri]
    assert not (root / "run/claims/a").exists()
    assert (tmp_path / "storekeeper/a").exists()


def test_a_store_that_does_not_delete_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: LocalFileSystem, path: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(LocalFileSystem, "rm_file", refuse)
    with pytest.raises(ConnectionError, match="run the erasure again"):
        delete_claims(str(tmp_path), [Claim(str(tmp_path / "a"), 1, "d")], Cleared())
