"""A stream processor run over the existing log: one machine for each partition, without workers, clock or writes.

Invariants:

- the records of a partition are given to its machine in one order, by the topic's event time, the place of the topic
  and the offset, independent of the order in which they are read; so the outputs are a function of the records alone;
- they equal the outputs of workers for the same records and rules, except for repeated outputs after a crash;
- time advances with the records and ticks in the log, and stops at the end of the log: entries that are due later are
  not decided, and a worker would not have decided them either;
- the log is only read, without a consumer group. Outputs are read first: the inputs that decided them are all before
  the ends of the inputs, which are fixed afterwards;
- a `Change` answers a "what if" question: it alters the records that the machines read, never the log. It returns the
  same record if it does not apply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Generic, TypeVar

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Group, OnlineBatch, Outcome, Rollout
from tidemill.streams.machine import Machine, Output, OutputRecord, Processor, Rejected
from tidemill.streams.merge import TopicMerge
from tidemill.streams.state import MachineState

CHANGES_EVERY = 500
"""Number of records after which a machine's changes are taken and discarded, so that they do not fill the memory."""

Decided = TypeVar("Decided", bound=Output)
Change = Callable[[ConsumedRecord], ConsumedRecord]
"""A function that changes a record in a replay; it returns the same record if it does not apply."""


@dataclass(frozen=True, slots=True)
class DecidedOutput(Generic[Decided]):
    """An output, and the record that decided it: the last one that its machine had observed."""

    output: Decided
    cause: Position
    at_ms: int
    """The cause's timestamp."""


class OfflineRun:
    """One pass of a processor over the records of its inputs.

    Args:
        spans: the offsets to replay, for each partition of each input; other records are skipped.
        changes: counterfactuals, applied to each record one after the other before its machine observes it.
    """

    def __init__(
        self, processor: Processor, spans: Mapping[tuple[Topic, int], range], changes: Sequence[Change] = ()
    ) -> None:
        self._spans = spans
        self._changes = changes
        partitions = sorted({partition for _, partition in spans})
        self._machines: dict[int, Machine] = {p: processor.machine(p, MachineState()) for p in partitions}
        self._orders: dict[int, TopicMerge[ConsumedRecord]] = {p: TopicMerge(processor.inputs, {}) for p in partitions}
        for (topic, partition), span in spans.items():
            if not span:
                self._orders[partition].end(topic)
        self._observed = 0

    def take(self, located: ConsumedRecord) -> list[DecidedOutput[Output]]:
        """Add one record, in the order of its partition. Return the outputs that can be decided now."""
        span, order = self._spans[located.topic, located.partition], self._orders[located.partition]
        if located.offset not in span:
            return []
        order.read(located.topic, located.offset, located.timestamp_ms * 1_000, located)
        if located.offset == span.stop - 1:
            order.end(located.topic)
        return self._decided(order)

    def finish(self) -> list[DecidedOutput[Output]]:
        """Return the outputs of the records that still wait, at the end of the input."""
        for topic, partition in self._spans:
            self._orders[partition].end(topic)
        return [decided for order in self._orders.values() for decided in self._decided(order)]

    def _decided(self, order: TopicMerge[ConsumedRecord]) -> list[DecidedOutput[Output]]:
        found: list[DecidedOutput[Output]] = []
        while (step := order.take()) is not None:
            _, _, located = step
            changed, machine = located, self._machines[located.partition]
            for change in self._changes:
                changed = change(changed)
            outputs = machine.observe(changed)
            found += [DecidedOutput(output, located.position, located.timestamp_ms) for output in outputs]
            self._observed += 1
            if self._observed % CHANGES_EVERY == 0:
                machine.take_changes()
        return found


CLIENT = "tidemill-replay"


@dataclass(frozen=True, slots=True)
class Replayed:
    """The outputs of a processor for the log."""

    emitted: list[DecidedOutput[OutputRecord]] = field(default_factory=list)
    """Records to write, in the order in which they were decided."""
    rejected: int = 0
    """Number of rejections; each would be a dead letter."""
    records: int = 0
    """Number of input records that were read."""
    cut: list[str] = field(default_factory=list)
    """Partitions whose first records were deleted from the log: the outputs of these records are not repeated."""


def recorded_outputs(
    kafka: KafkaSettings, run: RunSettings, processor: Processor, timeout_s: float
) -> list[ConsumedRecord]:
    """Return the records of this run (and branch, if they have one) in the processor's output topics.

    Raises LookupError if a topic is missing, TimeoutError if the ends are not reached in time.
    """
    recorded = []
    with LogReader(kafka, processor.outputs, client_id=CLIENT) as reader:
        for located in reader.read_to_end(timeout_s):
            match located.record:
                case OnlineBatch(run_id=run.run_id, branch=run.branch) | Group(run_id=run.run_id):
                    recorded.append(located)
                case Outcome(run_id=run.run_id):
                    recorded.append(located)
    return recorded


def replay(
    kafka: KafkaSettings,
    processor: Processor,
    changes: Sequence[Change],
    timeout_s: float,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Replayed:
    """Run a processor over its inputs, up to their current ends; `progress` gets records read and total offsets.

    Raises LookupError if a topic is missing, TimeoutError if the ends are not reached in time.
    """
    with LogReader(kafka, processor.inputs, client_id=CLIENT) as reader:
        begins, ends = reader.next_offsets(), reader.end_offsets()
        spans = {place: range(begins[place], end) for place, end in ends.items()}
        run = OfflineRun(processor, spans, changes)
        names = Names(kafka.topic_prefix)
        cut = [f"{names.of(topic)}[{p}] begins at offset {s.start}" for (topic, p), s in spans.items() if s.start]
        total = sum(map(len, spans.values()))
        emitted: list[DecidedOutput[OutputRecord]] = []
        rejected = records = 0
        # The outputs of each record, and finally those of the records that still wait.
        steps = chain(map(run.take, reader.read_to_end(timeout_s)), (run.finish() for _ in range(1)))
        for decided in steps:
            emitted += [
                DecidedOutput(d.output, d.cause, d.at_ms) for d in decided if isinstance(d.output, OutputRecord)
            ]
            rejected += sum(isinstance(d.output, Rejected) for d in decided)
            progress(records, total)
            records += 1
        return Replayed(emitted, rejected, records - 1, sorted(cut))


def deadline_shift(by_us: int) -> Change:
    """Return a change that moves every rollout's deadline later by `by_us` microseconds; earlier if negative."""

    def change(located: ConsumedRecord) -> ConsumedRecord:
        record = located.record
        if not isinstance(record, Rollout):
            return located
        return replace(located, record=replace(record, deadline_at=record.deadline_at + by_us))

    return change


@dataclass(frozen=True, slots=True)
class ReweightRewards:
    """A change that sums each rollout's reward again from its recorded components, some with other weights.

    A component that `weights` does not name keeps the weight in the record. A rollout without a reward is unchanged.
    """

    weights: Mapping[str, float]
    """New weights by component name."""
    version: str = ""
    """Only rollouts whose reward has this version are summed again; empty: all."""
    applied: Counter[str] = field(default_factory=Counter)
    """Number of rollouts that had each component with a new weight."""
    seen: dict[str, set[str]] = field(default_factory=dict)
    """The components that were found, by version of the reward."""

    def __call__(self, located: ConsumedRecord) -> ConsumedRecord:
        """Return the record with its reward summed again."""
        record = located.record
        if not isinstance(record, Rollout) or record.reward is None:
            return located
        self.seen.setdefault(record.reward_version, set()).update(part.name for part in record.rewards)
        if self.version not in ("", record.reward_version):
            return located
        self.applied.update(part.name for part in record.rewards if part.name in self.weights)
        parts = [replace(part, weight=self.weights.get(part.name, part.weight)) for part in record.rewards]
        # Same summation order as in the scorer: the components from left to right.
        reward = sum(part.value * part.weight for part in parts) if parts else record.reward
        return replace(located, record=replace(record, rewards=parts, reward=reward))

    def check(self) -> None:
        """Raise ValueError, after a replay, if no rollout had the version or a named component."""
        if self.version and self.version not in self.seen:
            raise ValueError(f"no rollout has a reward of version {self.version!r}; there is {sorted(self.seen)}")
        unknown = sorted(set(self.weights) - set(self.applied))
        if unknown:
            there = sorted(set[str]().union(*self.seen.values()))
            raise ValueError(f"no rollout has a reward component {', '.join(unknown)}; there is {', '.join(there)}")
