"""The accounting of rollouts and the audit of a log, in memory: a sound log passes, a planted fault fails its check."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.consumers.operate.audit_support import (
    GARBAGE,
    OVERDUE_US,
    PLANTED_FAULTS,
    RUN,
    SECOND,
    START_US,
    PlantedFault,
    RunLog,
    plan_anew,
    plan_of,
    plan_on_answer,
    rollout,
    sound_log,
    task,
)
from tests.consumers.product_support import request
from tidemill.consumers.operate.audit.endings import AuditRules
from tidemill.schemas import records as r
from tidemill.schemas.catalogue import DEAD_LETTER_RETENTION_MS, Topic
from tidemill.schemas.config import RunSettings
from tidemill.trainer.batch_builder import BatchBuilder
from tidemill.trainer.choices import ObjectiveName
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.trainable import Reference, TrainableGroup

STATES = {
    "evaluated": 2,
    "excluded: stale": 2,
    "excluded: too_few": 1,
    "failed: deadline": 1,
    "grouped": 2,
    "late": 1,
    "rejected: index 5 is outside a group of 2": 1,
    "running": 2,
    "trained": 8,
}


def test_a_sound_log_passes():
    report = sound_log().audit()
    assert [str(check.first) for check in report.failed] == []
    assert report.states == STATES
    assert report.open == {"grouped": 2, "running": 2}
    assert report.repeated == {"groups": 1, "rollouts": 1, "tokens of repeated rollouts": 4}
    assert report.counts["rollouts"] == sum(STATES.values())


@pytest.mark.parametrize("fault", PLANTED_FAULTS, ids=lambda fault: fault.name)
def test_each_planted_fault_is_found_by_its_check_alone(fault: PlantedFault):
    log = sound_log()
    fault.plant(log)
    report = log.audit()
    assert [(check.name, str(check.first).split(": ")[0]) for check in report.failed] == [(fault.check, fault.at)]


def test_every_check_finds_a_planted_fault():
    assert {fault.check for fault in PLANTED_FAULTS} == {check.name for check in RunLog().audit().checks}


# For any traffic, the results of group assembly and of the trainer's own bookkeeping are sound.

FATES = ("done", "failed", "twice", "slow", "under way")
Traffic = list[tuple[r.Mode, list[str], bool]]
"""For each group: its mode, the fate of each rollout, and whether assembly writes the group again after a crash."""
TRAFFIC: st.SearchStrategy[Traffic] = st.lists(
    st.tuples(
        st.sampled_from([r.Mode.TRAIN, r.Mode.TRAIN, r.Mode.EVAL]),
        st.lists(st.sampled_from(FATES), min_size=2, max_size=3),
        st.booleans(),
    ),
    max_size=6,
)


class LoopLog(RunLog):
    """A run whose groups the trainer's own batch builder accepts or excludes."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.read = 0
        run = RunSettings(run_id=RUN, groups_per_step=2, max_policy_lag=1, min_completed=1, skip_no_signal=False)
        self.builder = BatchBuilder(run, TrainerSettings(objective=ObjectiveName.REINFORCE))

    def play_group(self, number: int, mode: r.Mode, fates: list[str], again: bool) -> None:
        """Play one group as far as its fates allow, and let the trainer read the result."""
        at = START_US + 100 * number * SECOND
        of = task(f"g{number}", len(fates), mode, at)
        if "under way" in fates:
            of = replace(of, deadline_at=START_US + 10**6 * SECOND)
        self.issue(of, self.version)
        for index, fate in enumerate(fates):
            reward = None if fate == "failed" else float(index)
            for _ in range({"twice": 2, "slow": 0, "under way": 0}.get(fate, 1)):
                self.roll(rollout(of, index, reward, self.version), at + SECOND)
        if "slow" in fates:
            self.roll(r.Tick("test", at), at + 61 * SECOND)
        for index, fate in enumerate(fates):
            if fate == "slow":
                self.roll(rollout(of, index, 1.0, self.version), at + 62 * SECOND)
        if again and self.group_offsets[of.group_id]:
            self.put(self.group(self.group_offsets[of.group_id][0]), at=at + 63 * SECOND)
        self._train_on()

    def _train_on(self) -> None:
        for offset in range(self.read, len(self.entries[Topic.GROUPS])):
            group = self.group(offset)
            place = r.StepInput(group.group_id, Topic.GROUPS.value, 0, offset)
            if self.builder.wants(Reference(place, group), self.version):
                self.builder.accept(TrainableGroup(place, group, ()))
            batch = self.builder.close(self.version)
            if batch is not None:
                excluded = [(one.offset, one.reason) for one in batch.exclusions]
                self.train([one.place.offset for one in batch.groups], excluded)
                self.version += 1
        self.read = len(self.entries[Topic.GROUPS])


def played(traffic: Traffic) -> LoopLog:
    log = LoopLog()
    for number, (mode, fates, again) in enumerate(traffic):
        log.play_group(number, mode, fates, again)
    return log


@settings(max_examples=40)
@given(TRAFFIC)
def test_the_loops_log_is_sound_and_every_rollout_is_counted_once(traffic: Traffic):
    log = played(traffic)
    report = log.audit()
    assert [str(check.first) for check in report.failed] == []
    assert sum(report.states.values()) == sum(len(fates) for _, fates, _ in traffic)
    trained = sum(step.rollouts for step in log.records(Topic.STEPS, r.TrainStep))
    assert report.states.get("trained", 0) == trained
    assert report.repeated.get("rollouts", 0) == sum(fates.count("twice") for _, fates, _ in traffic)


@settings(max_examples=25)
@given(TRAFFIC, st.data())
def test_a_rollout_with_damaged_bytes_is_always_reported(traffic: Traffic, data: st.DataObject):
    log = played(traffic)
    offsets = [one.offset for one in log.located(Topic.ROLLOUTS) if isinstance(one.record, r.Rollout)]
    assume(offsets)
    offset = data.draw(st.sampled_from(offsets))
    log.entries[Topic.ROLLOUTS][offset] = replace(log.entries[Topic.ROLLOUTS][offset], value=GARBAGE)
    failed = {check.name: check.first for check in log.audit(ended=True).failed}
    assert "dead_letters" in failed
    assert str(failed["dead_letters"]).startswith(f"rollouts[0]@{offset}: ")


@settings(max_examples=25)
@given(TRAFFIC, st.data())
def test_a_reward_that_was_tampered_with_is_found(traffic: Traffic, data: st.DataObject):
    log = played(traffic)
    groups = len(log.entries[Topic.GROUPS])
    assume(groups)
    number = data.draw(st.integers(0, groups - 1))
    group = log.group(number)
    tampered = replace(group.members[0], reward=(group.members[0].reward or 0.0) + 0.5)
    log.change(Topic.GROUPS, r.Group, number, members=[tampered, *group.members[1:]])
    first = next(check.first for check in log.audit().checks if check.name == "groups")
    assert first is not None
    assert str(first).startswith(f"groups[0]@{number}: ") or "other contents" in str(first)


def test_a_group_that_waits_is_open_until_the_run_is_over():
    log = RunLog()
    log.play(task("g0"), 1.0, 0.0)
    assert log.audit(ended=True).passed
    (check,) = log.audit(complete=True).failed
    assert (check.name, check.offenders) == ("endings", 2)


def test_groups_left_over_after_the_last_step_are_unused():
    log = RunLog()
    log.play(task("g0"), 1.0, 0.0)
    log.play(task("g1"), 1.0, 0.0)
    log.train([0])
    report = log.audit(complete=True, last_step=1)
    assert report.passed
    assert report.states == {"trained": 2, "unused": 2}
    assert not log.audit(complete=True, last_step=2).passed


def test_a_group_that_steps_pass_over_is_lost():
    log = RunLog()
    for number in range(3):
        log.play(task(f"g{number}", at=START_US + number * SECOND), 1.0, 0.0)
    log.train([1])
    assert log.audit().states == {"grouped": 4, "trained": 2}
    log.train([2], parent=1)
    (check,) = log.audit().failed
    assert (check.name, check.offenders) == ("endings", 2)
    assert str(check.first).startswith("groups[0]@0: rollout g0/0 is lost: steps trained on younger groups")


def test_a_task_that_no_worker_plays_any_more_is_lost_even_before_its_deadline():
    log = RunLog()
    log.put(task("g0"), at=START_US)
    assert log.audit().states == {"queued": 2}
    (check,) = log.audit(ended=True).failed
    assert (check.name, check.offenders) == ("endings", 2)


def test_a_rollout_is_in_progress_until_its_deadline_and_the_grace_have_passed():
    log = RunLog()
    log.issue(task("g0"))
    log.roll(r.Tick("test", 0), at=START_US + OVERDUE_US - 3 * SECOND)
    assert log.audit().states == {"running": 2}
    log.roll(r.Tick("test", 0), at=START_US + OVERDUE_US)
    assert log.audit().states == {"lost: running, its deadline has passed, and it has no result": 2}
    assert log.audit(grace_us=3600 * SECOND).passed


def test_records_of_another_run_count_only_for_the_offsets():
    log = sound_log()
    log.put(replace(task("other"), run_id="another"), at=START_US)
    log.put(replace(log.records(Topic.STEPS, r.TrainStep)[0], run_id="another"), at=START_US)
    report = log.audit()
    assert report.passed
    assert report.counts == sound_log().audit().counts
    assert report.runs["another"] == 2


def test_records_past_retention_are_reported_unless_allowed():
    log = sound_log()
    log.low = {Topic.ROLLOUTS: 4, Topic.TASKS: 2, Topic.PROGRESS: 5, Topic.ACKS: 1}
    (check,) = log.audit().failed
    assert (check.name, str(check.first).split(":")[0]) == ("retention", "rollouts[0]@4")
    report = log.audit(allow_truncated=True)
    assert [str(failed.first) for failed in report.failed] == []


def test_a_step_that_was_begun_again_as_planned_is_repeated_work():
    log = sound_log()
    step = log.records(Topic.STEPS, r.TrainStep)[-1]
    next_one = replace(step, step=4, parent_version=3)
    log.put(plan_of(next_one), at=START_US)
    log.put(plan_of(next_one, "trainer-1"), at=START_US)
    report = log.audit()
    assert report.passed
    assert report.repeated["plans"] == 1


@pytest.mark.parametrize("why", ["settings", "gate"])
def test_a_plan_may_be_replaced_for_a_reason_that_the_log_knows(why: str):
    log = sound_log()
    waiting = r.StepInput("waits", Topic.GROUPS.value, 0, log.group_offsets["waits"][0])
    step = replace(log.records(Topic.STEPS, r.TrainStep)[-1], step=4, parent_version=3, inputs=[waiting], exclusions=[])
    log.put(plan_of(step), at=START_US)
    if why == "gate":
        log.put(r.GateDecision(RUN, "main", r.GateVerdict.REJECT, 3, "worse", "gate", {}, START_US), at=START_US)
    other = replace(step, parent_version=2, config_hash="other" if why == "settings" else step.config_hash)
    log.put(plan_of(other, "trainer-1"), at=START_US)
    assert log.audit().passed


GONE = {"a tombstone": True, "a request": True, "compaction": True, "an older request": False, "a later request": False}


@pytest.mark.parametrize("why", GONE)
def test_a_plan_may_be_replaced_when_an_answer_that_it_reads_was_deleted(why: str):
    log = sound_log()
    step = plan_on_answer(log, "i9", "eve")
    match why:
        case "a tombstone":
            log.put_bytes(Topic.INTERACTIONS, "i9", None, step.started_at)
        case "a request":
            log.put(request("eve", r.UserWish.ERASE, step.started_at), at=step.started_at)
        case "an older request":
            log.put(request("eve", r.UserWish.ERASE, START_US), at=step.started_at)
        case "a later request":
            late = step.started_at + AuditRules(RUN).grace_us + SECOND
            log.put(request("eve", r.UserWish.ERASE, late), at=step.started_at)
        case "compaction":
            log.hidden.add((Topic.INTERACTIONS, len(log.entries[Topic.INTERACTIONS]) - 1))
            log.put(request("eve", r.UserWish.ERASE, step.started_at), at=step.started_at)
    plan_anew(log, step)
    assert [check.name for check in log.audit().failed] == ([] if GONE[why] else ["plans"])


@pytest.mark.parametrize("topic", [Topic.ROLLOUTS, Topic.GROUPS])
@pytest.mark.parametrize("beyond", [True, False], ids=["gone", "there"])
def test_a_plan_may_be_replaced_when_the_log_begins_after_its_inputs(topic: Topic, beyond: bool):
    log = sound_log()
    waits = log.group_offsets["waits"][0]
    read = min(one.offset for one in log.group(waits).members) if topic is Topic.ROLLOUTS else waits
    inputs = [r.StepInput("waits", Topic.GROUPS.value, 0, waits)]
    last = log.records(Topic.STEPS, r.TrainStep)[-1]
    step = replace(last, step=4, parent_version=3, inputs=inputs, exclusions=[])
    log.put(plan_of(step), at=START_US)
    plan_anew(log, step)
    log.low = {topic: read + beyond}
    assert [check.name for check in log.audit(allow_truncated=True).failed] == ([] if beyond else ["plans"])


def test_a_step_on_an_answer_between_two_erasures_is_no_fault():
    log = sound_log()
    for at in (START_US - 7200 * SECOND, START_US + 60 * SECOND):
        log.put(request("ann", r.UserWish.ERASE, at), at=START_US)
    assert [str(check.first) for check in log.audit().failed] == []
    log.put_bytes(Topic.INTERACTIONS, "i0", None, START_US + 61 * SECOND)
    assert [str(check.first) for check in log.audit().failed] == []


def test_a_dead_letter_without_a_reason_ends_its_answer_too():
    log = sound_log()
    offset = next(one.offset for one in log.located(Topic.INTERACTIONS) if one.key == b"i3")
    assert "interactions" in {check.name for check in log.audit(complete=True).failed}
    log.letters[Topic.INTERACTIONS, offset] = ""
    assert "interactions" not in {check.name for check in log.audit(complete=True).failed}


def test_numbers_of_any_size_are_audited():
    log = sound_log()
    log.change(Topic.OUTCOMES, r.Outcome, 0, revision=2**62)
    (check,) = log.audit().failed
    assert str(check.first).endswith("the revisions of interaction i0 are not numbered from 0 without a gap")
    log = sound_log()
    member = replace(log.group(0).members[0], rollout_id="g0/" + 5000 * "9")
    log.change(Topic.GROUPS, r.Group, 0, members=[member])
    assert "groups" in {check.name for check in log.audit().failed}


@pytest.mark.parametrize("size", [300, 2**62])
def test_the_rollouts_of_a_task_that_workers_refused_are_not_lost(size: int):
    log = sound_log()
    known = log.audit(ended=True).states
    offset = log.put(task("large", size), at=START_US)
    log.letters[Topic.TASKS, offset] = f"group_size is {size}, allowed are 1 to 256"
    report = log.audit(ended=True)
    assert report.states == known
    assert report.counts["dead letters"] == sound_log().audit().counts["dead letters"] + 1


def test_a_rollout_whose_group_retention_may_have_deleted_is_not_lost():
    log = RunLog()
    log.play(task("g0"), 1.0, 0.0)
    log.play(task("g1", at=START_US + 100 * SECOND), 1.0, 0.0)
    log.low = {Topic.GROUPS: 1}
    of = log.issue(task("uncounted", 1, at=START_US + 200 * SECOND))
    log.put(rollout(of, 0, 1.0), at=of.issued_at + SECOND, key=of.group_id)
    log.put(r.Tick("test", 0), at=of.issued_at + OVERDUE_US, key="tick")
    report = log.audit(allow_truncated=True)
    assert report.states == {
        "grouped": 2, "lost: it has a result, its deadline has passed, and no group counts it": 1, "unknown": 2,
    }  # fmt: skip
    assert [check.name for check in report.failed] == ["endings"]


def test_an_answer_whose_end_retention_may_have_deleted_has_ended():
    log = sound_log()
    log.low = {Topic.OUTCOMES: 1}
    assert "interactions" not in {check.name for check in log.audit(complete=True).failed}
    served = log.records(Topic.INTERACTIONS, r.Interaction)[-1]
    late = replace(served, interaction_id="late", served_at=served.served_at + 3600 * SECOND)
    offset = log.put(late, at=late.served_at)
    (check,) = (check for check in log.audit(complete=True).failed if check.name == "interactions")
    assert (check.offenders, str(check.first).split(":")[0]) == (1, f"interactions[0]@{offset}")


@pytest.mark.parametrize(("later_us", "found"), [(0, True), (1_000, False)])
def test_a_dead_letter_that_retention_has_deleted_is_not_missing(later_us: int, found: bool):
    log = sound_log()
    log.put_bytes(Topic.STEPS, RUN, GARBAGE, START_US)
    log.put(r.Tick("test", 0), at=START_US + DEAD_LETTER_RETENTION_MS * 1_000 + later_us, key="tick")
    assert ("dead_letters" in {check.name for check in log.audit().failed}) is found
