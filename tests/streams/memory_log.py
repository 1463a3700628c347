"""A small in-memory log and a worker on it that can be killed between any two of its writes.

The worker follows the protocol of the Faust shell over `GroupAssembler`: outputs, states, heads, deletions, commit. A
`Killed` raised by the log at a chosen write stands for SIGKILL: everything written before is there, nothing after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Group
from tidemill.streams.assembly import group_state
from tidemill.streams.assembly.group_assembly import AssemblyRules, GroupAssembler
from tidemill.streams.machine import Output, Rejected


class Killed(Exception):
    """The process died here."""


@dataclass
class MemoryLog:
    """One input partition, its outputs and its state topic."""

    records: Sequence[ConsumedRecord]
    groups: list[Group] = field(default_factory=list)
    dead_letters: list[Rejected] = field(default_factory=list)
    state: dict[str, bytes] = field(default_factory=dict)
    writes_left: int | None = None
    """Writes until the next kill; None: no kill."""

    def _spend(self) -> None:
        if self.writes_left is not None:
            if self.writes_left == 0:
                raise Killed
            self.writes_left -= 1

    def write_output(self, output: Output) -> None:
        """A group or a dead letter."""
        self._spend()
        if isinstance(output, Rejected):
            self.dead_letters.append(output)
        else:
            assert isinstance(output.record, Group)
            self.groups.append(output.record)

    def write_state(self, key: str, value: bytes | None) -> None:
        """One record of the compacted state topic."""
        self._spend()
        if value is None:
            self.state.pop(key, None)
        else:
            self.state[key] = value


def restore(log: MemoryLog, rules: AssemblyRules) -> GroupAssembler:
    """The assembler that a fresh worker builds from the state topic."""
    states = [(key, group_state.decode(value)) for key, value in log.state.items()]
    return GroupAssembler(0, rules, states)


def run_worker(log: MemoryLog, rules: AssemblyRules, batch: int) -> None:
    """Work from where the state says to the end of the log. Raises Killed."""
    assembler = restore(log, rules)
    waiting = [record for record in log.records if record.offset >= assembler.next_offset()]
    for start in range(0, len(waiting), batch):
        outputs = [output for record in waiting[start : start + batch] for output in assembler.observe(record)]
        for output in outputs:
            log.write_output(output)
        changes = assembler.take_changes()
        for key, value in [*changes.states.items(), *changes.heads.items()]:
            log.write_state(key, value)
        for key in changes.forgotten:
            log.write_state(key, None)
