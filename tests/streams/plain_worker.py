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
from tidemill.streams.config import BatchSettings, ProcessorName, StreamSettings
from tidemill.streams.join.config import JoinSettings
from tidemill.streams.runner.worker import processor_of, run


def main() -> int:
    """Read the settings and run until a signal. Return the exit status."""
    path, processor = sys.argv[1:]
    sections = json.loads(Path(path).read_text("utf-8"))
    kafka = KafkaSettings(**sections["kafka"])
    settings, stream = RunSettings(**sections["run"]), StreamSettings(**sections["stream"])
    join, batches = JoinSettings(**sections.get("join", {})), BatchSettings(**sections.get("batches", {}))
    logging.basicConfig(level=stream.log_level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        run(kafka, settings, stream, processor_of(ProcessorName(processor), settings, stream, join, batches))
    except RuntimeError as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
