"""The line of versions that the trainer works on, as `gate.decisions` lets it. Pure.

Every step makes one version, whose parent is the version that it started from; so versions form a tree, and a version's
line is it and its ancestors. What this keeps true:

- the next step starts from the newest version that was not given up;
- a rejection gives up the rejected version, its descendants, and what lies between it and the version that users have:
  the nearest ancestor that was promoted or rolled back to, else that was admitted, else the parent;
- a roll-back gives up every version after its target that was made before it was known;
- a promotion takes up again what was given up on the way to the promoted version, and gives up what lies on no line
  with it; a release takes up what roll-backs gave up. Holds and trials change what is served, not what is learnt;
- only versions that descend from an admitted one may learn from users.

Each version is noted with how many decisions were known when it was made, which `train.steps` records. So the same
steps and decisions give the same line, in whichever order they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tidemill.schemas.records import GateDecision, GateVerdict


class RejectedLineError(RuntimeError):
    """Every version of the run was given up; the message says what to do."""


@dataclass(frozen=True, slots=True)
class _Made:
    parent: int | None
    known: int
    """Decisions known when it was made."""


class WeightLine:
    """The versions of one branch of one run, and what the gate said of them."""

    def __init__(self, run_id: str, branch: str) -> None:
        self._run_id, self._branch = run_id, branch
        self._made: dict[int, _Made] = {0: _Made(None, 0)}
        self._given_up: dict[int, GateVerdict] = {}
        self._served: list[int] = []
        self._admitted: list[int] = []
        self.decisions = 0
        """Decisions of the branch that were observed."""

    @property
    def newest(self) -> int:
        """The newest version that was made, given up or not."""
        return max(self._made)

    @property
    def abandoned(self) -> frozenset[int]:
        """Versions that were given up."""
        return frozenset(self._given_up)

    def made(self, version: int, parent: int, known: int) -> None:
        """A step made `version` from `parent`, `known` decisions being known then."""
        self._made[version] = _Made(parent, known)

    def observe(self, decision: GateDecision) -> None:
        """Take a decision in, in log order; one of another run or branch is passed over."""
        if (decision.run_id, decision.branch) != (self._run_id, self._branch):
            return
        self.decisions += 1
        if decision.verdict is GateVerdict.RELEASE:
            self._given_up = {v: why for v, why in self._given_up.items() if why is not GateVerdict.ROLL_BACK}
        elif decision.version in self._made:
            take = _EFFECTS.get(decision.verdict)
            if take is not None:
                take(self, decision.version)

    def start(self) -> int:
        """The version that the next step starts from. Raises RejectedLineError when there is none."""
        alive = [version for version in self._made if version not in self._given_up]
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
        return not set(self._admitted).isdisjoint(self.ancestry(version))

    def ancestry(self, version: int) -> Iterator[int]:
        """A version, its parent, and so on to version 0; nothing for a version that was not made."""
        at: int | None = version if version in self._made else None
        while at is not None:
            yield at
            at = self._made[at].parent

    def milestones(self, number: int) -> set[int]:
        """The versions that the trainer may have to go back to: the newest `number` of those that users had, and of
        those that were admitted."""
        return {*self._served[-number:], *self._admitted[-number:]}

    def _reject(self, version: int) -> None:
        first = version
        if version not in self._given_up:
            back = self._behind(version)
            first = next(v for v in self.ancestry(version) if self._made[v].parent == back)
        self._give_up(GateVerdict.REJECT, lambda v: v >= first and first in self.ancestry(v))

    def _behind(self, version: int) -> int | None:
        """The version to go back to when `version` is rejected."""
        before = [v for v in self.ancestry(version) if v != version and v not in self._given_up]
        for milestones in (self._served, self._admitted):
            found = next((v for v in before if v in milestones), None)
            if found is not None:
                return found
        return self._made[version].parent

    def _roll_back(self, target: int) -> None:
        self._take_up(target)
        self._serve(target)
        self._give_up(GateVerdict.ROLL_BACK, lambda v: v > target)

    def _promote(self, version: int) -> None:
        self._take_up(version)
        self._serve(version)
        line = set(self.ancestry(version))
        self._give_up(GateVerdict.PROMOTE, lambda v: v not in line and version not in self.ancestry(v))

    def _admit(self, version: int) -> None:
        self._admitted = [*(v for v in self._admitted if v != version), version]

    def _serve(self, version: int) -> None:
        self._served = [*(v for v in self._served if v != version), version]

    def _take_up(self, version: int) -> None:
        for ancestor in self.ancestry(version):
            self._given_up.pop(ancestor, None)

    def _give_up(self, why: GateVerdict, applies: Callable[[int], bool]) -> None:
        for version, made in self._made.items():
            # A rejection stands over the rest, so that a release does not take up what was rejected.
            free = version not in self._given_up or why is GateVerdict.REJECT
            if free and made.known < self.decisions and applies(version):
                self._given_up[version] = why


_EFFECTS: dict[GateVerdict, Callable[[WeightLine, int], None]] = {
    GateVerdict.REJECT: WeightLine._reject,
    GateVerdict.ROLL_BACK: WeightLine._roll_back,
    GateVerdict.PROMOTE: WeightLine._promote,
    GateVerdict.ADMIT: WeightLine._admit,
}
