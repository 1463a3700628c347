"""Online batches as a stream processor: `outcomes` in, `online-batches` out."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import RunSettings
from tidemill.streams.online.batcher import BatchRules, OnlineBatcher
from tidemill.streams.online.config import BatchSettings
from tidemill.streams.state import MachineState


@dataclass(frozen=True, slots=True)
class BatchProcessor:
    """The online batches of one branch of one run."""

    rules: BatchRules
    name: str = "online-batches"
    table: str = "batches"
    inputs: tuple[Topic, ...] = (Topic.OUTCOMES,)
    outputs: tuple[Topic, ...] = (Topic.ONLINE_BATCHES,)

    @classmethod
    def of(cls, run: RunSettings, settings: BatchSettings) -> BatchProcessor:
        """From the settings that decide batches. Each branch has an application of its own."""
        return cls(BatchRules(run.run_id, run.branch, settings), f"{settings.application}.{run.branch}")

    def machine(self, partition: int, state: MachineState) -> OnlineBatcher:
        """The batcher of a partition. Raises StateError."""
        return OnlineBatcher(self.rules, state)
