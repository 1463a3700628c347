"""The stream processors by name: each is an application of its own, with its own consumer group and state."""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.schemas.config import RunSettings
from tidemill.streams.assembly.processor import GroupAssembly
from tidemill.streams.config import ProcessorName, StreamSettings
from tidemill.streams.join.config import JoinSettings
from tidemill.streams.join.processor import JoinProcessor
from tidemill.streams.machine import Processor
from tidemill.streams.online.config import BatchSettings
from tidemill.streams.online.processor import BatchProcessor


@dataclass(frozen=True, slots=True)
class Rules:
    """The sections of the configuration that decide what processors put out."""

    run: RunSettings = field(default_factory=RunSettings)
    stream: StreamSettings = field(default_factory=StreamSettings)
    join: JoinSettings = field(default_factory=JoinSettings)
    batches: BatchSettings = field(default_factory=BatchSettings)


def processor_of(name: ProcessorName, rules: Rules) -> Processor:
    """The processor of a name."""
    match name:
        case ProcessorName.ASSEMBLY:
            return GroupAssembly.of(rules.run, rules.stream)
        case ProcessorName.JOIN:
            return JoinProcessor.of(rules.run, rules.join)
        case ProcessorName.BATCHES:
            return BatchProcessor.of(rules.run, rules.batches)
