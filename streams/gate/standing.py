"""What the decisions of one branch amount to, whoever took them. Pure.

The log's order decides, so that every reader of it stands at the same place: a decision written twice, by a gate that
was restarted or by two gates at once, changes nothing the second time. A hold, or a person's roll-back, ends with a
person's release or promotion; what a gate wrote before it knew of it is answered by saying the hold again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tidemill.schemas.records import GateDecision, GateVerdict, Manifest

GENERATION = "gate_generation"
"""Name, in a decision's numbers, of the gate process that took it: greater for one that started later. People's
decisions have none."""

_MOVES = (GateVerdict.PROMOTE, GateVerdict.CANARY, GateVerdict.ROLL_BACK)


def by_gate(decision: GateDecision) -> bool:
    """Whether a gate decided, and not a person."""
    return GENERATION in decision.numbers


@dataclass(slots=True)
class Standing:
    """Versions of a branch and what was decided of them."""

    parents: dict[int, int | None] = field(default_factory=dict)
    """Parent of each version."""
    head: int = -1
    """The newest version; -1 before the first."""
    anchored: set[int] = field(default_factory=set)
    promoted: list[int] = field(default_factory=list)
    """Versions that everyone was served, in order; the last one is."""
    rejected: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    """Versions whose trial has come to an end: they are not tried again."""
    admitted: set[int] = field(default_factory=set)
    """Versions that may learn from users: the admitted ones and their descendants."""
    hold: GateDecision | None = None
    """The decision that only a person ends."""
    overrun: GateDecision | None = None
    """A gate's decision that came after the hold and is to be taken back."""
    collapsed: int | None = None
    """The version that a gate rolled back, until it is rejected."""
    generation: float = 0.0
    """The greatest generation of a gate that decided."""

    @property
    def baseline(self) -> int:
        """What everyone is served: the version promoted last; before that the oldest one with an anchor. -1: none."""
        if self.promoted:
            return self.promoted[-1]
        return min(self.anchored, default=min(self.parents, default=-1))

    def publish(self, manifest: Manifest) -> None:
        """A version exists; of one that is published twice the first contents stand."""
        version = manifest.version
        self.parents.setdefault(version, manifest.parent)
        self.head = max(self.head, version)
        if manifest.anchor is not None:
            self.anchored.add(version)
        if self.parents[version] in self.admitted:
            self._admit([version])

    def apply(self, decision: GateDecision) -> None:
        """Take a decision in, in log order; one that names no version where it must is let pass."""
        self.generation = max(self.generation, decision.numbers.get(GENERATION, 0.0))
        if decision.verdict is GateVerdict.RELEASE:
            self.hold = self.overrun = None
        elif decision.version is not None:
            self._apply(decision, decision.version)

    def fallback(self, version: int, proved: Iterable[int]) -> int | None:
        """What to go back to from a version: the newest one promoted before it, proved where one is. None: nothing."""
        older = [known for known in self.promoted if known != version and known not in self.rejected]
        first = min(self.anchored, default=min(self.parents, default=-1))
        choices = [known for known in (first, *older) if known not in (-1, version) and known not in self.rejected]
        sure = set(proved)
        return next((known for known in reversed(choices) if known in sure), choices[-1] if choices else None)

    def _apply(self, decision: GateDecision, version: int) -> None:
        if self.hold is not None and by_gate(decision) and decision.verdict in _MOVES:
            self._overrun(decision)
            return
        match decision.verdict:
            case GateVerdict.PROMOTE:
                self._promote(version)
                self.hold = None
            case GateVerdict.REJECT:
                self.rejected.add(version)
                self.ended.add(version)
                self.collapsed = None if self.collapsed == version else self.collapsed
            case GateVerdict.HOLD:
                self.hold, self.overrun = decision, None
            case GateVerdict.ROLL_BACK:
                self._roll_back(decision, version)
            case GateVerdict.ADMIT:
                self._admit([version])
            case GateVerdict.CANARY | GateVerdict.RELEASE:
                pass

    def _overrun(self, decision: GateDecision) -> None:
        # The hold said again is a gate's roll-back to the version held.
        said_again = decision.verdict is GateVerdict.ROLL_BACK
        self.overrun = None if said_again else decision

    def _promote(self, version: int) -> None:
        self.ended.add(version)
        if version != self.baseline or not self.promoted:
            self.promoted.append(version)

    def _roll_back(self, decision: GateDecision, version: int) -> None:
        left = self.baseline
        self._promote(version)
        if by_gate(decision):
            self.collapsed = left if left not in (version, *self.rejected) else None
        else:
            self.hold, self.overrun = decision, None

    def _admit(self, versions: list[int]) -> None:
        while versions:
            version = versions.pop()
            if version not in self.admitted:
                self.admitted.add(version)
                versions += [child for child, parent in self.parents.items() if parent == version]
