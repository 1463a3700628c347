"""The line of versions after the gate's decisions: where training continues, and that a restart decides the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.records import build
from tidemill.schemas.records import GateDecision, GateVerdict
from tidemill.trainer.online_queue import WeightLine

V = GateVerdict


def decision(verdict: GateVerdict, version: int | None, run_id: str = "run", branch: str = "main") -> GateDecision:
    return build(GateDecision, run_id=run_id, branch=branch, verdict=verdict, version=version, decided_by="test")


def line_of(*events: tuple[GateVerdict, int | None] | int) -> WeightLine:
    """Make a line from events in order: a decision, or the version that the next step started from."""
    line, step = WeightLine("run", "main"), 0
    for event in events:
        if isinstance(event, int):
            step += 1
            line.made(step, event, line.decisions)
        else:
            line.observe(decision(*event))
    return line


CHAIN = (0, 1, 2, 3, 4)
"""Versions 1 to 5, each made from the previous one."""


@pytest.mark.parametrize(
    ("events", "start"),
    [
        ((), 0),
        (CHAIN, 5),
        ((*CHAIN, (V.PROMOTE, 3)), 5),
        ((*CHAIN, (V.HOLD, 3), (V.CANARY, 4), (V.ADMIT, 3)), 5),
        ((*CHAIN, (V.REJECT, 4)), 3),
        ((*CHAIN, (V.PROMOTE, 2), (V.REJECT, 5)), 2),
        ((*CHAIN, (V.PROMOTE, 2), (V.REJECT, 1)), 0),
        ((*CHAIN, (V.ADMIT, 2), (V.REJECT, 5)), 2),
        ((*CHAIN, (V.PROMOTE, 2), (V.ADMIT, 4), (V.REJECT, 5)), 2),
        ((*CHAIN, (V.ROLL_BACK, 3)), 3),
        ((*CHAIN, (V.ROLL_BACK, 3), (V.RELEASE, None)), 5),
        ((*CHAIN, (V.ROLL_BACK, 3), 3), 6),
        ((*CHAIN, (V.ROLL_BACK, 3), 3, (V.RELEASE, None)), 6),
        ((*CHAIN, (V.ROLL_BACK, 3), 3, (V.REJECT, 6)), 3),
        ((*CHAIN, (V.ROLL_BACK, 3), 3, (V.REJECT, 5)), 6),
        ((*CHAIN, (V.ROLL_BACK, 3), (V.REJECT, 5), (V.RELEASE, None)), 4),
        ((*CHAIN, (V.PROMOTE, 3), (V.REJECT, 4), 3, (V.PROMOTE, 4)), 4),
        ((*CHAIN, (V.PROMOTE, 3), (V.REJECT, 4), 3, (V.PROMOTE, 4), 4), 7),
        ((*CHAIN, (V.REJECT, 99)), 5),
    ],
)
def test_training_continues_from_the_right_version(events, start) -> None:
    assert line_of(*events).start() == start


def test_decisions_of_other_runs_and_branches_are_ignored() -> None:
    line = line_of(*CHAIN)
    line.observe(decision(V.REJECT, 3, run_id="other"))
    line.observe(decision(V.REJECT, 3, branch="other"))
    assert (line.start(), line.decisions) == (5, 0)


def test_lag_is_counted_along_the_line() -> None:
    line = line_of(*CHAIN, (V.ROLL_BACK, 3), 3)
    assert [line.lag(version, 6) for version in (6, 3, 1, 5, 9)] == [0, 1, 3, None, None]


def test_only_descendants_of_an_admitted_version_may_learn() -> None:
    line = line_of(*CHAIN, (V.ADMIT, 4), (V.ROLL_BACK, 3), 3)
    assert [line.is_admitted(version) for version in (3, 4, 5, 6, 9)] == [False, True, True, False, False]


def test_a_line_without_a_usable_version_is_an_error_with_advice() -> None:
    with pytest.raises(RuntimeError, match=r"tidemill gate rollback"):
        line_of(*CHAIN, (V.REJECT, 0)).start()


def test_after_a_restart_a_roll_back_abandons_only_versions_made_before_it() -> None:
    line = line_of(*CHAIN)
    line.made(6, 3, 1)
    line.observe(decision(V.ROLL_BACK, 3))
    assert (line.start(), line.abandoned) == (6, {4, 5})


def test_milestones_are_the_newest_versions_to_roll_back_to() -> None:
    line = line_of(*CHAIN, (V.ADMIT, 1), (V.PROMOTE, 1), (V.PROMOTE, 2), (V.PROMOTE, 3), (V.PROMOTE, 2))
    assert line.milestones(2) == {1, 2, 3}


EVENTS = st.lists(
    st.one_of(
        st.just(None),
        st.tuples(st.sampled_from([V.REJECT, V.ROLL_BACK, V.PROMOTE, V.ADMIT, V.HOLD]), st.integers(0, 12)),
        st.just((V.RELEASE, None)),
    ),
    max_size=25,
)


@given(events=EVENTS)
@settings(max_examples=300)
def test_a_restart_decides_as_the_running_trainer_did(events) -> None:
    """A restarted trainer reads all steps first and then all decisions; the running one read them as they arrived."""
    running, steps, decisions = WeightLine("run", "main"), [], []
    for event in events:
        if event is None:
            try:
                parent = running.start()
            except RuntimeError:
                continue
            steps.append((len(steps) + 1, parent, running.decisions))
            running.made(*steps[-1])
        else:
            # A decision cannot name a version that is not made yet.
            if event[1] is not None and event[1] > len(steps):
                continue
            decisions.append(decision(*event))
            running.observe(decisions[-1])
    again = WeightLine("run", "main")
    for step in steps:
        again.made(*step)
    for said in decisions:
        again.observe(said)
    assert again.abandoned == running.abandoned
    assert {v for v in range(len(steps) + 1) if again.is_admitted(v)} == {
        v for v in range(len(steps) + 1) if running.is_admitted(v)
    }


@given(events=EVENTS)
@settings(max_examples=300)
def test_rejected_versions_are_never_trained_from_unless_they_are_promoted_later(events) -> None:
    line, step, rejected = WeightLine("run", "main"), 0, set()
    for event in events:
        if event is None:
            try:
                parent = line.start()
            except RuntimeError:
                continue
            assert rejected.isdisjoint(line.ancestry(parent))
            step += 1
            line.made(step, parent, line.decisions)
        elif event[1] is None or event[1] <= step:
            line.observe(decision(*event))
            if event[0] is V.REJECT:
                rejected.add(event[1])
            elif event[0] in (V.ROLL_BACK, V.PROMOTE):
                rejected -= set(line.ancestry(event[1]))
