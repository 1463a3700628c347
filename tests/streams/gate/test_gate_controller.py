"""The gate's machine: its decisions on the evidence, the priority of people's decisions, and restarts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.streams.gate.gate_support import QUICK, RUN, SECOND, Product, ack, bench, manifest, outcome, said
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.gate_decisions import EVIDENCE, GENERATION
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import GateDecision, GateVerdict, RolloutStatus, Tick, UserRequest, UserWish
from tidemill.streams.gate import role
from tidemill.streams.gate.controller import GateController


def tick(product, seconds):
    return product.write(Tick("test", 0), seconds)


def test_a_better_candidate_is_promoted_in_stages():
    product = Product()
    product.start()
    assert product.decisions == [("admit", 0), ("canary", 1), ("canary", 1)]
    _, opened, compared = (record for record, _ in product.log if isinstance(record, GateDecision))
    assert (opened.numbers["share"], compared.numbers["share"]) == (0.0, 0.5)
    assert compared.numbers["bench/rate"] == compared.numbers["baseline_bench/rate"] == 0.75
    count = product.traffic(0.9, 0.4, (1, 0))
    made = product.last()
    assert (made.verdict, made.version, made.decided_by) == (GateVerdict.PROMOTE, 1, "gate")
    numbers = made.numbers
    assert numbers["canary/interactions"] + numbers["stable/interactions"] == count < 200
    assert numbers["canary/users"] >= QUICK.min_users <= numbers["stable/users"]
    assert numbers["canary/reward"] > 0.4 > numbers["stable/reward"]
    assert numbers["p_better"] <= QUICK.alpha or numbers["p_not_worse"] <= QUICK.alpha
    assert 0 < numbers["seconds_in_stage"] == pytest.approx(count * 0.01, rel=0.01)
    assert numbers["e_not_worse"] >= numbers["e_better"]


def test_a_worse_candidate_is_rejected():
    product = Product()
    product.start()
    product.traffic(0.4, 0.9, (1, 0))
    made = product.last()
    assert (made.verdict, made.version) == (GateVerdict.REJECT, 1)
    assert made.numbers["p_worse"] <= QUICK.alpha and "worse" in made.reason
    assert made.numbers[EVIDENCE] == 1.0
    assert tick(product, 10.0) == []


def test_a_candidate_within_the_margin_is_promoted_and_one_beyond_it_is_not():
    gate = QUICK.model_copy(update={"margin": 0.4})
    for worse, verdict in ((0.05, GateVerdict.PROMOTE), (0.45, GateVerdict.REJECT)):
        product = Product(gate, seed=5)
        product.start()
        product.traffic(0.7 - worse, 0.7, (1, 0), most=4_000)
        assert product.last().verdict is verdict


def test_no_candidate_reaches_users_past_a_failed_bench():
    product = Product()
    product.start(baseline_successes=16, candidate_successes=4)
    assert product.decisions == [("admit", 0), ("canary", 1), ("reject", 1)]
    assert "significantly worse" in product.last().reason
    floor = Product(QUICK.model_copy(update={"floor": 0.5}))
    floor.start(baseline_successes=8, candidate_successes=7)
    assert floor.decisions == [("canary", 1), ("reject", 1)]
    assert "below the floor" in floor.last().reason


def test_the_floor_admits_once_and_descendants_inherit():
    product = Product(QUICK.model_copy(update={"floor": 0.5}))
    product.publish(0, 1)
    product.write(bench(0, 9))
    assert not product.keeper.snapshot().admitted and ("admit", 0) not in product.decisions
    product.write(bench(1, 15))
    assert ("admit", 1) in product.decisions
    product.publish(2)
    product.write(bench(2, 15))
    assert [version for verdict, version in product.decisions if verdict == "admit"] == [1]
    assert product.last().numbers["bench/lower"] >= 0.5


def test_only_whole_completed_held_out_rollouts_count_for_the_bench():
    product = Product()
    product.publish(0, 1)
    good = bench(1, 16)
    mixed = [replace(member, version_min=0) for member in good.members]
    failed = [replace(member, status=RolloutStatus.FAILED, reward=None, success=None) for member in good.members]
    for members in (mixed, failed, good.members[:15], good.members[:15]):
        product.write(replace(good, members=members))
        assert product.decisions == [("canary", 1)]
    product.write(good)
    assert product.decisions[-2:] == [("admit", 1), ("canary", 1)]


def test_versions_published_during_a_trial_are_skipped_and_named():
    product = Product()
    product.start()
    product.publish(2, 3, 4)
    assert product.keeper.snapshot().candidate == 1
    product.traffic(0.9, 0.4, (1, 0))
    assert tick(product, 0.5) == []
    [opened] = tick(product, QUICK.settle_s)
    assert (opened.verdict, opened.version, opened.numbers["skipped"]) == (GateVerdict.CANARY, 4, 2.0)
    assert "skipped: 2, 3" in opened.reason


def test_a_candidate_without_bench_results_does_not_block_newer_ones():
    product = Product()
    product.publish(0, 1)
    tick(product, QUICK.bench_seconds + 1)
    assert product.decisions == [("canary", 1)]
    product.publish(2)
    assert product.decisions == [("canary", 1), ("canary", 2)]
    assert "version 1 is skipped: 0 of 16 rollouts" in product.last().reason


@pytest.mark.parametrize(("promote", "verdict"), [(True, GateVerdict.PROMOTE), (False, GateVerdict.HOLD)])
def test_a_comparison_without_evidence_ends_as_the_settings_say(promote, verdict):
    update = {"promote_without_evidence": promote, "margin": 0.01, "max_interactions": 30}
    product = Product(QUICK.model_copy(update=update))
    product.start()
    product.traffic(0.5, 0.5, (1, 0))
    made = product.last()
    assert (made.verdict, made.numbers["canary/interactions"]) == (verdict, 30.0)
    assert made.numbers[EVIDENCE] == 0.0
    timed = Product(QUICK.model_copy(update={**update, "max_interactions": 9999, "max_seconds": 5.0}))
    timed.start()
    assert tick(timed, 6.0) == [], "nobody came: there is nothing to decide on"
    timed.traffic(0.5, 0.5, (1, 0))
    assert timed.last().verdict is verdict


@pytest.mark.parametrize("arm", ["fallback", "stable"])
def test_users_with_fallback_answers_count_when_the_canary_is_back(arm: str):
    product = Product(QUICK.model_copy(update={"max_seconds": 5.0, "promote_without_evidence": True, "min_users": 3}))
    product.start()
    for name in ("ann", "bob", "cid"):
        product.serve(arm, 0, 1.0, user=name)
        product.serve("stable", 0, 1.0, user=f"{name}'s neighbour")
    tick(product, 6.0)
    for name in ("ann", "bob", "cid"):
        product.serve("canary", 1, 1.0, user=name)
    tick(product, QUICK.user_window_s + 1.0)
    # Answers of the stable arm would put these users into that arm, and the canary arm would have too few users.
    assert (product.last().verdict is GateVerdict.PROMOTE) == (arm == "fallback")


@pytest.mark.parametrize(
    "change", [{"observed": {"edit_made": 0.0}}, {"observed": {"edit_made": 1.0, "question_asked": 1.0}},
    {"observed": {"edit_made": 1.0, "tool_error": 1.0}}, {"sampled_tokens": 400}, {"sampled_tokens": 4},
    {"latency_ms": 9_000.0}],
)  # fmt: skip
def test_a_guardrail_stops_a_candidate_with_a_better_reward(change):
    for on_alert, verdict in (("reject", GateVerdict.REJECT), ("hold", GateVerdict.HOLD)):
        product = Product(QUICK.model_copy(update={"on_alert": on_alert, "min_users": 1000}))
        product.start()
        product.traffic(0.9, 0.5, (1, 0), **change)
        made = product.last()
        assert made.verdict is verdict and "guardrail" in made.reason
        assert any(name.startswith("p_alert/") for name in made.numbers)


def test_an_improvement_is_no_alert():
    product = Product(QUICK.model_copy(update={"min_users": 1000}))
    product.start()
    product.traffic(0.6, 0.6, (1, 0), most=400, latency_ms=10.0, observed={"edit_made": 1.0})
    assert product.keeper.snapshot().stage == "comparison"


def test_a_hack_cannot_hide_in_the_exclusions():
    product = Product()
    product.start()
    for number in range(200):
        if product.serve("stable", 0, 1.0) or product.serve("canary", 1, None if number % 2 else 1.0):
            break
    made = product.last()
    assert made.verdict is GateVerdict.REJECT and "excluded/no_signal" in made.reason
    ignored = Product(QUICK.model_copy(update={"ignored": frozenset({"excluded/no_signal"}), "min_users": 1000}))
    ignored.start()
    for number in range(200):
        assert not ignored.serve("stable", 0, 1.0) + ignored.serve("canary", 1, None if number % 2 else 1.0)


def test_many_small_changes_are_detected_against_the_first_baseline():
    product = Product(QUICK.model_copy(update={"min_users": 30, "rate_tolerance": 0.2, "drift_rate_tolerance": 0.3}))
    product.start()
    rate = 0.95
    for version in range(1, 9):
        for _ in range(400):
            both = [("stable", version - 1, rate), ("canary", version, rate - 0.1)]
            if any(product.serve(arm, v, 1.0, observed={"edit_made": float(product.random.random() < r)})
                   for arm, v, r in both):  # fmt: skip
                break
        if product.last().verdict is not GateVerdict.PROMOTE:
            break
        rate -= 0.1
        tick(product, 2.0)
        product.publish(version + 1)
        product.write(bench(version + 1, 12))
    made = product.last()
    assert made.verdict is GateVerdict.HOLD and "the tolerance: edit_rate" in made.reason
    assert made.numbers["stable/edit_rate"] - made.numbers["canary/edit_rate"] < 0.2 + 0.1
    tried = product.keeper.snapshot().head
    product.write(said(GateVerdict.RELEASE, None, product.now))
    tick(product, 2.0)
    assert product.last().verdict is GateVerdict.CANARY and product.last().version == tried
    for _ in range(400):
        edits = {"edit_made": float(product.random.random() < 0.2)}
        if product.serve("stable", tried - 1, 1.0, observed=edits) or product.serve(
            "canary", tried, 1.0, observed=edits
        ):
            break
    assert product.last().verdict is GateVerdict.PROMOTE, "the release accepted the drift"


def test_a_release_after_a_hold_without_evidence_accepts_no_drift():
    product = Product(QUICK.model_copy(update={"margin": 0.01, "max_interactions": 40}))
    product.start()

    def compared(edit_made: float) -> GateDecision:
        while not product.serve("stable", 0, 0.0, observed={"edit_made": edit_made}) and not product.serve(
            "canary", 1, 0.0, observed={"edit_made": edit_made}
        ):
            pass
        return product.last()

    assert (compared(1.0).verdict, product.last().numbers[EVIDENCE]) == (GateVerdict.HOLD, 0.0)
    product.write(said(GateVerdict.RELEASE, None, product.now))
    tick(product, 2.0)
    made = compared(0.0)
    assert made.verdict is GateVerdict.HOLD and "first baseline by more than the tolerance: edit_rate" in made.reason


def collapse(product, version=1, most=400):
    return next((made for _ in range(most) if (made := product.serve("stable", version, -1.0))), [])


def promoted(gate=QUICK):
    product = Product(gate)
    product.write(ack("canary-1", 0, product.now))
    product.start()
    product.write(ack("canary-1", 1, product.now))
    product.traffic(0.9, 0.5, (1, 0))
    assert product.last().verdict is GateVerdict.PROMOTE
    return product


def test_a_late_collapse_is_rolled_back_and_never_served_again():
    product = promoted()
    first, second = collapse(product)
    assert (first.verdict, first.version) == (GateVerdict.ROLL_BACK, 0)
    assert "version 1 collapsed after its promotion: reward is -1" in first.reason
    assert first.numbers["p_alert/reward"] <= QUICK.guard_alpha
    assert (second.verdict, second.version) == (GateVerdict.REJECT, 1)
    assert product.keeper.snapshot().promoted == 0
    product.publish(2)
    assert tick(product, 2.0)[-1].version == 2, "the gate goes on with what is trained next"


def test_a_collapse_after_the_watch_window_does_not_roll_back():
    product = promoted(QUICK.model_copy(update={"watch_seconds": 5.0}))
    assert product.keeper.snapshot().watched == 1
    tick(product, 6.0)
    assert product.keeper.snapshot().watched is None and collapse(product) == []


def test_users_whose_own_window_is_longer_than_the_watch_count_at_its_end():
    product = promoted(QUICK.model_copy(update={"watch_seconds": 5.0, "outcomes_per_user": 2, "user_window_s": 8.0}))
    assert not any(product.serve("stable", 1, -1.0) for _ in range(200)), "each user may get a second outcome"
    first, *_ = tick(product, 6.0)
    assert (first.verdict, first.version) == (GateVerdict.ROLL_BACK, 0)


def test_a_collapse_during_the_next_trial_ends_it():
    product = promoted()
    product.publish(2)
    tick(product, 2.0)
    product.write(bench(2, 12))
    assert product.keeper.snapshot().stage == "comparison"
    assert [made.verdict for made in collapse(product)] == [GateVerdict.ROLL_BACK, GateVerdict.REJECT]
    assert product.keeper.snapshot().stage == "idle"
    assert (tick(product, 2.0)[0].version, product.keeper.snapshot().stage) == (2, "comparison")


def test_nothing_is_decided_during_a_persons_hold():
    product = Product()
    product.start()
    product.write(said(GateVerdict.HOLD, 0, product.now, reason="a launch today"))
    assert product.traffic(0.1, 0.9, (1, 0)) == 2_000
    product.publish(2)
    product.write(bench(2, 16))
    tick(product, 1e4)
    held = product.keeper.snapshot()
    assert (held.stage, held.held_by.decided_by, held.held_by.reason) == ("held", "ada", "a launch today")
    product.write(said(GateVerdict.RELEASE, None, product.now))
    tick(product, 2.0)
    assert product.decisions[-3:] == [("release", None), ("canary", 2), ("canary", 2)]


def test_a_decision_that_crosses_a_hold_is_rolled_back():
    product = Product()
    product.start()
    held = said(GateVerdict.HOLD, 0, product.now)
    other = said(GateVerdict.PROMOTE, 1, product.now, by="gate")
    product.write(held)
    [again] = product.write(replace(other, numbers={GENERATION: 1.0}))
    assert (again.verdict, again.version) == (GateVerdict.ROLL_BACK, 0)
    assert again.reason == "hold by ada applies; promote 1 was decided after it"
    assert tick(product, 10.0) == []
    assert product.keeper.snapshot().promoted == 0 and product.keeper.snapshot().held_by == held


def test_a_veto_ends_a_trial_and_rolls_back_a_promotion():
    product = Product()
    product.start()
    product.write(said(GateVerdict.REJECT, 1, product.now))
    assert product.keeper.snapshot().stage == "idle"
    assert product.traffic(0.9, 0.1, (1, 0), most=200) == 200
    served = promoted()
    [back] = served.write(said(GateVerdict.REJECT, 1, served.now))
    assert (back.verdict, back.version) == (GateVerdict.ROLL_BACK, 0)
    assert tick(served, 10.0) == []


def test_a_persons_roll_back_holds():
    product = promoted()
    product.write(said(GateVerdict.ROLL_BACK, 0, product.now))
    product.publish(2)
    product.write(bench(2, 16))
    assert tick(product, 100.0) == [] and product.keeper.snapshot().promoted == 0
    assert product.write(said(GateVerdict.RELEASE, None, product.now)) == []
    assert tick(product, 2.0)[0].version == 2


def test_revisions_replace_and_duplicates_do_not_count():
    product = Product(QUICK.model_copy(update={"max_seconds": 50.0, "outcomes_per_user": 2, "min_users": 5}))
    product.start()
    for number in range(6):
        for arm, version in (("stable", 0), ("canary", 1)):
            user = f"{arm}{number}"
            first = outcome(2 * number, arm, version, product.now, -1.0, user, interaction_id=f"{user}/1")
            product.write(first)
            product.write(first)
            product.write(replace(first, revision=1, reward=1.0, previous_reward=-1.0))
            product.write(replace(first, revision=0, reward=-1.0))
    assert product.keeper.snapshot().numbers["canary/interactions"] == 6
    [made] = tick(product, 100.0)
    assert (made.numbers["canary/reward"], made.numbers["canary/users"]) == (1.0, 6.0)


def test_a_reward_that_is_withdrawn_after_its_user_was_counted_stays_in_the_evidence():
    product = Product(QUICK.model_copy(update={"outcomes_per_user": 2}))
    product.start()
    both = [outcome(n, "canary", 1, product.now, reward, "ann") for n, reward in ((1, 1.0), (2, -1.0))]

    def withdraw(made):
        product.write(replace(made, revision=1, reward=None, exclusion="no_signal", previous_reward=made.reward))
        return product.keeper.snapshot().numbers["canary/reward"]

    for made in both:
        product.write(made)
    assert product.keeper.snapshot().numbers["canary/reward"] == 0.0
    assert [withdraw(made) for made in both] == [-1.0, -1.0]
    assert product.keeper.snapshot().numbers["canary/users"] == 1.0


def test_outcomes_of_no_arm_are_ignored():
    product = Product(QUICK.model_copy(update={"min_users": 1}))
    product.start()
    at = product.now
    strays = [
        outcome(1, "canary", 0, at, 1.0), outcome(2, "stable", 1, at, 1.0), outcome(3, "other", 1, at, 1.0),
        outcome(4, "canary", 1, at - 10 * SECOND, 1.0), outcome(5, "canary", 1, at, 1.0, version_min=0),
        outcome(6, "canary", 1, at, 1.0, run_id="other"), outcome(7, "canary", 1, at, 1.0, branch="other"),
    ]  # fmt: skip
    for stray in strays:
        product.write(stray)
    numbers = product.keeper.snapshot().numbers
    assert numbers["canary/interactions"] == numbers["stable/interactions"] == 0


def test_an_erased_user_is_not_counted():
    product = Product(QUICK.model_copy(update={"outcomes_per_user": 2}))
    product.start()
    product.serve("canary", 1, 1.0, "erased")
    product.write(UserRequest("q", "erased", UserWish.ERASE, "erased", product.now))
    product.serve("canary", 1, 1.0, "erased")
    assert product.keeper.snapshot().numbers["canary/users"] == 0
    product.serve("canary", 1, 1.0, "erased")
    assert product.keeper.snapshot().numbers["canary/users"] == 1


def replayed(log, generation=2.0, gate=QUICK):
    """Return a restarted gate that has read the log again: in the order of time, decisions after their evidence."""
    keeper = GateController(RUN, gate, generation)
    ordered = sorted(log, key=lambda entry: (entry[1], isinstance(entry[0], GateDecision)))
    for record, at in ordered:
        keeper.observe(record, at)
    return keeper


def without_generation(decisions):
    return [replace(d, numbers={k: v for k, v in d.numbers.items() if k != GENERATION}) for d in decisions]


def test_a_restart_at_any_record_decides_the_same():
    product = promoted()
    product.publish(2)
    tick(product, 2.0)
    product.write(bench(2, 14))
    product.traffic(0.2, 0.8, (2, 1))
    made = [place for place, (record, _) in enumerate(product.log) if isinstance(record, GateDecision)]
    assert [product.log[place][0].verdict.value for place in made] == [
        "admit", "canary", "canary", "promote", "canary", "canary", "reject",
    ]  # fmt: skip
    for place in made:
        keeper = replayed(product.log[:place])
        assert without_generation(keeper.due()) == without_generation([product.log[place][0]])
        keeper = replayed(product.log[: place + 1])
        followed = product.log[place + 1 : place + 2]
        due = bool(followed) and isinstance(followed[0][0], GateDecision)
        assert bool(keeper.due()) == due, "what is in the log is not decided again"
    assert replayed([*product.log, *product.log]).snapshot() == replayed(product.log).snapshot()


def test_two_gates_write_the_same_and_count_nothing_twice():
    first, second = GateController(RUN, QUICK, 1.0), GateController(RUN, QUICK, 2.0)
    product = Product()
    product.start()
    product.traffic(0.9, 0.4, (1, 0))
    for record, at in product.log:
        if isinstance(record, GateDecision):
            own, other = first.due(), second.due()
            assert without_generation(own) == without_generation(other) == without_generation([record])
            for keeper in (first, second):
                for decision in (*own, *other):
                    keeper.observe(decision, at)
        else:
            first.observe(record, at)
            second.observe(record, at)
    assert first.due() == second.due() == []
    assert first.snapshot() == second.snapshot()
    assert [made.verdict.value for made in first.snapshot().decisions] == [
        verdict for verdict, _ in product.decisions for _ in range(2)
    ]
    assert first.snapshot().promoted == 1


def test_records_of_another_run_change_nothing():
    other = RunSettings(run_id="other")
    keeper = GateController(RUN, QUICK, 1.0)
    for record in (manifest(0, other), manifest(1, other), bench(1, 16, run=other), ack("a", 1, 1, other)):
        assert keeper.observe(record, 10 * SECOND) == []
    assert keeper.snapshot().promoted == -1 and keeper.snapshot().serving == {}


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("publish")),
        st.tuples(st.just("bench"), st.integers(0, 16)),
        st.tuples(st.just("users"), st.sampled_from([0.05, 0.5, 0.95]), st.integers(1, 60)),
        st.tuples(st.just("person"), st.sampled_from(["hold", "reject", "roll_back", "release"]), st.integers(0, 4)),
        st.tuples(st.just("time"), st.floats(0.1, 100)),
    ),
    max_size=25,
)


def play(product, event):
    state = product.keeper.snapshot()
    match event:
        case ("publish",):
            return product.publish(state.head + 1)
        case ("bench", successes):
            version = state.promoted if state.candidate is None else state.candidate
            product.write(bench(version, successes, name=f"{product.now}-"))
        case ("users", chance, count):
            candidate = state.promoted if state.candidate is None else state.candidate
            product.traffic(chance, 0.5, (candidate, state.promoted), most=count)
        case ("person", verdict, version):
            known = None if verdict == "release" else min(version, state.head)
            product.write(said(GateVerdict(verdict), known, product.now))
        case ("time", seconds):
            tick(product, seconds)


@settings(max_examples=60)
@given(EVENTS)
def test_no_sequence_of_records_breaks_a_rule(events):
    product = Product()
    product.publish(0)
    for event in events:
        play(product, event)
    held, rejected, benched, compared = False, set(), set(), set()
    for record, _ in product.log:
        if not isinstance(record, GateDecision):
            continue
        if GENERATION in record.numbers:
            assert not held, "a gate decided while a person held"
            if record.verdict in (GateVerdict.CANARY, GateVerdict.PROMOTE):
                assert record.version not in rejected
            if record.verdict is GateVerdict.CANARY:
                (compared if record.numbers["share"] else benched).add(record.version)
                assert record.version in benched, "users before the bench"
            if record.verdict is GateVerdict.PROMOTE:
                assert record.version in compared, "everyone before some"
        held = record.verdict is GateVerdict.HOLD or (held and record.verdict is not GateVerdict.RELEASE)
        held = held or (record.verdict is GateVerdict.ROLL_BACK and GENERATION not in record.numbers)
        rejected |= {record.version} if record.verdict is GateVerdict.REJECT else set()
    again = replayed(product.log)
    assert again.snapshot() == product.keeper.snapshot()
    assert again.due() == []


def test_a_restarted_gate_reads_the_groups_of_all_partitions_in_the_order_of_their_times(monkeypatch):
    groups = {0: (bench(0, 16, name="later"), 20_000), 1: (bench(0, 1, name="earlier"), 10_000)}

    class Partitions(nullcontext):
        """A log with two held-out groups, whose partitions are delivered one after the other."""

        def __init__(self, _kafka, topics, *, share=(0, 1), **_others):
            super().__init__(self)
            self.own = [p for p in groups if Topic.GROUPS in topics and p % share[1] == share[0]]

        def read_to_end(self, _silence_s):
            for p in self.own:
                record, at_ms = groups[p]
                yield ConsumedRecord(Topic.GROUPS, p, 0, at_ms, None, b"", record)

        def next_offsets(self):
            return {(Topic.GROUPS, p): 1 for p in self.own}

    monkeypatch.setattr(role, "LogReader", Partitions)
    controller, begin = role.rebuild(KafkaSettings(), RUN, QUICK, 1)
    assert controller._branch.bench.result(0).successes == 1
    assert begin == {(Topic.GROUPS, 0): 1, (Topic.GROUPS, 1): 1}
