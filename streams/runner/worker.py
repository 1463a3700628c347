"""The stream processors by name, and the stream worker: a processor with the runner that the settings name."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.streams.assembly import GroupAssembler
from tidemill.streams.config import ProcessorName, RunnerName, StreamSettings
from tidemill.streams.join.config import JoinSettings
from tidemill.streams.join.feedback_join import INPUTS, FeedbackJoin
from tidemill.streams.machine import Processor
from tidemill.streams.online.batcher import OnlineBatcher
from tidemill.streams.online.config import BatchSettings
from tidemill.streams.state import MachineState

LOG = logging.getLogger("tidemill.streams")


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """The sections of the configuration that determine the outputs of processors."""

    run: RunSettings = field(default_factory=RunSettings)
    stream: StreamSettings = field(default_factory=StreamSettings)
    join: JoinSettings = field(default_factory=JoinSettings)
    batches: BatchSettings = field(default_factory=BatchSettings)


def group_assembly(run: RunSettings, stream: StreamSettings) -> Processor:
    """Return group assembly: reads `rollouts`, writes `groups`, each group in the partition of its rollouts."""

    def machine(partition: int, state: MachineState) -> GroupAssembler:
        return GroupAssembler(partition, run.run_id, stream, state)

    return Processor(stream.application, "groups", (Topic.ROLLOUTS,), (Topic.GROUPS,), machine)


def feedback_join(run: RunSettings, settings: JoinSettings) -> Processor:
    """Return the feedback join: reads `interactions` and `feedback`, writes `outcomes`. Logs questionable settings."""
    for note in settings.map.notes():
        LOG.warning(note)

    def machine(partition: int, state: MachineState) -> FeedbackJoin:
        return FeedbackJoin(partition, run.run_id, settings, state)

    return Processor(settings.application, "join", INPUTS, (Topic.OUTCOMES,), machine)


def online_batches(run: RunSettings, settings: BatchSettings) -> Processor:
    """Return the online batcher: reads `outcomes`, writes `online-batches`. Each branch has its own application."""

    def machine(_partition: int, state: MachineState) -> OnlineBatcher:
        return OnlineBatcher(run.run_id, run.branch, settings, state)

    name = f"{settings.application}.{run.branch}"
    return Processor(name, "batches", (Topic.OUTCOMES,), (Topic.ONLINE_BATCHES,), machine)


def processor_of(name: ProcessorName, rules: ProcessorSettings) -> Processor:
    """Return the processor of a name: a separate application, with its own consumer group and state."""
    match name:
        case ProcessorName.ASSEMBLY:
            return group_assembly(rules.run, rules.stream)
        case ProcessorName.JOIN:
            return feedback_join(rules.run, rules.join)
        case ProcessorName.BATCHES:
            return online_batches(rules.run, rules.batches)


def run(kafka: KafkaSettings, run: RunSettings, stream: StreamSettings, processor: Processor) -> None:
    """Run a processor until SIGINT or SIGTERM. Raises StreamFailure if the worker cannot continue."""
    # Import only the chosen runner: the clients take long to import.
    if stream.runner is RunnerName.FAUST:
        from tidemill.streams.runner import faust_worker as runner
    else:
        from tidemill.streams.runner import transactional as runner  # type: ignore[no-redef]
    runner.serve(kafka, run, stream, processor)
