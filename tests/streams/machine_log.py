"""A log in memory and its worker: any interleaving of a machine's inputs, and a kill between any two writes.

The worker keeps the guarantees of `tidemill.streams.machine` in one of two ways: the writes of a batch can end at any
point (outputs first, then the steps of a redo log), or they are atomic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Record
from tidemill.streams.machine import Machine, Output, OutputRecord, Rejected
from tidemill.streams.runner.journal import Journal, partition_of_state
from tidemill.streams.state import MachineState

Make = Callable[[MachineState], Machine]


class Killed(Exception):
    """The simulated process was killed."""


@dataclass
class MachineLog:
    """The inputs of one partition, the outputs written for them, and the state topic."""

    inputs: Mapping[Topic, Sequence[ConsumedRecord]]
    outputs: list[Output] = field(default_factory=list)
    state: dict[str, bytes] = field(default_factory=dict)
    writes_left: int | None = None
    """Number of writes until the next kill; None: no kill."""
    atomic: bool = False
    """Whether the writes of a batch become visible together."""
    _open: list[Callable[[], object]] = field(default_factory=list)

    def spend(self) -> None:
        """Count one write. Raises Killed."""
        if self.writes_left is not None:
            if self.writes_left == 0:
                raise Killed
            self.writes_left -= 1

    def write_output(self, output: Output) -> None:
        """Write a record or a dead letter."""
        self.spend()
        self._open.append(lambda: self.outputs.append(output))
        self._end(not self.atomic)

    def write_state(self, key: str, value: bytes | None) -> None:
        """Write one record of the compacted state topic."""
        self.spend()
        self._open.append(lambda: self.state.pop(key, None) if value is None else self.state.update({key: value}))
        self._end(not self.atomic)

    def begin(self) -> None:
        """Start a new worker: discard uncommitted writes."""
        self._open.clear()

    def commit(self) -> None:
        """End a batch; this counts as a write if the log is atomic. Raises Killed."""
        if self.atomic:
            self.spend()
        self._end(True)

    def _end(self, visible: bool) -> None:
        if visible:
            for write in self._open:
                write()
            self._open.clear()


def interleaved(machine: Machine, log: MachineLog, turns: Sequence[int]) -> Iterable[ConsumedRecord]:
    """Yield the unprocessed records, from the topics in the cyclic order of `turns`."""
    left = {t: [r for r in records if r.offset >= machine.next_offset(t)] for t, records in log.inputs.items()}
    for turn in cycle([*turns, *range(len(left))]):
        if not any(left.values()):
            return
        records = list(left.values())[turn % len(left)]
        if records:
            yield records.pop(0)


def work(log: MachineLog, make: Make, turns: Sequence[int] = (), batch: int = 3) -> Machine:
    """Process the log from the position in the state to its end. Raises Killed."""
    log.begin()
    assert {partition_of_state(*item) for item in log.state.items()} <= {0}
    journal = Journal(0, log.state.items())
    machine = make(journal.state)
    records = list(interleaved(machine, log, turns))
    for start in range(0, len(records), batch):
        outputs = [output for record in records[start : start + batch] for output in machine.observe(record)]
        for output in outputs:
            log.write_output(output)
        changes = machine.take_changes()
        for step in [journal.commit(changes)] if log.atomic else journal.redo(changes):
            for key, value in step.items():
                log.write_state(key, value)
        log.commit()
    return machine


def work_through_kills(
    log: MachineLog, make: Make, kills: Sequence[tuple[int, Sequence[int]]], batch: int, last: Sequence[int] = ()
) -> Machine:
    """Process the log to its end through kills after these numbers of writes, each run with its own turns."""
    for writes, turns in kills:
        log.writes_left = writes
        try:
            work(log, make, turns, batch)
        except Killed:
            continue
        break
    log.writes_left = None
    return work(log, make, last, batch)


def check_kills(
    inputs: Mapping[Topic, Sequence[ConsumedRecord]],
    make: Make,
    kills: Sequence[tuple[int, Sequence[int]]],
    batch: int,
    atomic: bool,
    last: Sequence[int] = (),
) -> None:
    """Assert that kills, batch sizes and turns do not change outputs or state; outputs may only be repeated."""
    undisturbed, disturbed = MachineLog(inputs), MachineLog(inputs, atomic=atomic)
    whole = work(undisturbed, make, batch=1)
    machine = work_through_kills(disturbed, make, kills, batch, last)
    assert said(disturbed.outputs) == said(undisturbed.outputs)
    assert not atomic or len(disturbed.outputs) == len(undisturbed.outputs)
    for name in ("_head", "counts"):
        assert getattr(machine, name, None) == getattr(whole, name, None)
    assert {entry.key: entry for entry in machine._store.entries()} == {e.key: e for e in whole._store.entries()}
    assert [machine.next_offset(topic) for topic in inputs] == [whole.next_offset(topic) for topic in inputs]
    assert machine.next_deadline_us() == whole.next_deadline_us()


def said(outputs: Iterable[Output]) -> list[tuple[str, object]]:
    """Return the distinct outputs in their order."""
    return list(dict.fromkeys(map(_content, outputs)))


def _content(output: Output) -> tuple[str, object]:
    match output:
        case OutputRecord(topic, key, record, partition):
            return "emit", (topic, key, repr(record), partition)
        case Rejected(located, reason):
            return "reject", (located.position, located.key, located.value, located.timestamp_ms, reason)


def records_of(outputs: Iterable[Output]) -> list[Record]:
    """Return the emitted records."""
    return [output.record for output in outputs if isinstance(output, OutputRecord)]
