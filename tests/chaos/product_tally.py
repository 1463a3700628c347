"""Counts what a run's log contains about users: answers and signals, how each ended, and what was done twice.

A pure fold. It uses only the topics, independently of the audit in `consumers/ledger`.
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
    outcomes: dict[tuple[str, int], bytes] = field(default_factory=dict)
    """By interaction and revision."""
    endings: Counter[str] = field(default_factory=Counter)
    """Interactions by the reason for their exclusion; those with a reward under ''."""
    batches: dict[str, bytes] = field(default_factory=dict)
    decisions: Counter[str] = field(default_factory=Counter)
    """By verdict."""
    changed: list[str] = field(default_factory=list)
    """What the log contains again with different content."""
    _signals_used: list[str] = field(default_factory=list)
    _members: dict[Place, list[str]] = field(default_factory=dict)
    """Interactions of each batch, without corrections."""
    _trained: Counter[str] = field(default_factory=Counter)
    _steps: set[int] = field(default_factory=set)
    _last_said: dict[int | None, tuple[GateVerdict, float]] = field(default_factory=dict)
    _said_again: list[str] = field(default_factory=list)
    _waiting: list[TrainStep] = field(default_factory=list)

    def observe(self, located: ConsumedRecord) -> None:
        """Add one record."""
        value = located.value or b""
        match located.record:
            case Interaction() as made:
                self.again.interactions += made.interaction_id in self.interactions
                self._same(self.interactions, made.interaction_id, value, "interaction")
            case Feedback():
                name = (located.key or b"").decode("utf-8", "replace")
                self.again.feedback += name in self.signals
                self.signals.add(name)
            case Outcome() as outcome:
                self._outcome(outcome, value)
            case OnlineBatch() as batch:
                self.again.batches += batch.batch_id in self.batches
                self._same(self.batches, batch.batch_id, value, "batch")
                members = [member.interaction_id for member in batch.members if not member.correction]
                self._members[located.partition, located.offset] = members
            case TrainStep() as step if step.step not in self._steps:
                self._steps.add(step.step)
                self._waiting.append(step)
            case GateDecision() as decision:
                self._decision(decision)
            case _:
                pass

    def unended(self) -> list[str]:
        """Return the recorded interactions without an outcome."""
        return [name for name in self.interactions if (name, 0) not in self.outcomes]

    def lost(self, served: Set[str], acknowledged: Set[str]) -> list[str]:
        """Return the answers and signals that are missing in the log, and the interactions without an end.

        Args:
            served: interactions whose answers reached a user.
            acknowledged: keys of the signals that were acknowledged.
        """
        answers = [f"answer {name} was served and not recorded" for name in served - self.interactions.keys()]
        signals = [f"signal {name} was acknowledged and is not there" for name in acknowledged - self.signals]
        return [*answers, *signals, *(f"interaction {name} never ended" for name in self.unended())]

    def twice(self) -> list[str]:
        """Return what was done twice: records with two contents, answers and signals that count twice, and repeated
        decisions."""
        self._train()
        trained = [f"interaction {name} was trained {n} times" for name, n in self._trained.items() if n > 1]
        return [*self.changed, *self._signals_used, *trained, *self._said_again]

    def trained(self) -> int:
        """Return the number of interactions that a step trained on."""
        self._train()
        return len(self._trained)

    def _same(self, known: dict[str, bytes], name: str, value: bytes, what: str) -> None:
        if known.setdefault(name, value) != value:
            self.changed.append(f"{what} {name} stands there with two contents")

    def _outcome(self, outcome: Outcome, value: bytes) -> None:
        name = outcome.interaction_id, outcome.revision
        if name in self.outcomes:
            self.again.outcomes += 1
        elif outcome.revision == 0:
            self.endings[outcome.exclusion] += 1
        if self.outcomes.setdefault(name, value) != value:
            self.changed.append(f"interaction {name[0]} ended in two ways of revision {name[1]}")
        used = Counter(signal.event_id for signal in outcome.signals)
        self._signals_used += [f"signal {n} counts twice in {name[0]}" for n, times in used.items() if times > 1]

    def _decision(self, decision: GateDecision) -> None:
        said = decision.verdict, decision.numbers.get(CANARY_SHARE, 0.0)
        self.decisions[decision.verdict.value] += 1
        # A version may be tried again if there was another decision about it in between.
        if self._last_said.get(decision.version) == said:
            self._said_again.append(f"the gate decided twice to {decision.verdict.value} {decision.version}")
        self._last_said[decision.version] = said

    def _train(self) -> None:
        """Count what the steps trained on. Topics are read in any order: a batch may be read after its step."""
        for step in self._waiting:
            gone = {one.group_id for one in step.exclusions if one.topic == Topic.INTERACTIONS}
            for place in step.inputs:
                if place.topic == Topic.ONLINE_BATCHES:
                    members = self._members.get((place.partition, place.offset), [])
                    self._trained.update(name for name in members if name not in gone)
        self._waiting.clear()
