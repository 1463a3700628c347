"""The log for an offline run of a stream processor: its inputs up to a fixed end, and what was written for them.

It only reads, without a consumer group. Outputs are read first: each was decided by inputs that lie before the ends,
which are fixed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tidemill.schemas.catalogue import Names
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Group, OnlineBatch, Outcome
from tidemill.streams.machine import Emit, Processor, Rejected
from tidemill.streams.offline import Change, Decided, OfflineRun, RecordRange

CLIENT = "tidemill-replay"


@dataclass(frozen=True, slots=True)
class Emitted:
    """A record that a processor writes, and the input record by which it was decided."""

    emit: Emit
    cause: Position
    at_ms: int
    """The cause's timestamp."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a processor makes of the log."""

    emitted: list[Emitted] = field(default_factory=list)
    """In the order in which they were decided."""
    rejected: int = 0
    """Records that are dead letters, each as often as it was rejected."""
    records: int = 0
    """Input records that were read."""
    cut: list[str] = field(default_factory=list)
    """Partitions whose log no longer begins at its beginning: what their lost records decided is not repeated."""


def recorded_outputs(
    kafka: KafkaSettings, run: RunSettings, processor: Processor, timeout_s: float
) -> list[ConsumedRecord]:
    """What is in the processor's output topics of this run, and branch where there is one.

    Raises LookupError without the topics, TimeoutError when their ends are not reached in time.
    """
    with LogReader(kafka, processor.outputs, client_id=CLIENT) as reader:
        return [located for located in reader.read_to_end(timeout_s) if _is_of(run, located)]


def replay(
    kafka: KafkaSettings,
    processor: Processor,
    change: Change,
    timeout_s: float,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Replayed:
    """Run a processor over its inputs as they lie in the log now; `progress` is told records read and offsets in all.

    Raises LookupError without the topics, TimeoutError when their ends are not reached in time.
    """
    with LogReader(kafka, processor.inputs, client_id=CLIENT) as reader:
        begins, ends = reader.next_offsets(), reader.end_offsets()
        spans = {place: RecordRange(begins[place], end) for place, end in ends.items()}
        run = OfflineRun(processor, spans, change)
        names = Names(kafka.topic_prefix)
        cut = [f"{names.of(topic)}[{p}] begins at offset {s.begin}" for (topic, p), s in spans.items() if s.begin]
        total = sum(span.end - span.begin for span in spans.values())
        emitted: list[Emitted] = []
        rejected = records = 0
        for decided in _decisions(run, reader.read_to_end(timeout_s)):
            emitted += [Emitted(d.output, d.cause, d.at_ms) for d in decided if isinstance(d.output, Emit)]
            rejected += sum(isinstance(d.output, Rejected) for d in decided)
            progress(records, total)
            records += 1
        return Replayed(emitted, rejected, records - 1, sorted(cut))


def _decisions(run: OfflineRun, records: Iterator[ConsumedRecord]) -> Iterator[list[Decided]]:
    """What each record decides, and last what is left."""
    for located in records:
        yield run.take(located)
    yield run.finish()


def _is_of(run: RunSettings, located: ConsumedRecord) -> bool:
    match located.record:
        case Group(run_id=run_id) | Outcome(run_id=run_id):
            return run_id == run.run_id
        case OnlineBatch(run_id=run_id, branch=branch):
            return (run_id, branch) == (run.run_id, run.branch)
        case _:
            return False
