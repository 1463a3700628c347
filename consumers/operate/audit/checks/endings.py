"""Every rollout ends once, or is on its way."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.consumers.operate.audit.check import Case, Check
from tidemill.consumers.operate.audit.finding import Finding
from tidemill.consumers.operate.audit.life import OPEN, State


def _find(case: Case) -> Iterator[Finding]:
    for life in case.lives:
        if life.state is State.LOST:
            yield Finding(life.place, f"rollout {life.rollout_id} is lost: {life.reason}")
        elif case.over and life.state in OPEN:
            yield Finding(life.place, f"rollout {life.rollout_id} is still {life.state.value}, and the run is over")
        elif len(life.endings) > 1 and any(end.state is not State.TRAINED for end in life.endings):
            told = " and ".join(f"{end.state.value} {end.reason}".strip() + f" ({end.place})" for end in life.endings)
            yield Finding(life.endings[1].place, f"rollout {life.rollout_id} ended more than once: {told}")


CHECK = Check(
    "endings",
    "every rollout that was asked for has one end: trained, evaluated, excluded with a reason, failed with a reason, "
    "late or rejected, or it is on its way within its time",
    _find,
)
