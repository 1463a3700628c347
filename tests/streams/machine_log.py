"""A log in memory and a worker on it: any interleaving of a machine's inputs, and a kill between any two writes.

The worker keeps the promises that `tidemill.streams.machine` names: outputs, then states, heads, deletions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Record
from tidemill.streams.machine import Emit, Machine, Output, Rejected

Make = Callable[[Iterable[tuple[str, bytes]]], Machine]


class Killed(Exception):
    """The process died here."""


@dataclass
class MachineLog:
    """The inputs of one partition, what was written for them, and the state topic."""

    inputs: Mapping[Topic, Sequence[ConsumedRecord]]
    outputs: list[Output] = field(default_factory=list)
    state: dict[str, bytes] = field(default_factory=dict)
    writes_left: int | None = None
    """Writes until the next kill; None: no kill."""

    def spend(self) -> None:
        """One write. Raises Killed."""
        if self.writes_left is not None:
            if self.writes_left == 0:
                raise Killed
            self.writes_left -= 1

    def write_output(self, output: Output) -> None:
        """A record or a dead letter."""
        self.spend()
        self.outputs.append(output)

    def write_state(self, key: str, value: bytes | None) -> None:
        """One record of the compacted state topic."""
        self.spend()
        if value is None:
            self.state.pop(key, None)
        else:
            self.state[key] = value


def interleaved(machine: Machine, log: MachineLog, turns: Sequence[int]) -> Iterable[ConsumedRecord]:
    """What is left to decide, the topics taking turns as told, over and over."""
    left = {t: [r for r in records if r.offset >= machine.next_offset(t)] for t, records in log.inputs.items()}
    for turn in cycle([*turns, *range(len(left))]):
        if not any(left.values()):
            return
        records = list(left.values())[turn % len(left)]
        if records:
            yield records.pop(0)


def work(log: MachineLog, make: Make, turns: Sequence[int] = (), batch: int = 3) -> Machine:
    """Work from where the state says to the end of the log. Raises Killed."""
    machine = make(list(log.state.items()))
    records = list(interleaved(machine, log, turns))
    for start in range(0, len(records), batch):
        outputs = [output for record in records[start : start + batch] for output in machine.observe(record)]
        for output in outputs:
            log.write_output(output)
        changes = machine.take_changes()
        for key, value in [*changes.states.items(), *changes.heads.items()]:
            log.write_state(key, value)
        for key in changes.forgotten:
            log.write_state(key, None)
    return machine


def work_through_kills(log: MachineLog, make: Make, kills: Sequence[tuple[int, Sequence[int]]], batch: int) -> Machine:
    """Work to the end, killed after each of so many writes, the topics taking other turns each time."""
    for writes, turns in kills:
        log.writes_left = writes
        try:
            work(log, make, turns, batch)
        except Killed:
            continue
        break
    log.writes_left = None
    return work(log, make, (), batch)


def said(outputs: Iterable[Output]) -> list[tuple[str, object]]:
    """Outputs without what was only repeated, in their order."""
    return list(dict.fromkeys(map(_content, outputs)))


def _content(output: Output) -> tuple[str, object]:
    match output:
        case Emit(topic, key, record, partition):
            return "emit", (topic, key, repr(record), partition)
        case Rejected(located, reason):
            return "reject", (located.position, located.key, located.value, located.timestamp_ms, reason)


def records_of(outputs: Iterable[Output]) -> list[Record]:
    """The records that were emitted."""
    return [output.record for output in outputs if isinstance(output, Emit)]
