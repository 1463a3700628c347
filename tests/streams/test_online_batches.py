"""The state machine of online batches: one version per batch, exact counts, corrections, erasure, and any kill."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from join_support import RUN_ID, SECOND_US, located, request
from machine_log import check_kills, records_of
from pydantic import ValidationError

from tests.records import build
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import (
    BatchClose,
    Document,
    OnlineBatch,
    Outcome,
    Record,
    SignalKind,
    SignalUse,
    Tick,
    UserWish,
)
from tidemill.streams.config import BatchSettings
from tidemill.streams.machine import Output, OutputRecord, Rejected
from tidemill.streams.online import batch_state
from tidemill.streams.online.batch_state import FeatureSums, PendingMembers, SelectionFeatures, within_share
from tidemill.streams.online.batcher import OnlineBatcher
from tidemill.streams.state import MachineState


def settings_of(**changes: Any) -> BatchSettings:
    """Settings for batches of 40 tokens or 10 s with at least two members; half of them may be one user's."""
    fields: dict[str, Any] = {
        "max_tokens": 40,
        "max_wait_s": 10,
        "min_members": 2,
        "version_idle_s": 30,
        "done_ttl_s": 500,
    }
    return BatchSettings(**{**fields, **changes})


REWARDED = build(
    Outcome, run_id=RUN_ID, topic="interactions", partition=5, offset=17, version_min=3, version_max=3,
    sampled_tokens=10, latency_ms=20.0, reward=1.0, map_version="map-1", observed={"thumb": 1.0},
    signals=[SignalUse(SignalKind.THUMB, "e", 1.0, 1.0, "feedback", 5, 3)], served_at=100 * SECOND_US,
    feedback_at=101 * SECOND_US, closed_at=102 * SECOND_US,
)  # fmt: skip


def outcome(name: str, **changes: Any) -> Outcome:
    """Return an outcome of reward 1 for 10 tokens of version 3, served at 100 s, with a separate user."""
    return replace(REWARDED, **{"interaction_id": name, "user_id": f"user of {name}", **changes})


def of_version(name: str, version: int, **changes: Any) -> Outcome:
    return outcome(name, version_min=version, version_max=version, **changes)


def excluded(name: str, **changes: Any) -> Outcome:
    return outcome(name, **{"reward": None, "exclusion": "no_signal", "signals": [], "observed": {}, **changes})


def revised(name: str, revision: int, previous: float | None, reward: float | None, **changes: Any) -> Outcome:
    exclusion = "" if reward is not None else "no_signal"
    return outcome(name, revision=revision, previous_reward=previous, reward=reward, exclusion=exclusion, **changes)


class Log:
    """The only partition of `outcomes`."""

    def __init__(self, *records: Record) -> None:
        self.records: list[ConsumedRecord] = []
        for record in records:
            self.write(102, record)

    def write(self, at_s: float, record: Record | None, **changes: Any) -> Log:
        self.records.append(located(Topic.OUTCOMES, record, len(self.records), at_s, **changes))
        return self

    def tick(self, at_s: float) -> Log:
        return self.write(at_s, Tick("t", 0))


def batcher_of(rules: BatchSettings, state: MachineState | None = None) -> OnlineBatcher:
    return OnlineBatcher(RUN_ID, "main", rules, state)


def run(log: Log, **changes: Any) -> tuple[list[Output], OnlineBatcher]:
    batcher = batcher_of(settings_of(**changes))
    outputs = [output for record in log.records for output in batcher.observe(record)]
    head = batcher._head
    assert head.read == head.batched + head.lost + len(batcher._room)
    return outputs, batcher


def batches(log: Log, **changes: Any) -> list[OnlineBatch]:
    outputs, _ = run(log, **changes)
    assert not [o for o in outputs if isinstance(o, Rejected)]
    return [record for record in records_of(outputs) if isinstance(record, OnlineBatch)]


def one(log: Log, **changes: Any) -> OnlineBatch:
    (batch,) = batches(log, **changes)
    return batch


def names(batch: OnlineBatch) -> list[str]:
    return [member.interaction_id for member in batch.members]


def test_a_batch_closes_with_its_tokens():
    log = Log(outcome("d"), outcome("b"), outcome("c"))
    assert batches(log) == []
    log.write(103, outcome("a"))
    (emitted,), _ = run(log)
    assert isinstance(emitted, OutputRecord)
    batch = emitted.record
    assert (emitted.topic, emitted.key, emitted.partition) == (Topic.ONLINE_BATCHES, batch.batch_id, 0)
    assert names(batch) == ["a", "b", "c", "d"]
    assert (batch.tokens, batch.version, batch.sequence, batch.closed_by) == (40, 3, 0, BatchClose.TOKENS)
    assert (batch.opened_at, batch.closed_at, batch.map_version) == (102 * SECOND_US, 103 * SECOND_US, "map-1")
    member = batch.members[0]
    assert (member.topic, member.partition, member.offset, member.reward) == ("interactions", 5, 17, 1.0)
    assert (member.correction, member.arm, member.feedback_at) == (False, "stable", 101 * SECOND_US)


def test_a_batch_closes_with_its_time():
    log = Log(outcome("a"), outcome("b"))
    assert batches(log.tick(111.999)) == []
    batch = one(log.tick(112))
    assert (names(batch), batch.closed_by, batch.closed_at) == (["a", "b"], BatchClose.TIME, 112 * SECOND_US)


def test_time_waits_for_enough_members():
    log = Log(outcome("a")).tick(113)
    _, batcher = run(log)
    assert (len(batcher._room), batcher.next_deadline_us()) == (1, None)
    batch = one(log.write(114, outcome("b")))
    assert (names(batch), batch.closed_by, batch.closed_at) == (["a", "b"], BatchClose.TIME, 114 * SECOND_US)


def test_tokens_wait_for_enough_members():
    assert batches(Log(outcome("a", sampled_tokens=100))) == []
    assert one(Log(outcome("a", sampled_tokens=100), outcome("b"))).closed_by is BatchClose.TOKENS


def test_members_are_bounded():
    batch = one(Log(*(outcome(str(n)) for n in range(3))), max_members=3)
    assert (len(batch.members), batch.closed_by) == (3, BatchClose.TOKENS)


def test_the_next_deadline_is_reported():
    batcher = batcher_of(settings_of())
    assert batcher.next_deadline_us() is None
    batcher.observe(located(Topic.OUTCOMES, outcome("a"), 0, 102))
    assert (batcher.next_deadline_us(), batcher.next_offset(Topic.OUTCOMES)) == (112 * SECOND_US, 1)
    assert batcher.clock_us(Topic.OUTCOMES) == 102 * SECOND_US


def test_a_record_read_again_gives_nothing_and_the_clock_never_goes_back():
    batcher = batcher_of(settings_of())
    batcher.observe(located(Topic.OUTCOMES, outcome("a"), 0, 102))
    batcher.observe(located(Topic.OUTCOMES, Tick("t", 0), 1, 50))
    assert batcher.clock_us(Topic.OUTCOMES) == 102 * SECOND_US
    for offset in (0, 1):
        assert batcher.observe(located(Topic.OUTCOMES, outcome("b", run_id=""), offset, 300)) == []
    assert (batcher.clock_us(Topic.OUTCOMES), batcher.next_offset(Topic.OUTCOMES)) == (102 * SECOND_US, 2)


def test_sequences_and_ids():
    log = Log(*(outcome(f"{n}") for n in range(8)))
    first, second = batches(log)
    assert (first.sequence, second.sequence) == (0, 1)
    assert first.batch_id != second.batch_id
    assert [b.batch_id for b in batches(log)] == [first.batch_id, second.batch_id]
    assert first.batch_id.startswith("run.main.00000000-")


def test_one_serving_version_and_leftovers_are_dropped():
    log = Log(outcome("a"), of_version("b", 4), outcome("c"), of_version("d", 4)).tick(200)
    batch = one(log)
    assert (batch.version, names(batch)) == (4, ["b", "d"])
    assert batch.dropped == {"old_version": 2}


def test_leftovers_are_dropped_at_once_however_many():
    log = Log(outcome("a"), outcome("b"), of_version("c", 4))
    assert run(log)[1]._head.lost == 2
    assert batches(log.tick(200)) == []


def test_leftovers_are_kept_in_a_batch_of_their_own():
    log = Log(outcome("a"), of_version("b", 4), outcome("c"), of_version("d", 4)).tick(200)
    both = batches(log, leftovers="keep")
    assert [(b.version, names(b), b.dropped) for b in both] == [(3, ["a", "c"], {}), (4, ["b", "d"], {})]


@pytest.mark.parametrize("moved_first", [True, False])
def test_kept_leftovers_that_are_too_few_are_dropped_when_they_are_overdue(moved_first):
    log = Log(outcome("a"))
    if moved_first:
        log.write(103, of_version("b", 4)).tick(200)
    else:
        log.tick(113).write(114, of_version("b", 4)).tick(200)
    _, batcher = run(log, leftovers="keep")
    assert (batcher._head.lost, len(batcher._room)) == (1, 1)


def test_after_a_roll_back_the_older_version_is_the_one_served():
    log = Log(of_version("new", 4, served_at=100 * SECOND_US))
    log.write(103, outcome("a", served_at=130 * SECOND_US))
    _, batcher = run(log)
    assert batcher.current_version == 4
    log.write(104, outcome("b", served_at=130 * SECOND_US + 1)).write(105, outcome("c")).tick(200)
    batch = one(log)
    assert (names(batch), batch.version, batch.dropped) == (["b", "c"], 3, {"old_version": 2})


def test_a_late_outcome_does_not_make_a_version_idle():
    log = Log(of_version("a", 4, served_at=130 * SECOND_US), of_version("b", 4, served_at=90 * SECOND_US))
    _, batcher = run(log.write(103, outcome("c", served_at=135 * SECOND_US)))
    assert batcher.current_version == 4


def test_mixed_versions_are_in_no_batch():
    log = Log(outcome("m", version_max=9), outcome("a"), outcome("b")).tick(200)
    assert (names(one(log)), one(log).dropped) == (["a", "b"], {"mixed_versions": 1})


def test_only_the_arms_of_the_settings_are_trained():
    log = Log(of_version("x", 9, arm="canary"), outcome("a"), outcome("b")).tick(200)
    assert (names(one(log, arms=["stable"])), one(log, arms=["stable"]).dropped) == (["a", "b"], {"other_arm": 1})


def test_exclusions_are_not_counted_as_dropped():
    log = Log(excluded("x"), outcome("a"), outcome("b")).tick(200)
    assert (names(one(log)), one(log).dropped) == (["a", "b"], {})
    assert run(log)[1]._head.read == 2


def test_duplicates_are_silent():
    log = Log(outcome("a"), outcome("a", reward=0.0), outcome("b")).tick(200)
    log.write(201, outcome("a")).write(202, outcome("c"))
    assert (names(one(log)), one(log).dropped) == (["a", "b"], {})
    assert len(run(log)[1]._room) == 1


def test_other_runs_and_branches_are_ignored():
    log = Log(outcome("x", run_id="other"), outcome("y", branch="other"), outcome("a"), outcome("b")).tick(200)
    assert names(one(log)) == ["a", "b"]
    assert one(log).selection["served/interactions"] == 2


def test_no_user_fills_a_batch():
    log = Log(*(outcome(f"f{n}", user_id="flooder", sampled_tokens=1) for n in range(5)))
    log.write(103, outcome("a")).write(103, outcome("b")).tick(200)
    batch = one(log)
    assert names(batch) == ["a", "b", "f0", "f1"]
    assert batch.dropped == {"user_cap": 3}
    assert batches(Log(*(outcome(f"f{n}", user_id="flooder") for n in range(9))).tick(200)) == []


def test_interactions_without_a_user_share_no_limit():
    log = Log(*(outcome(f"n{n}", user_id="") for n in range(4)))
    assert names(one(log)) == ["n0", "n1", "n2", "n3"]


def test_tokens_above_a_users_share_fill_no_batch():
    log = Log(outcome("u1", user_id="u", sampled_tokens=8), outcome("u2", user_id="u", sampled_tokens=8))
    log.write(103, outcome("v", sampled_tokens=24))
    assert batches(log, max_share_per_user=0.4) == []
    batch = one(log.tick(200), max_share_per_user=0.4)
    assert (names(batch), batch.tokens, batch.dropped) == (["u1", "v"], 32, {"user_cap": 1})


def test_no_user_exceeds_their_share_of_tokens():
    log = Log(*(outcome(f"f{n}", user_id="flooder") for n in range(4)))
    assert run(log)[1]._head.lost == 2


def test_a_share_holds_in_a_batch_of_the_most_members():
    log = Log(*(outcome(f"u{n}", user_id="u", sampled_tokens=1) for n in range(3)))
    log.write(103, outcome("v0", user_id="v", sampled_tokens=1)).write(103, outcome("v1", user_id="v")).tick(200)
    batch = one(log, max_members=3, min_members=1)
    assert (names(batch), batch.dropped) == (["u0", "v0"], {"user_cap": 3})


@given(st.lists(st.sampled_from("abcde"), max_size=30), st.floats(0.05, 1.0), st.integers(1, 40))
def test_shares_hold_and_no_larger_number_would(users, share, room):
    waiting = [
        batch_state.PendingMember(str(n), n, u, "t", 0, 0, 1.0, False, 1, 1, None, 0, FIGURES)
        for n, u in enumerate(users)
    ]
    kept = within_share(waiting, share, room)
    counts, everyone = Counter(w.user_id for w in kept), Counter(users)
    most = max(counts.values(), default=0)
    assert most <= max(1, share * len(kept))
    assert len(kept) <= room
    if len(kept) < room:
        assert all(counts[user] == min(n, most) for user, n in everyone.items())
    if len(kept) < min(room, len(waiting)):
        larger = sum(min(n, most + 1) for n in everyone.values())
        assert most + 1 > share * min(room, larger)
    assert [w.order for w in kept] == sorted(w.order for w in kept)


FIGURES = SelectionFeatures(1, 1.0, 1.0, "stable", ())


def test_a_reward_that_changes_while_it_waits_is_replaced():
    log = Log(outcome("a"), outcome("b"), revised("a", 1, 1.0, -1.0)).tick(200)
    batch = one(log)
    assert [(m.interaction_id, m.reward, m.correction) for m in batch.members] == [
        ("a", -1.0, False),
        ("b", 1.0, False),
    ]
    assert batch.dropped == {"replaced": 1}
    assert batch.selection["served/interactions"] == 2


def test_a_reward_that_is_withdrawn_while_it_waits():
    log = Log(outcome("a"), outcome("b"), outcome("c"), revised("a", 1, 1.0, None)).tick(200)
    assert (names(one(log)), one(log).dropped) == (["b", "c"], {"replaced": 1, "correction": 1})


def trained_then(*later: Outcome, **changes: Any) -> OnlineBatch:
    """Close a batch of `a` and `b`, write these outcomes, `c` and `d`, and return the second batch."""
    log = Log(outcome("a"), outcome("b")).tick(120)
    for record in (*later, outcome("c"), outcome("d")):
        log.write(121, record)
    _, second = batches(log.tick(200), **changes)
    return second


def test_corrections_are_counted():
    batch = trained_then(revised("a", 1, 1.0, -1.0), revised("b", 1, 1.0, None))
    assert (names(batch), batch.dropped) == (["c", "d"], {"correction": 2})
    # A reward after its withdrawal is a second correction: the first reward was trained.
    batch = trained_then(revised("a", 1, 1.0, None), revised("a", 2, None, 1.0))
    assert (names(batch), batch.dropped) == (["c", "d"], {"correction": 2})


def test_corrections_feed_the_next_batch():
    def members(*later):
        batch = trained_then(*later, corrections="next_batch")
        return [(m.interaction_id, m.reward) for m in batch.members if m.correction], batch.dropped

    assert members(revised("a", 1, 1.0, -1.0)) == ([("a", -2.0)], {})
    assert members(revised("a", 1, 1.0, None)) == ([("a", -1.0)], {})
    assert members(revised("a", 1, 1.0, None), revised("a", 2, None, 0.5)) == ([("a", -0.5)], {"replaced": 1})
    assert members(revised("unknown", 1, 1.0, -1.0)) == ([], {"correction": 1})


def test_corrections_leave_no_batch_too_large():
    log = Log(outcome("a"), outcome("b")).tick(120)
    for record in (revised("a", 1, 1.0, -1.0), revised("b", 1, 1.0, -1.0), outcome("c"), outcome("d")):
        log.write(121, record)
    outputs, batcher = run(log.tick(200), corrections="next_batch", max_members=3)
    assert [names(b) for b in records_of(outputs)] == [["a", "b"], ["a", "c", "d"]]
    assert len(batcher._room) == 1


def test_a_trained_interaction_is_no_new_member_even_if_its_correction_was_erased():
    log = Log(outcome("a"), outcome("b")).tick(120).write(121, revised("a", 1, 1.0, None))
    log.write(122, None, key=b"a", value=None).write(123, revised("a", 2, None, 1.0))
    log.write(124, outcome("c")).write(124, outcome("d")).tick(200)
    _, batch = batches(log, corrections="next_batch")
    assert [(m.interaction_id, m.correction) for m in batch.members] == [("a", True), ("c", False), ("d", False)]


def test_pending_members_keep_their_order_over_a_restart():
    waiting = [
        batch_state.PendingMember(str(n), n, "u", "t", 0, 0, 1.0, False, 1, 1, None, 0, FIGURES) for n in range(3)
    ]
    assert PendingMembers(reversed(waiting)).of_version(1) == waiting


def test_a_correction_of_an_older_version_makes_no_batch_of_that_version():
    batch = trained_then(revised("a", 1, 1.0, -1.0, version_min=2, version_max=2), corrections="next_batch")
    assert (batch.version, [m.version_max for m in batch.members]) == (3, [2, 3, 3])
    assert batch.selection["trained/interactions"] == 2


def test_a_first_reward_after_an_exclusion_is_no_correction():
    log = Log(excluded("a"), outcome("b"), revised("a", 1, None, 1.0)).tick(200)
    assert [(m.interaction_id, m.correction) for m in one(log).members] == [("a", False), ("b", False)]


def test_a_correction_of_a_dropped_interaction_is_counted():
    log = Log(of_version("n", 4), outcome("old"), revised("old", 1, 1.0, -1.0), of_version("m", 4)).tick(200)
    batch = one(log, corrections="next_batch")
    assert (names(batch), batch.dropped) == (["m", "n"], {"old_version": 1, "correction": 1})


def test_erased_users_are_in_no_batch():
    log = Log(outcome("a", user_id="u"), outcome("b"), outcome("c"))
    log.write(103, request(UserWish.ERASE, 103)).write(104, outcome("d", user_id="u"))
    log.write(105, outcome("e", user_id="u", served_at=104 * SECOND_US)).tick(200)
    assert (names(one(log)), one(log).dropped) == (["b", "c", "e"], {"erased": 2})
    gone = Log(outcome("a", user_id="u"), outcome("b"), outcome("c")).write(103, request(UserWish.ERASE, 103)).tick(200)
    assert one(gone).selection["served/users"] == 2
    assert batches(Log(outcome("a", user_id="u"), request(UserWish.OPT_OUT, 100), outcome("b")).tick(200))


def test_the_latest_erasure_request_applies():
    log = Log(request(UserWish.ERASE, 101), request(UserWish.ERASE, 50, request_id="older"))
    log.write(103, outcome("d", user_id="u"))
    assert run(log)[1]._head.lost == 1


def test_an_erasure_removes_what_was_served_before_it():
    log = Log(outcome("a", user_id="u"), outcome("b", user_id="u", served_at=101 * SECOND_US))
    log.write(103, request(UserWish.ERASE, 100)).write(103, outcome("c")).tick(200)
    assert (names(one(log)), one(log).dropped) == (["b", "c"], {"erased": 1})
    early = Log().write(90, request(UserWish.ERASE, 10_000)).write(102, outcome("a", user_id="u"))
    assert len(run(early)[1]._room) == 1


def test_a_waiting_correction_of_an_erased_user_is_dropped():
    log = Log(outcome("a", user_id="u"), outcome("b")).tick(120)
    log.write(121, revised("a", 1, 1.0, -1.0, user_id="u")).write(122, request(UserWish.ERASE, 122))
    log.write(123, outcome("c")).write(123, outcome("d")).tick(200)
    _, batch = batches(log, corrections="next_batch")
    assert (names(batch), batch.dropped) == (["c", "d"], {"erased": 1})


def test_a_tombstone_removes_an_outcome():
    log = Log(outcome("a"), outcome("b"), outcome("c"))
    for key in ("a", "unknown", "\x00tick/0"):
        log.write(103, None, key=key.encode(), value=None)
    assert (names(one(log.tick(200))), one(log).dropped) == (["b", "c"], {"erased": 1})


def test_rewards_of_two_maps_are_in_two_batches():
    second = {"map_version": "map-2"}
    log = Log(outcome("a"), outcome("b"), outcome("c", **second), outcome("d", **second)).tick(200)
    assert [(names(b), b.map_version, b.closed_by) for b in batches(log)] == [
        (["a", "b"], "map-1", BatchClose.TIME),
        (["c", "d"], "map-2", BatchClose.TIME),
    ]
    few = Log(outcome("a"), outcome("c", **second), outcome("d", **second)).tick(200)
    assert (names(one(few)), one(few).dropped) == (["c", "d"], {"old_map": 1})


def test_rewards_of_an_old_map_leave_a_user_their_share_of_the_next_batch():
    log = Log(outcome("a", user_id="u"))
    log.write(103, outcome("b", user_id="u", sampled_tokens=15, map_version="map-2"))
    log.write(104, outcome("c", map_version="map-2")).tick(200)
    assert (names(one(log)), one(log).dropped) == (["b", "c"], {"old_map": 1})


def test_selection_reports_both_served_and_trained():
    log = Log(
        outcome("a", sampled_tokens=4, latency_ms=10.0, user_id="u"),
        outcome("b", sampled_tokens=8, latency_ms=30.0, reward=0.0, arm="canary", user_id="v"),
        excluded("x", sampled_tokens=30, latency_ms=80.0, user_id="u"),
        outcome("m", version_max=9, observed={"thumb": 1.0, "retry": 1.0}, sampled_tokens=6, latency_ms=0.0),
    ).tick(200)
    found = one(log).selection
    assert found == {
        "served/interactions": 4,
        "served/users": 3,
        "served/mean_tokens": 12.0,
        "served/mean_latency_ms": 30.0,
        "served/rewarded_share": 0.75,
        "served/mean_reward": pytest.approx(2 / 3),
        "served/signal_share/retry": 0.25,
        "served/signal_share/thumb": 0.75,
        "served/arm_share/canary": 0.25,
        "served/arm_share/stable": 0.75,
        "trained/interactions": 2,
        "trained/users": 2,
        "trained/mean_tokens": 6.0,
        "trained/mean_latency_ms": 20.0,
        "trained/rewarded_share": 1.0,
        "trained/mean_reward": 0.5,
        "trained/signal_share/thumb": 1.0,
        "trained/arm_share/canary": 0.5,
        "trained/arm_share/stable": 0.5,
    }
    log.write(201, outcome("y")).write(201, outcome("z")).tick(300)
    assert batches(log)[1].selection["served/interactions"] == 2
    assert FeatureSums().numbers(0) == {"interactions": 0, "users": 0}


def test_memory_is_bounded():
    log = Log(outcome("a"), outcome("b"), request(UserWish.ERASE, 100)).tick(120)
    _, batcher = run(log)
    batcher.observe(located(Topic.OUTCOMES, Tick("t", 0), 99, 601.999))
    assert len(list(batcher._store.entries())) == 3
    batcher.observe(located(Topic.OUTCOMES, Tick("t", 0), 100, 602))
    assert list(batcher._store.entries()) == []


def test_pending_members_are_not_forgotten():
    log = Log(outcome("a")).tick(700).write(701, outcome("a"))
    _, batcher = run(log)
    assert (batcher._head.read, len(batcher._room)) == (1, 1)


BROKEN = {
    "key": (outcome("a"), {"key": b"b"}),
    "no id": (outcome(""), {}),
    "reserved id": (outcome("\x00a"), {}),
    "long id": (outcome("a" * 257), {}),
    "long user": (request(UserWish.ERASE, 1, user_id="u" * 257), {}),
    "request of nobody": (request(UserWish.ERASE, 103, user_id=""), {}),
    "neither": (outcome("a", reward=None), {}),
    "both": (outcome("a", exclusion="bot"), {}),
    "nan": (outcome("a", reward=math.nan), {}),
    "infinite": (outcome("a", latency_ms=math.inf), {}),
    "revision": (outcome("a", revision=-1), {}),
    "revision of nothing": (outcome("a", previous_reward=1.0), {}),
    "no tokens": (outcome("a", sampled_tokens=0), {}),
    "no version": (outcome("a", version_min=-1, version_max=-1), {}),
    "undecodable": (None, {}),
    "tombstone of no text": (None, {"key": b"\xff", "value": None}),
    "wrong type": (Document("d", "s", "t"), {}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_records_are_rejected_and_the_stream_continues(name):
    record, changes = BROKEN[name]
    log = Log(outcome("ok", user_id=""))
    log.write(103, record, **changes).write(104, outcome("too")).tick(200)
    outputs, _ = run(log)
    (rejected,) = [o for o in outputs if isinstance(o, Rejected)]
    assert rejected.reason
    assert rejected.located is log.records[1]
    assert [names(b) for b in records_of(outputs)] == [["ok", "too"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_members": 5, "max_members": 4}, "is above max_members"),
        ({"max_members": 5_000}, "less than or equal"),
        ({"max_share_per_user": 0.0}, "greater than 0"),
        ({"leftovers": "use"}, "drop"),
        ({"size": 3}, "Extra inputs"),
    ],
)
def test_unusable_settings_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        BatchSettings(**changes)


# Any log


@st.composite
def logs(draw) -> Log:
    """Outcomes of three users and three versions with revisions, duplicates, erasures, tombstones and junk."""
    log = Log()
    at_s = 100.0
    latest: dict[str, Outcome] = {}
    for _ in range(draw(st.integers(1, 30))):
        at_s += draw(st.sampled_from([0.0, 0.0, 0.5, 3.0, 12.0]))
        kind = draw(st.sampled_from(["first"] * 5 + ["revision"] * 3 + ["again", "erase", "tombstone", "tick", "junk"]))
        if kind == "first":
            name = f"i{draw(st.integers(0, 11))}"
            version = draw(st.sampled_from([3, 3, 3, 4]))
            record = outcome(
                name,
                user_id=draw(st.sampled_from("uvw")),
                version_min=version,
                version_max=version + draw(st.sampled_from([0, 0, 0, 1])),
                sampled_tokens=draw(st.integers(1, 20)),
                arm=draw(st.sampled_from(["stable", "stable", "canary"])),
                served_at=round((at_s - draw(st.sampled_from([0.0, 1.0, 40.0]))) * SECOND_US),
                map_version=draw(st.sampled_from(["map-1"] * 6 + ["map-2"])),
            )
            if draw(st.integers(0, 4)) == 0:
                record = replace(record, reward=None, exclusion="no_signal")
            record = latest.setdefault(name, record)
            log.write(at_s, record)
        elif kind == "revision" and latest:
            name = draw(st.sampled_from(sorted(latest)))
            before = latest[name]
            reward = draw(st.sampled_from([r for r in (1.0, -1.0, None) if r != before.reward]))
            latest[name] = replace(
                before,
                revision=before.revision + 1,
                reward=reward,
                previous_reward=before.reward,
                exclusion="" if reward is not None else "no_signal",
            )
            log.write(at_s, latest[name])
        elif kind == "again" and log.records:
            log.write(at_s, draw(st.sampled_from(log.records)).record)
        elif kind == "erase":
            log.write(at_s, request(UserWish.ERASE, at_s - draw(st.sampled_from([0, 20])), draw(st.sampled_from("uv"))))
        elif kind == "tombstone" and latest:
            log.write(at_s, None, key=draw(st.sampled_from(sorted(latest))).encode(), value=None)
        elif kind == "junk":
            log.write(at_s, None)
        else:
            log.tick(at_s)
    return log


SETTINGS = st.builds(
    settings_of,
    leftovers=st.sampled_from(["drop", "keep"]),
    corrections=st.sampled_from(["count", "next_batch"]),
    min_members=st.integers(1, 3),
    max_members=st.sampled_from([3, 100]),
    max_share_per_user=st.sampled_from([0.3, 0.5, 1.0]),
    arms=st.sampled_from([[], ["stable"]]),
    done_ttl_s=st.sampled_from([15, 500]),
)


@settings(max_examples=150)
@given(logs(), SETTINGS)
def test_the_counts_add_up_and_every_batch_is_valid(log, rules):
    """Count everything again from the batches and the log, independently of the batcher's counts."""
    rules = rules.model_copy(update={"done_ttl_s": 500})
    batcher = batcher_of(rules)
    outputs = [output for record in log.records for output in batcher.observe(record)]
    found = records_of(outputs)
    carried = {
        (r.record.interaction_id, r.record.revision)
        for r in log.records
        if isinstance(r.record, Outcome) and (r.record.reward is not None or r.record.previous_reward is not None)
    }
    dropped = sum((Counter(b.dropped) for b in found), Counter()) + Counter(batcher._head.dropped)
    members = sum(len(b.members) for b in found)
    waiting = len(batcher._room)
    # A revision read before a lower revision would make the lower one a duplicate; these logs do not contain that.
    assert len(carried) == members + sum(dropped.values()) + waiting
    reasons = "old_version mixed_versions other_arm old_map erased user_cap correction replaced"
    assert set(dropped) <= set(reasons.split())
    head = batcher._head
    assert (head.read, head.batched, head.lost) == (len(carried), members, sum(dropped.values()))
    assert [b.sequence for b in found] == list(range(len(found)))
    first_times = Counter(m.interaction_id for b in found for m in b.members if not m.correction)
    assert all(n == 1 for n in first_times.values())
    for batch in found:
        assert {(m.version_min, m.version_max) for m in batch.members if not m.correction} == {(batch.version,) * 2}
        assert names(batch) == sorted(set(names(batch)))
        assert rules.min_members <= sum(not m.correction for m in batch.members) <= rules.max_members
        assert batch.tokens == sum(m.sampled_tokens for m in batch.members)
        per_user = Counter(m.user_id for m in batch.members if not m.correction)
        kept = sum(per_user.values())
        assert max(per_user.values()) <= max(1, rules.max_share_per_user * kept)
        assert not any(m.correction for m in batch.members) or rules.corrections == "next_batch"


@settings(max_examples=150)
@given(logs(), SETTINGS, st.lists(st.integers(0, 50), max_size=6), st.integers(1, 7), st.booleans())
def test_a_worker_killed_anywhere_repeats_batches_but_changes_none(log, rules, kills, batch, atomic):
    inputs = {Topic.OUTCOMES: log.records}
    check_kills(inputs, lambda state: batcher_of(rules, state), [(n, ()) for n in kills], batch, atomic)
