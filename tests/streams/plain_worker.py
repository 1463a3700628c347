"""A stream worker as its own process, without the command line, whose imports take longer than a worker needs to start.

    python plain_worker.py SETTINGS.json PROCESSOR

The file contains sections of the configuration: `kafka`, `run`, `stream`, `join` and `batches`.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.streams.config import ProcessorName, StreamSettings
from tidemill.streams.join.config import JoinSettings
from tidemill.streams.online.config import BatchSettings
from tidemill.streams.runner.base import StreamFailure
from tidemill.streams.runner.worker import ProcessorSettings, processor_of, run


def main() -> int:
    """Read the settings and run until a signal. Return the exit status."""
    path, processor = sys.argv[1:]
    sections = json.loads(Path(path).read_text("utf-8"))
    kafka = KafkaSettings(**sections["kafka"])
    rules = ProcessorSettings(
        run=RunSettings(**sections["run"]),
        stream=StreamSettings(**sections["stream"]),
        join=JoinSettings(**sections.get("join", {})),
        batches=BatchSettings(**sections.get("batches", {})),
    )
    logging.basicConfig(level=rules.stream.log_level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        run(kafka, rules.run, rules.stream, processor_of(ProcessorName(processor), rules))
    except StreamFailure as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
