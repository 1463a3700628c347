"""One stream worker: a processor under the runner that the settings name."""

from __future__ import annotations

import logging

from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.streams.config import RunnerName, StreamSettings
from tidemill.streams.machine import Processor


def run(kafka: KafkaSettings, run: RunSettings, stream: StreamSettings, processor: Processor) -> None:
    """Run a processor until SIGINT or SIGTERM. Raises StreamFailure when the worker cannot go on."""
    logging.basicConfig(level=stream.log_level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # One runner's client is of no use to the other, and takes long to import.
    if stream.runner is RunnerName.FAUST:
        from tidemill.streams.runner.faust import worker as runner
    else:
        from tidemill.streams.runner import transactional as runner  # type: ignore[no-redef]
    runner.serve(kafka, run, stream, processor)
