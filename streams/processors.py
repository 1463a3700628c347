"""The stream processors by name: each is an application of its own, with its own consumer group and state."""

from __future__ import annotations

from tidemill.schemas.config import RunSettings
from tidemill.streams.assembly.processor import GroupAssembly
from tidemill.streams.config import ProcessorName, StreamSettings
from tidemill.streams.machine import Processor


def processor_of(name: ProcessorName, run: RunSettings, stream: StreamSettings) -> Processor:
    """The processor of a name, with the settings that decide its outcomes."""
    match name:
        case ProcessorName.ASSEMBLY:
            return GroupAssembly.of(run, stream)
    raise NotImplementedError(name)
