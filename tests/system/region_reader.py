"""Reads one delta chunk inside a region and prints the seconds that it took: region_reader.py CONFIG, a JSON object
with `kafka`, the settings of the log, and `deadline_s`."""

from __future__ import annotations

import json
import sys
import time

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.reader import LogReader


def main() -> None:
    """Read until the chunk arrives, or fail after the deadline."""
    config = json.loads(sys.argv[1])
    begun = time.monotonic()
    with LogReader(KafkaSettings(**config["kafka"]), [Topic.DELTAS], client_id="region-reader") as reader:
        while not reader.poll(0.1):
            if time.monotonic() - begun > config["deadline_s"]:
                sys.exit("nothing came")
    print(time.monotonic() - begun)


if __name__ == "__main__":
    main()
