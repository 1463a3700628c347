"""One fold defines the meaning of gate decisions, and every reader agrees with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.streams.gate.gate_support import manifest
from tidemill.compose.demo.state import LoopState, OnlineState
from tidemill.consumers.replica.config import Pool
from tidemill.consumers.replica.state import PoolGate
from tidemill.consumers.weights.chain import Chain
from tidemill.producers.edge.routing import CanaryShare
from tidemill.schemas.config import RunSettings
from tidemill.schemas.gate_decisions import GENERATION, LIMITS, NAMES, BranchDecisions, by_gate, followed
from tidemill.schemas.records import CANARY_SHARE, GateDecision, GateVerdict
from tidemill.streams.gate.branch import Branch
from tidemill.streams.gate.config import GateSettings
from tidemill.trainer.online_queue import WeightLine

V = GateVerdict
NEWEST = 5


def decision(verdict: GateVerdict, version: int | None, share: float | None = None, gate: bool = False) -> GateDecision:
    """A person's decision, or a gate's."""
    numbers = {} if share is None else {CANARY_SHARE: share}
    return GateDecision(
        "r", "main", verdict, version, "why", "x", {**numbers, **({GENERATION: 1.0} if gate else {})}, 0
    )


DECISIONS = st.lists(
    st.builds(
        decision,
        st.sampled_from(V),
        st.integers(0, NEWEST) | st.none(),
        st.sampled_from([None, 0.0, 0.3, 1.0, 7.0]),
        st.booleans(),
    ).map(lambda made: replace(made, version=None) if made.verdict is V.RELEASE else made),
    max_size=12,
).map(lambda log: [replace(made, at=at) for at, made in enumerate(log, start=1)])


def folded(log: list[GateDecision]) -> BranchDecisions:
    branch = BranchDecisions()
    for version in range(NEWEST + 1):
        branch.made(version, version - 1 if version else None)
    for made in log:
        branch.observe(made)
    return branch


def taken(log: list[GateDecision]) -> list[GateDecision]:
    """The decisions that have an effect: those of a gate that met a hold have none, nor those without a version."""
    found: list[GateDecision] = []
    held = False
    for made in log:
        moves = made.verdict in (V.PROMOTE, V.CANARY, V.ROLL_BACK, V.HOLD)
        if (made.version is None and made.verdict is not V.RELEASE) or (held and by_gate(made) and moves):
            continue
        found.append(made)
        if made.verdict is V.HOLD or (made.verdict is V.ROLL_BACK and not by_gate(made)):
            held = True
        elif made.verdict in (V.RELEASE, V.PROMOTE):
            held = False
    return found


@given(DECISIONS)
def test_what_is_served_is_what_the_newest_decisions_say(log):
    branch, found = folded(log), taken(log)
    limits = [made for made in found if made.verdict in LIMITS or made.verdict is V.RELEASE]
    assert branch.limit == (limits[-1] if limits and limits[-1].verdict is not V.RELEASE else None)
    assert branch.served == [made.version for made in found if made.verdict in NAMES]
    assert branch.named == sorted(
        set(branch.served), key=lambda v: max(i for i, s in enumerate(branch.served) if s == v)
    )
    assert branch.rejected == {made.version: made for made in found if made.verdict is V.REJECT}
    assert branch.learners == {v for made in found if made.verdict is V.ADMIT for v in range(made.version, NEWEST + 1)}
    assert branch.decisions == len(log)


@given(DECISIONS)
def test_a_trial_continues_until_a_decision_ends_it(log):
    tried: GateDecision | None = None
    for made in log:
        held = folded(log[: made.at - 1]).hold is not None
        if made.verdict is V.CANARY and (made.version is None or not (held and by_gate(made))):
            tried = None if made.version is None else made
        elif made not in taken(log[: made.at]) or made.verdict is V.ADMIT:
            continue
        elif made.verdict is not V.REJECT or (tried is not None and made.version == tried.version):
            tried = None
        trial = folded(log[: made.at]).trial
        assert (None if trial is None else trial.version) == (None if tried is None else tried.version)
        said = None if tried is None else tried.numbers.get(CANARY_SHARE, 0.0)
        assert trial is None or trial.share == (said if said <= 1.0 else 0.0)


@given(DECISIONS)
def test_every_reader_agrees_with_the_fold(log):
    branch = folded(log)
    tried = None if branch.trial is None else branch.trial.version
    router = CanaryShare("r", "main")
    pools = {pool: PoolGate(pool) for pool in Pool}
    chain = Chain("r", "main")
    line = WeightLine("r", "main")
    demo = OnlineState(LoopState("r"), frozenset({"stable"}), frozenset({"canary"}))
    gate = Branch(RunSettings(run_id="r"), GateSettings())
    for version in range(NEWEST + 1):
        line.made(version, version - 1 if version else None, 0)
        gate.observe(replace(manifest(version), run_id="r"), 1)
    for made in log:
        for reader in (router, *pools.values(), chain, line, demo):
            reader.observe(made)
        gate.observe(made, made.at)
    assert (router.version, router.share) == (tried, 0.0 if branch.trial is None else branch.trial.share)
    assert chain.gate.limit == branch.limit
    for version in range(NEWEST + 1):
        above = branch.limit is not None and version > branch.limit.version
        for pool, replica in pools.items():
            is_tried = pool is Pool.CANARY and version == tried
            assert bool(replica.forbidden(version)) == (version in branch.rejected or (above and not is_tried))
            unnamed = pool is not Pool.ALL and version not in branch.named and not is_tried
            assert bool(replica.objection(version)) == (bool(replica.forbidden(version)) or unnamed)
    allowed = [v for v in reversed(branch.named) if not pools[Pool.STABLE].objection(v)]
    assert pools[Pool.STABLE].preferred(None) == allowed
    if tried is not None:
        assert pools[Pool.CANARY].preferred(None)[0] == tried
    assert line.abandoned == branch.abandoned
    assert {v for v in range(NEWEST + 1) if line.is_admitted(v)} == branch.learners
    assert (gate.trial.version if gate.trial else None) == tried
    assert gate.standing.hold == branch.hold and gate.standing.learners == branch.learners
    assert gate.candidate() in (None, NEWEST) and (gate.candidate() is None) >= (NEWEST in branch.decided)
    assert demo.branch.served == branch.served
    assert (tried is not None) == demo.stage().endswith(("users", "benched"))


@given(DECISIONS, st.integers(1, 3))
def test_a_decision_read_twice_at_once_changes_nothing(log, times):
    once, again = folded(log), folded([made for made in log for _ in range(times)])
    for name in ("limit", "hold", "named", "rejected", "learners", "settled", "abandoned"):
        assert getattr(once, name) == getattr(again, name), name


def test_a_gates_decision_after_a_persons_hold_has_no_effect():
    hold, late = decision(V.HOLD, 0), decision(V.PROMOTE, 3, gate=True)
    branch = folded([decision(V.PROMOTE, 0), hold, late])
    assert (branch.limit, branch.named, branch.overrun) == (hold, [0], late)
    again = decision(V.ROLL_BACK, 0, gate=True)
    branch.observe(again)
    assert (branch.limit, branch.overrun) == (hold, None)
    branch.observe(decision(V.PROMOTE, 3))
    assert (branch.hold, branch.named) == (None, [0, 3])


@pytest.mark.parametrize("verdict", [V.HOLD, V.ROLL_BACK])
def test_a_gates_hold_does_not_replace_a_persons(verdict):
    persons, late = decision(verdict, 0), decision(V.HOLD, 3, gate=True)
    branch = folded([decision(V.PROMOTE, 3), persons, late])
    assert (branch.limit, branch.hold, branch.overrun) == (persons, persons, None)


@pytest.mark.parametrize(
    ("verdict", "version", "served", "done"),
    [
        (V.RELEASE, None, 5, True), (V.RELEASE, None, 4, False), (V.REJECT, 3, 3, False), (V.REJECT, 3, 4, True),
        (V.ROLL_BACK, 3, 3, True), (V.ROLL_BACK, 3, 4, False), (V.HOLD, 3, 3, True), (V.HOLD, 3, 2, False),
    ],
)  # fmt: skip
def test_replicas_that_follow_a_decision(verdict, version, served, done):
    assert followed(decision(verdict, version), served, NEWEST) is done


def test_every_verdict_has_a_meaning():
    for verdict in V:
        objection = folded([]).observe(decision(verdict, None if verdict is V.RELEASE else 1, 0.5))
        assert objection == "", verdict
    for verdict in set(V) - {V.RELEASE}:
        assert "names no version" in folded([]).observe(decision(verdict, None, 0.5))
