"""`python -m tidemill.streams SETTINGS.json`: one group assembly worker, without the command line of `tidemill`.

The file holds three sections, `kafka`, `run` and `stream`, as in the configuration of every role.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.streams.config import StreamSettings
from tidemill.streams.faust_app import StreamFailure, run


def main() -> int:
    """Read the settings and work until a signal; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tidemill.streams", description=__doc__)
    parser.add_argument("settings", type=Path, help="JSON file with the sections kafka, run and stream")
    sections = json.loads(parser.parse_args().settings.read_text("utf-8"))
    try:
        run(
            KafkaSettings(**sections.get("kafka", {})),
            RunSettings(**sections.get("run", {})),
            StreamSettings(**sections.get("stream", {})),
        )
    except StreamFailure as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
