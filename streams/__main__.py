"""`python -m tidemill.streams SETTINGS.json [PROCESSOR]`: one stream worker, without the command line of `tidemill`.

The file holds sections of the configuration: `kafka`, `run`, `stream`, `join` and `batches`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.streams.config import ProcessorName, StreamSettings
from tidemill.streams.join.config import JoinSettings
from tidemill.streams.online.config import BatchSettings
from tidemill.streams.processors import Rules, processor_of
from tidemill.streams.runner.base import StreamFailure
from tidemill.streams.worker import run


def main() -> int:
    """Read the settings and work until a signal; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tidemill.streams", description=__doc__)
    parser.add_argument("settings", type=Path, help="JSON file with sections of the configuration")
    names = [name.value for name in ProcessorName]
    parser.add_argument("processor", nargs="?", choices=names, default=ProcessorName.ASSEMBLY.value)
    options = parser.parse_args()
    sections = json.loads(options.settings.read_text("utf-8"))
    kafka = KafkaSettings(**sections.get("kafka", {}))
    rules = Rules(
        run=RunSettings(**sections.get("run", {})),
        stream=StreamSettings(**sections.get("stream", {})),
        join=JoinSettings(**sections.get("join", {})),
        batches=BatchSettings(**sections.get("batches", {})),
    )
    try:
        run(kafka, rules.run, rules.stream, processor_of(ProcessorName(options.processor), rules))
    except StreamFailure as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
