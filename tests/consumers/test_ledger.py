"""The ledger of rollouts and the audit of a log, in memory: what is sound passes, a planted fault fails its check."""

from __future__ import annotations

import pytest

from tests.consumers.ledger_support import PLANTED_FAULTS, PlantedFault, sound_log
from tidemill.consumers.ledger.audit import CHECKS

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
    assert {fault.check for fault in PLANTED_FAULTS} == {check.name for check in CHECKS}
