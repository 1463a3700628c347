"""The meaning of gate decisions: one pure fold over the decisions of one branch, in the order of the log.

Replicas, the router, the gate, the trainer, the operator's tools and the demonstration all use this fold: a verdict has
only one meaning, and a new verdict is a change of this file. Invariants:

- the newest promotion, hold or roll-back limits which versions may be served; a release removes the limit;
- a promotion or a roll-back names the version that everyone is served;
- a trial ends with the next decision that names, limits or releases, with the rejection of the version on trial, and
  with the trial of another version;
- a rejection is permanent. It does not change the limit, so it never ends a hold;
- people have priority over the gate: only a person's promotion or a release ends a hold or a person's roll-back. What a
  gate decides before it has read the hold has no effect, and is kept in `overrun` until the gate revokes it, except for
  a hold of its own.

With the versions of the branch (`made`) the fold also returns which of them may be trained on. Every step makes one
version, whose parent is the version that it started from. The line of a version is the version and its ancestors.

- A rejection abandons the rejected version, its descendants, and the versions between it and the one to go back to: its
  nearest named ancestor, otherwise its nearest admitted ancestor, otherwise its parent.
- A roll-back abandons all versions after its target that were made before the roll-back was known.
- A promotion restores the abandoned ancestors of the promoted version, and abandons all versions on no line with it.
  A release restores what roll-backs abandoned. Holds and trials change serving, not training.
- Only an admitted version and its descendants may learn from users.

Each version is stored with the number of decisions known when it was made, from `train.steps`. So the same versions and
decisions give the same result, in any order of reading.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, KeysView
from dataclasses import dataclass

from tidemill.schemas.records import CANARY_SHARE, GateDecision, GateVerdict

GENERATION = "gate_generation"
"""Name, in a decision's numbers, of the generation of the gate process that made it: greater for a later process.
Decisions of people have none."""

EVIDENCE = "evidence"
"""Name, in the numbers of a gate's decision that ends a trial: 1 if evidence decided, 0 if a limit did."""

GIVES_UP = frozenset({GateVerdict.REJECT, GateVerdict.ROLL_BACK, GateVerdict.PROMOTE})
"""Decisions after which versions may not be trained on."""

LIMITS = {
    GateVerdict.HOLD: "held at",
    GateVerdict.ROLL_BACK: "rolled back to",
    GateVerdict.PROMOTE: "promoted no further than",
}
"""Verdicts that limit the served versions to their own and earlier ones, with their wording in messages."""

NAMES = frozenset({GateVerdict.PROMOTE, GateVerdict.ROLL_BACK})
"""Verdicts that name the version that everyone is served."""

_MOVES = (GateVerdict.PROMOTE, GateVerdict.CANARY, GateVerdict.ROLL_BACK, GateVerdict.HOLD)
"""Verdicts of a gate that have no effect during a hold."""


def by_gate(decision: GateDecision) -> bool:
    """Return whether a gate decided, and not a person."""
    return GENERATION in decision.numbers


def canary_share(decision: GateDecision) -> float | None:
    """Return the share of the users, 0 to 1, that a CANARY gives to the version on trial; None if it is not usable."""
    share = decision.numbers.get(CANARY_SHARE, math.nan)
    return share if decision.version is not None and 0.0 <= share <= 1.0 else None


def followed(decision: GateDecision, serving: int, head: int) -> bool:
    """Return whether a replica that serves `serving` follows a decision; `head` is the newest version at that time."""
    match decision.verdict:
        case _ if decision.version is None:
            return serving >= head
        case GateVerdict.REJECT:
            return serving != decision.version
        case _:
            return serving == decision.version


@dataclass(slots=True)
class CanaryTrial:
    """The trial of one version, which the canary pool serves."""

    version: int
    opened_at: int
    share: float
    """Share of the users that get the version, 0 to 1."""
    users_at: int | None
    """Time at which it first had a share of the users; None if it had none. Microseconds, as `opened_at`."""
    end: GateDecision | None = None
    """The decision that ended the trial; None before."""

    @property
    def decided(self) -> bool:
        """Whether it ended with a decision about a version, not with another trial or a release."""
        return self.end is not None and self.end.verdict not in (GateVerdict.CANARY, GateVerdict.RELEASE)

    @property
    def on_evidence(self) -> bool:
        """Whether it was decided by a gate's evidence."""
        return self.decided and self.end is not None and self.end.numbers.get(EVIDENCE, 0.0) > 0.0


class BranchDecisions:
    """The decisions of one branch of one run; the caller must not pass those of other branches."""

    def __init__(self) -> None:
        self.decisions = 0
        """Number of decisions that were observed."""
        self.limit: GateDecision | None = None
        """Decision whose version is the last one that may be served; None if the newest may be served."""
        self.served: list[int] = []
        """Version of each promotion and roll-back, in order; everyone is served the last one now."""
        self.named: list[int] = []
        """The same versions, each once, in the order of the last decision that named each."""
        self.trials: list[CanaryTrial] = []
        """All trials, in order."""
        self.rejected: dict[int, GateDecision] = {}
        """Versions that are never served again, with the last rejection of each."""
        self.decided: set[int] = set()
        """Versions that were named or rejected: they get no further trial."""
        self.admitted: list[int] = []
        """Admitted versions, in the order of the last admission of each."""
        self.learners: set[int] = set()
        """Versions that may learn from users: the admitted ones and their descendants."""
        self.settled: GateDecision | None = None
        """The newest decision about a version or a release, without trials and admissions."""
        self.hold: GateDecision | None = None
        """Hold or person's roll-back that only a person can end."""
        self.overrun: GateDecision | None = None
        """A gate's decision that came after the hold and that the gate must revoke."""
        self.collapsed: int | None = None
        """Version from which a gate rolled back, until it is rejected."""
        self.generation = 0.0
        """Greatest generation of a gate that decided."""
        self._parents: dict[int, int | None] = {}
        """Parent of each version that was made; None for one that has none."""
        self._known: dict[int, int] = {}
        """Number of decisions known when each version was made."""
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        self._given_up: dict[int, GateVerdict] = {}

    @property
    def trial(self) -> CanaryTrial | None:
        """The current trial; None if there is none."""
        return self.trials[-1] if self.trials and self.trials[-1].end is None else None

    @property
    def versions(self) -> KeysView[int]:
        """The versions that were made."""
        return self._parents.keys()

    @property
    def abandoned(self) -> frozenset[int]:
        """The abandoned versions: nothing sampled under them is trained on."""
        return frozenset(self._given_up)

    def observe(self, decision: GateDecision) -> str:
        """Apply a decision; call in log order. Returns the reason if it is not applied, otherwise an empty string."""
        self.decisions += 1
        self.generation = max(self.generation, decision.numbers.get(GENERATION, 0.0))
        if decision.verdict is GateVerdict.RELEASE:
            self._settle(decision)
            self.limit = self.hold = self.overrun = None
            self._given_up = {v: why for v, why in self._given_up.items() if why is not GateVerdict.ROLL_BACK}
            return ""
        version = decision.version
        if version is None:
            if decision.verdict is GateVerdict.CANARY:
                self._end_trial(decision)
            return f"a decision to {decision.verdict.value} names no version"
        if self.hold is not None and by_gate(decision) and decision.verdict in _MOVES:
            # A gate revokes an overrun by repeating the hold as a roll-back to the held version; a hold needs none.
            if decision.verdict is not GateVerdict.HOLD:
                self.overrun = None if decision.verdict is GateVerdict.ROLL_BACK else decision
            return ""
        match decision.verdict:
            case GateVerdict.CANARY:
                self._try(decision, version)
            case GateVerdict.PROMOTE:
                self._name(decision, version)
                self.hold = self.overrun = None
                line = {*self.ancestry(version), *self._descendants(version)}
                self._give_up(decision, version, {v for v in self._parents if v not in line})
            case GateVerdict.ROLL_BACK:
                left = self.named[-1] if self.named else None
                self._name(decision, version)
                if by_gate(decision):
                    self.collapsed = None if left == version or left in self.rejected else left
                else:
                    self.hold, self.overrun = decision, None
                self._give_up(decision, version, {v for v in self._parents if v > version})
            case GateVerdict.HOLD:
                self._settle(decision)
                self.limit = self.hold = decision
                self.overrun = None
            case GateVerdict.REJECT:
                self._reject(decision, version)
            case GateVerdict.ADMIT:
                self.admitted = [*(known for known in self.admitted if known != version), version]
                self.learners |= self._descendants(version)
        return ""

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
        if version in self._parents:
            first = version
            if version not in self._given_up:
                back = self._behind(version)
                first = next(v for v in self.ancestry(version) if self._parents[v] == back)
            self._give_up(decision, version, self._descendants(first))

    def _settle(self, decision: GateDecision) -> None:
        self.settled = decision
        self._end_trial(decision)

    def _end_trial(self, decision: GateDecision) -> None:
        if self.trial is not None:
            self.trial.end = decision

    def made(self, version: int, parent: int | None, known: int | None = None) -> None:
        """Record that `version` was made from `parent` when `known` decisions were known (default: those observed)."""
        again, before = version in self._parents, self._parents.get(version)
        self._parents[version], self._known[version] = parent, self.decisions if known is None else known
        if before is not None:
            self._children[before].remove(version)
        if parent is not None:
            self._children[parent].append(version)
        if again and before != parent:
            self.learners = {v for admitted in self.admitted for v in self._descendants(admitted)}
        elif parent in self.learners:
            self.learners |= self._descendants(version)

    def ancestry(self, version: int) -> Iterator[int]:
        """Yield a version, its parent, and so on to the first one; nothing for a version that was not made."""
        at: int | None = version
        while at is not None and at in self._parents:
            yield at
            at = self._parents[at]

    def _descendants(self, version: int) -> set[int]:
        found, left = set[int](), [version]
        while left:
            at = left.pop()
            if at not in found:
                found.add(at)
                left += self._children.get(at, ())
        return found

    def _behind(self, version: int) -> int | None:
        """Return the version to go back to when `version` is rejected."""
        before = [v for v in self.ancestry(version) if v != version and v not in self._given_up]
        for milestones in (self.named, self.admitted):
            found = next((v for v in before if v in milestones), None)
            if found is not None:
                return found
        return self._parents[version]

    def _give_up(self, decision: GateDecision, version: int, lost: set[int]) -> None:
        """Abandon those of the versions `lost` that were made before the decision, if its version was made."""
        if version not in self._parents:
            return
        for at in lost & self._parents.keys():
            # A rejection replaces an earlier reason, so that a release does not restore these versions.
            free = at not in self._given_up or decision.verdict is GateVerdict.REJECT
            if free and self._known[at] < self.decisions:
                self._given_up[at] = decision.verdict
