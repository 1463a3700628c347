"""Group assembly as a stream processor: `rollouts` in, `groups` out, a group in the partition of its rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import to_us
from tidemill.schemas.config import RunSettings
from tidemill.streams.assembly.group_assembly import AssemblyRules, GroupAssembler
from tidemill.streams.config import StreamSettings
from tidemill.streams.state import MachineState


@dataclass(frozen=True, slots=True)
class GroupAssembly:
    """The groups of one run."""

    rules: AssemblyRules
    name: str = "group-assembly"
    table: str = "groups"
    inputs: tuple[Topic, ...] = (Topic.ROLLOUTS,)
    outputs: tuple[Topic, ...] = (Topic.GROUPS,)

    @classmethod
    def of(cls, run: RunSettings, stream: StreamSettings) -> GroupAssembly:
        """From the part of the settings that decides outcomes."""
        rules = AssemblyRules(
            run_id=run.run_id,
            done_ttl_us=to_us(stream.done_ttl_s),
            min_completed=stream.min_completed,
            shuffle_rewards=stream.shuffle_rewards,
        )
        return cls(rules, stream.application)

    def machine(self, partition: int, state: MachineState) -> GroupAssembler:
        """The assembler of a partition. Raises StateError."""
        return GroupAssembler(partition, self.rules, state)
