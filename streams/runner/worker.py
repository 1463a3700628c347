"""The stream processors by name, and the stream worker: a processor with the runner that the settings name."""

from __future__ import annotations

import logging

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.streams.assembly import GroupAssembler
from tidemill.streams.config import BatchSettings, ProcessorName, RunnerName, StreamSettings
from tidemill.streams.join.config import JoinSettings
from tidemill.streams.join.feedback_join import INPUTS, FeedbackJoin
from tidemill.streams.machine import Processor
from tidemill.streams.online.batcher import OnlineBatcher

LOG = logging.getLogger("tidemill.streams")


def group_assembly(run: RunSettings, stream: StreamSettings) -> Processor:
    """Return group assembly: reads `rollouts`, writes `groups`, each group in the partition of its rollouts."""
    return Processor(
        name=stream.application,
        table="groups",
        inputs=(Topic.ROLLOUTS,),
        outputs=(Topic.GROUPS,),
        machine=lambda partition, state: GroupAssembler(partition, run.run_id, stream, state),
    )


def feedback_join(run: RunSettings, settings: JoinSettings) -> Processor:
    """Return the feedback join: reads `interactions` and `feedback`, writes `outcomes`. Logs questionable settings."""
    for note in settings.map.notes():
        LOG.warning(note)
    return Processor(
        name=settings.application,
        table="join",
        inputs=INPUTS,
        outputs=(Topic.OUTCOMES,),
        machine=lambda partition, state: FeedbackJoin(partition, run.run_id, settings, state),
    )


def online_batches(run: RunSettings, settings: BatchSettings) -> Processor:
    """Return the online batcher: reads `outcomes`, writes `online-batches`. Each branch has its own application."""
    return Processor(
        name=f"{settings.application}.{run.branch}",
        table="batches",
        inputs=(Topic.OUTCOMES,),
        outputs=(Topic.ONLINE_BATCHES,),
        machine=lambda _partition, state: OnlineBatcher(run.run_id, run.branch, settings, state),
    )


def processor_of(
    name: ProcessorName, run: RunSettings, stream: StreamSettings, join: JoinSettings, batches: BatchSettings
) -> Processor:
    """Return the processor of a name: a separate application, with its own consumer group and state."""
    match name:
        case ProcessorName.ASSEMBLY:
            return group_assembly(run, stream)
        case ProcessorName.JOIN:
            return feedback_join(run, join)
        case ProcessorName.BATCHES:
            return online_batches(run, batches)


def run(kafka: KafkaSettings, run: RunSettings, stream: StreamSettings, processor: Processor) -> None:
    """Run a processor until SIGINT or SIGTERM. Raises RuntimeError if the worker cannot continue."""
    # Import only the chosen runner: the clients take long to import.
    if stream.runner is RunnerName.FAUST:
        from tidemill.streams.runner import faust_worker as runner
    else:
        from tidemill.streams.runner import transactional as runner  # type: ignore[no-redef]
    runner.serve(kafka, run, stream, processor)
