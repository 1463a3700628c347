"""The versions that the trainer works on, as the decisions of the gate let it. Pure.

Which versions were given up, and which may learn from users, is the answer of `tidemill.schemas.gate_decisions`; the
next step starts from the newest version that was not given up.
"""

from __future__ import annotations

from tidemill.schemas.gate_decisions import BranchDecisions
from tidemill.schemas.records import GateDecision


class RejectedLineError(RuntimeError):
    """Every version of the run was given up; the message says what to do."""


class WeightLine(BranchDecisions):
    """The versions of one branch of one run, and what the gate said of them."""

    def __init__(self, run_id: str, branch: str) -> None:
        super().__init__()
        self._run_id, self._branch = run_id, branch
        self.made(0, None, 0)

    @property
    def newest(self) -> int:
        """The newest version that was made, given up or not."""
        return max(self.versions)

    def observe(self, decision: GateDecision) -> str:
        """See `BranchDecisions.observe`; a decision of another run or branch is passed over."""
        ours = (decision.run_id, decision.branch) == (self._run_id, self._branch)
        return super().observe(decision) if ours else ""

    def start(self) -> int:
        """The version that the next step starts from. Raises RejectedLineError when there is none."""
        alive = self.versions - self.abandoned
        if not alive:
            raise RejectedLineError(
                f"every version of run {self._run_id}, branch {self._branch}, was rejected, so there is nothing to "
                "train on from: roll back to one with `tidemill gate rollback`, or start a new run from a better model"
            )
        return max(alive)

    def lag(self, version: int, current: int) -> int | None:
        """Steps from `version` to its descendant `current`; None when it is none."""
        return next((steps for steps, at in enumerate(self.ancestry(current)) if at == version), None)

    def is_admitted(self, version: int) -> bool:
        """Whether `version` descends from an admitted one, or is one."""
        return version in self.versions and version in self.learners

    def milestones(self, number: int) -> set[int]:
        """The versions that the trainer may have to go back to: the newest `number` of those that users had, and of
        those that were admitted."""
        served, admitted = ([v for v in found if v in self.versions] for found in (self.named, self.admitted))
        return {*served[-number:], *admitted[-number:]}
