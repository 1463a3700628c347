"""The meaning of gate decisions: one pure fold over the decisions of one branch, in the order of the log.

Replicas, the router, the gate itself, the trainer, the operator's tools and the demonstration all ask this fold: a
verdict means one thing, and a new verdict is a change in this file. What it keeps true:

- the newest promotion, hold or roll-back limits which versions may be served; a release lifts the limit;
- a promotion or a roll-back names the version that everyone is served;
- a trial ends with the next decision that names, limits or releases, with the rejection of the version tried, and with
  the trial of another version;
- a rejection stands for good, and leaves the limit as it is, so that it never lets go of a hold;
- people win over the gate: a hold, or a person's roll-back, ends with a person's promotion or a release. What a gate
  decided before it knew of the hold changes nothing for anyone. It is kept in `overrun` until the gate takes it back.

With the versions of the branch (`made`) it also tells which of them may be trained on. Every step makes one version,
whose parent is the version that it started from; a version's line is it and its ancestors.

- A rejection gives up the rejected version, its descendants, and what lies between it and the version that users have:
  the nearest ancestor that was named, else that was admitted, else the parent.
- A roll-back gives up every version after its target that was made before the roll-back was known.
- A promotion takes up again what was given up on the way to the promoted version, and gives up what lies on no line
  with it. A release takes up what roll-backs gave up. Holds and trials change what is served, not what is learnt.
- Only versions that descend from an admitted one may learn from users.

Each version is noted with how many decisions were known when it was made, which `train.steps` records. So the same
versions and decisions give the same answer, in whichever order they are read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, KeysView
from dataclasses import dataclass

from tidemill.schemas.records import CANARY_SHARE, GateDecision, GateVerdict

GENERATION = "gate_generation"
"""Name, in a decision's numbers, of the gate process that took it: greater for one that started later. People's
decisions have none."""

EVIDENCE = "evidence"
"""Name, in the numbers of a gate's decision that ends a trial: 1 where evidence decided, 0 where a limit did."""

GIVES_UP = frozenset({GateVerdict.REJECT, GateVerdict.ROLL_BACK, GateVerdict.PROMOTE})
"""Decisions after which versions may not be trained on."""

LIMITS = {
    GateVerdict.HOLD: "held at",
    GateVerdict.ROLL_BACK: "rolled back to",
    GateVerdict.PROMOTE: "promoted no further than",
}
"""Verdicts after which nothing above their version may be served, in words."""

NAMES = frozenset({GateVerdict.PROMOTE, GateVerdict.ROLL_BACK})
"""Verdicts that name the version that everyone is served."""

_MOVES = (GateVerdict.PROMOTE, GateVerdict.CANARY, GateVerdict.ROLL_BACK)
"""Verdicts of a gate that a hold keeps from taking effect."""


def by_gate(decision: GateDecision) -> bool:
    """Whether a gate decided, and not a person."""
    return GENERATION in decision.numbers


def canary_share(decision: GateDecision) -> float | None:
    """The part of the users, 0 to 1, that a CANARY gives to the version tried; None where it says no usable one."""
    share = decision.numbers.get(CANARY_SHARE, math.nan)
    return share if decision.version is not None and 0.0 <= share <= 1.0 else None


def followed(decision: GateDecision, serving: int, head: int) -> bool:
    """Whether a replica that serves `serving` has done as a decision says; `head` was the newest version then."""
    match decision.verdict:
        case _ if decision.version is None:
            return serving >= head
        case GateVerdict.REJECT:
            return serving != decision.version
        case _:
            return serving == decision.version


@dataclass(slots=True)
class CanaryTrial:
    """A version that the canary pool served while it was tried."""

    version: int
    opened_at: int
    share: float
    """Part of the users that are served it, 0 to 1."""
    users_at: int | None
    """When it first had a share of the users; None while it had none. Microseconds, as `opened_at`."""
    end: GateDecision | None = None
    """None while it goes on."""

    @property
    def decided(self) -> bool:
        """Whether it ended with a decision about a version, and not for another trial or with a release."""
        return self.end is not None and self.end.verdict not in (GateVerdict.CANARY, GateVerdict.RELEASE)

    @property
    def on_evidence(self) -> bool:
        """Whether a gate's evidence decided it."""
        return self.decided and self.end is not None and self.end.numbers.get(EVIDENCE, 0.0) > 0.0


@dataclass(frozen=True, slots=True)
class _Made:
    parent: int | None
    known: int
    """Decisions known when it was made."""


class BranchDecisions:
    """The decisions of one branch of one run; the caller leaves those of others out."""

    def __init__(self) -> None:
        self.decisions = 0
        """Decisions that were observed."""
        self.limit: GateDecision | None = None
        """The decision that no served version may go beyond; None where the newest may be served."""
        self.served: list[int] = []
        """The version of each promotion and roll-back, in order: what everyone was served, and is, at the end."""
        self.named: list[int] = []
        """The same versions, each once, in the order of the last decision that named each."""
        self.trials: list[CanaryTrial] = []
        """Every trial, in order."""
        self.rejected: dict[int, GateDecision] = {}
        """Versions that are never served again, with the last rejection of each."""
        self.decided: set[int] = set()
        """Versions that were named or rejected: they are not tried again."""
        self.admitted: list[int] = []
        """Admitted versions, in the order of the last admission of each."""
        self.learners: set[int] = set()
        """Versions that may learn from users: the admitted ones and their descendants."""
        self.settled: GateDecision | None = None
        """The newest decision about a version or a release; trials and admissions are none."""
        self.hold: GateDecision | None = None
        """The decision that only a person ends."""
        self.overrun: GateDecision | None = None
        """A gate's decision that came after the hold and is to be taken back."""
        self.collapsed: int | None = None
        """The version that a gate rolled back, until it is rejected."""
        self.generation = 0.0
        """The greatest generation of a gate that decided."""
        self._made: dict[int, _Made] = {}
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        self._given_up: dict[int, GateVerdict] = {}

    @property
    def trial(self) -> CanaryTrial | None:
        """The trial that goes on; None while nothing is tried."""
        return self.trials[-1] if self.trials and self.trials[-1].end is None else None

    @property
    def versions(self) -> KeysView[int]:
        """The versions that were made."""
        return self._made.keys()

    @property
    def abandoned(self) -> frozenset[int]:
        """Versions that were given up: nothing is trained on from them."""
        return frozenset(self._given_up)

    def observe(self, decision: GateDecision) -> str:
        """Take a decision in, in log order. Returns why it is not taken; else an empty string."""
        self.decisions += 1
        self.generation = max(self.generation, decision.numbers.get(GENERATION, 0.0))
        if decision.verdict is GateVerdict.RELEASE:
            self._settle(decision)
            self.limit = self.hold = self.overrun = None
            self._given_up = {v: why for v, why in self._given_up.items() if why is not GateVerdict.ROLL_BACK}
        elif decision.version is None:
            if decision.verdict is GateVerdict.CANARY:
                self._end_trial(decision)
            return f"a decision to {decision.verdict.value} names no version"
        elif self.hold is not None and by_gate(decision) and decision.verdict in _MOVES:
            # A gate takes an overrun back by saying the hold again, as a roll-back to the version held.
            self.overrun = None if decision.verdict is GateVerdict.ROLL_BACK else decision
        else:
            self._take(decision, decision.version)
        return ""

    def _take(self, decision: GateDecision, version: int) -> None:
        match decision.verdict:
            case GateVerdict.CANARY:
                self._try(decision, version)
            case GateVerdict.PROMOTE:
                self._name(decision, version)
                self.hold = self.overrun = None
                line = {*self.ancestry(version), *self._descendants(version)}
                self._give_up(decision, version, {v for v in self._made if v not in line})
            case GateVerdict.ROLL_BACK:
                left = self.named[-1] if self.named else None
                self._name(decision, version)
                if by_gate(decision):
                    self.collapsed = None if left == version or left in self.rejected else left
                else:
                    self.hold, self.overrun = decision, None
                self._give_up(decision, version, {v for v in self._made if v > version})
            case GateVerdict.HOLD:
                self._settle(decision)
                self.limit = self.hold = decision
                self.overrun = None
            case GateVerdict.REJECT:
                self._reject(decision, version)
            case GateVerdict.ADMIT:
                self.admitted = [*(known for known in self.admitted if known != version), version]
                self.learners |= self._descendants(version)
            case GateVerdict.RELEASE:
                raise AssertionError("a release is about no version")

    def _try(self, decision: GateDecision, version: int) -> None:
        share, trial = canary_share(decision) or 0.0, self.trial
        if trial is None or trial.version != version:
            self._end_trial(decision)
            trial = CanaryTrial(version, decision.at, share, None)
            self.trials.append(trial)
        trial.share = share
        if share > 0.0 and trial.users_at is None:
            trial.users_at = decision.at

    def _name(self, decision: GateDecision, version: int) -> None:
        self._settle(decision)
        self.limit = decision
        self.decided.add(version)
        self.served.append(version)
        self.named = [*(known for known in self.named if known != version), version]
        for ancestor in self.ancestry(version):
            self._given_up.pop(ancestor, None)

    def _reject(self, decision: GateDecision, version: int) -> None:
        self.settled = decision
        self.rejected[version] = decision
        self.decided.add(version)
        self.collapsed = None if self.collapsed == version else self.collapsed
        if self.trial is not None and self.trial.version == version:
            self._end_trial(decision)
        if version in self._made:
            first = version
            if version not in self._given_up:
                back = self._behind(version)
                first = next(v for v in self.ancestry(version) if self._made[v].parent == back)
            self._give_up(decision, version, self._descendants(first))

    def _settle(self, decision: GateDecision) -> None:
        self.settled = decision
        self._end_trial(decision)

    def _end_trial(self, decision: GateDecision) -> None:
        if self.trial is not None:
            self.trial.end = decision

    def made(self, version: int, parent: int | None, known: int | None = None) -> None:
        """`version` was made from `parent`, `known` decisions being known then: by default those observed so far."""
        before = self._made.get(version)
        self._made[version] = _Made(parent, self.decisions if known is None else known)
        if before is not None and before.parent is not None:
            self._children[before.parent].remove(version)
        if parent is not None:
            self._children[parent].append(version)
        if before is not None and before.parent != parent:
            self.learners = {v for admitted in self.admitted for v in self._descendants(admitted)}
        elif parent in self.learners:
            self.learners |= self._descendants(version)

    def ancestry(self, version: int) -> Iterator[int]:
        """A version, its parent, and so on to the first one; nothing for a version that was not made."""
        at: int | None = version
        while at is not None and at in self._made:
            yield at
            at = self._made[at].parent

    def _descendants(self, version: int) -> set[int]:
        found, left = set[int](), [version]
        while left:
            at = left.pop()
            if at not in found:
                found.add(at)
                left += self._children.get(at, ())
        return found

    def _behind(self, version: int) -> int | None:
        """The version to go back to when `version` is rejected."""
        before = [v for v in self.ancestry(version) if v != version and v not in self._given_up]
        for milestones in (self.named, self.admitted):
            found = next((v for v in before if v in milestones), None)
            if found is not None:
                return found
        return self._made[version].parent

    def _give_up(self, decision: GateDecision, version: int, lost: set[int]) -> None:
        """Give up versions that were made before a decision about a version that was made."""
        if version not in self._made:
            return
        for at in lost & self._made.keys():
            # A rejection stands over the rest, so that a release does not take up what was rejected.
            free = at not in self._given_up or decision.verdict is GateVerdict.REJECT
            if free and self._made[at].known < self.decisions:
                self._given_up[at] = decision.verdict
