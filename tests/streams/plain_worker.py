"""A stream worker without the command line: `plain_worker SETTINGS.json PROCESSOR`.

The file contains sections of the configuration: `kafka`, `run`, `stream`, `join` and `batches`.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from pathlib import Path

from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.streams.config import BatchSettings, ProcessorName, StreamSettings
from tidemill.streams.join.config import JoinSettings
from tidemill.streams.runner import faust_worker, transactional  # noqa: F401 - loaded before workers are forked
from tidemill.streams.runner.worker import processor_of, run


def work_as(command: list[str], log: str) -> None:
    """Run a worker of this folder in this process: its module's name and its arguments. Append its output to `log`."""
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = command
    sys.exit(importlib.import_module(f"tests.streams.{command[0]}").main())


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
