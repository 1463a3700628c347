"""Counts what a run's log contains about users: answers and signals, how each ended, and what was done twice.

A pure fold over the topics. It adds to `tidemill audit` the checks that this cannot make: it does not know what users
received, and does not look at signals, at repeated answers or at repeated decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import (
    CANARY_SHARE,
    Feedback,
    GateDecision,
    GateVerdict,
    Interaction,
    OnlineBatch,
    Outcome,
    TrainStep,
)

Place = tuple[int, int]
"""Partition and offset."""


@dataclass(slots=True)
class Again:
    """Records that the log contains more than once, with equal copies."""

    interactions: int = 0
    feedback: int = 0
    """Signals sent again with the same id."""
    outcomes: int = 0
    batches: int = 0


@dataclass(slots=True)
class ProductTally:
    """Answers, signals, outcomes, online batches and decisions."""

    again: Again = field(default_factory=Again)
    interactions: dict[str, bytes] = field(default_factory=dict)
    signals: set[str] = field(default_factory=set)
    """Keys of the signals in the topic."""
    outcomes: set[tuple[str, int]] = field(default_factory=set)
    """By interaction and revision."""
    endings: Counter[str] = field(default_factory=Counter)
    """Interactions by the reason for their exclusion; those with a reward under ''."""
    batches: set[str] = field(default_factory=set)
    decisions: Counter[str] = field(default_factory=Counter)
    """By verdict."""
    changed: list[str] = field(default_factory=list)
    """Answers that the log contains again with different content."""
    _signals_used: list[str] = field(default_factory=list)
    _members: dict[Place, list[str]] = field(default_factory=dict)
    """Interactions of each batch, without corrections."""
    _steps: dict[int, TrainStep] = field(default_factory=dict)
    _last_said: dict[int | None, tuple[GateVerdict, float]] = field(default_factory=dict)
    _said_again: list[str] = field(default_factory=list)

    def observe(self, located: ConsumedRecord) -> None:
        """Add one record."""
        match located.record:
            case Interaction() as made:
                self.again.interactions += made.interaction_id in self.interactions
                value = located.value or b""
                if self.interactions.setdefault(made.interaction_id, value) != value:
                    self.changed.append(f"interaction {made.interaction_id} has two contents in the log")
            case Feedback():
                name = (located.key or b"").decode("utf-8", "replace")
                self.again.feedback += name in self.signals
                self.signals.add(name)
            case Outcome() as outcome:
                self._outcome(outcome)
            case OnlineBatch() as batch:
                self.again.batches += batch.batch_id in self.batches
                self.batches.add(batch.batch_id)
                members = [member.interaction_id for member in batch.members if not member.correction]
                self._members[located.partition, located.offset] = members
            case TrainStep() as step:
                self._steps.setdefault(step.step, step)
            case GateDecision() as decision:
                self._decision(decision)
            case _:
                pass

    def unended(self) -> list[str]:
        """Return the recorded interactions without an outcome."""
        return [name for name in self.interactions if (name, 0) not in self.outcomes]

    def lost(self, served: Set[str], acknowledged: Set[str]) -> list[str]:
        """Return the answers and signals that are missing in the log.

        Args:
            served: interactions whose answers reached a user.
            acknowledged: keys of the signals that were acknowledged.
        """
        answers = [f"answer {name} was served and not recorded" for name in served - self.interactions.keys()]
        signals = [f"signal {name} was acknowledged and is not there" for name in acknowledged - self.signals]
        return [*answers, *signals]

    def twice(self) -> list[str]:
        """Return what was done twice: answers with two contents, signals that count twice, and repeated decisions."""
        return [*self.changed, *self._signals_used, *self._said_again]

    def trained(self) -> int:
        """Return the number of interactions that a step trained on."""
        names: set[str] = set()
        for step in self._steps.values():
            gone = {one.group_id for one in step.exclusions if one.topic == Topic.INTERACTIONS}
            for place in step.inputs:
                if place.topic == Topic.ONLINE_BATCHES:
                    names |= set(self._members.get((place.partition, place.offset), ())) - gone
        return len(names)

    def _outcome(self, outcome: Outcome) -> None:
        name = outcome.interaction_id, outcome.revision
        if name in self.outcomes:
            self.again.outcomes += 1
        elif outcome.revision == 0:
            self.endings[outcome.exclusion] += 1
        self.outcomes.add(name)
        used = Counter(signal.event_id for signal in outcome.signals)
        self._signals_used += [f"signal {n} counts twice in {name[0]}" for n, times in used.items() if times > 1]

    def _decision(self, decision: GateDecision) -> None:
        said = decision.verdict, decision.numbers.get(CANARY_SHARE, 0.0)
        self.decisions[decision.verdict.value] += 1
        # A version may be tried again if there was another decision about it in between.
        if self._last_said.get(decision.version) == said:
            self._said_again.append(f"the gate decided twice to {decision.verdict.value} {decision.version}")
        self._last_said[decision.version] = said
