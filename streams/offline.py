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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
"""Number of records after which all machines' changes are taken and discarded, so that they do not fill the memory."""

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


def decided_outputs(
    processor: Processor,
    spans: Mapping[tuple[Topic, int], range],
    records: Iterable[ConsumedRecord],
    changes: Sequence[Change] = (),
) -> Iterator[DecidedOutput[Output]]:
    """Yield the outputs of a processor for records of its inputs, each as soon as it is decided.

    Args:
        spans: the offsets to replay, for each partition of each input; other records are skipped.
        records: in the order of their offsets within each partition.
        changes: counterfactuals, applied to each record one after the other before its machine observes it.
    """
    partitions = sorted({partition for _, partition in spans})
    machines: dict[int, Machine] = {p: processor.machine(p, MachineState()) for p in partitions}
    orders: dict[int, TopicMerge[ConsumedRecord]] = {p: TopicMerge(processor.inputs, {}) for p in partitions}
    observed = 0

    def decide(order: TopicMerge[ConsumedRecord]) -> Iterator[DecidedOutput[Output]]:
        """Give a partition's records to its machine, up to the first one that may not be the next in order."""
        nonlocal observed
        while (step := order.take()) is not None:
            _, _, located = step
            changed, machine = located, machines[located.partition]
            for change in changes:
                changed = change(changed)
            for output in machine.observe(changed):
                yield DecidedOutput(output, located.position, located.timestamp_ms)
            observed += 1
            if observed % CHANGES_EVERY == 0:
                for each in machines.values():
                    each.take_changes()

    for (topic, partition), span in spans.items():
        if not span:
            orders[partition].end(topic)
    for located in records:
        span, order = spans[located.topic, located.partition], orders[located.partition]
        if located.offset in span:
            order.read(located.topic, located.offset, located.timestamp_ms * 1_000, located)
            if located.offset == span.stop - 1:
                order.end(located.topic)
            yield from decide(order)
    # At the end of the input, the records that still wait.
    for topic, partition in spans:
        orders[partition].end(topic)
    for order in orders.values():
        yield from decide(order)


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
        names = Names(kafka.topic_prefix)
        cut = [f"{names.of(topic)}[{p}] begins at offset {s.start}" for (topic, p), s in spans.items() if s.start]
        total, records, rejected = sum(map(len, spans.values())), 0, 0
        emitted: list[DecidedOutput[OutputRecord]] = []

        def counted() -> Iterator[ConsumedRecord]:
            nonlocal records
            for located in reader.read_to_end(timeout_s):
                records += 1
                yield located
                progress(records, total)

        for decided in decided_outputs(processor, spans, counted(), changes):
            match decided.output:
                case OutputRecord() as output:
                    emitted.append(DecidedOutput(output, decided.cause, decided.at_ms))
                case Rejected():
                    rejected += 1
        return Replayed(emitted, rejected, records, sorted(cut))


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
