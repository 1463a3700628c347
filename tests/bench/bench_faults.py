"""The six faults of the weight log and a replica's report on each, one JSON line per fault.

    python tests/bench/bench_faults.py [--bootstrap HOST:PORT]

Without an address, a broker of the local stack is started for this run. The stories are those of the tests.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import uuid
from pathlib import Path

from measuring import scratch_log

from tests.consumers.replica_faults import STORIES, Site
from tidemill.schemas.config import KafkaSettings


def tell(fault: str, bootstrap: str, directory: Path) -> None:
    """Play one fault and print the result."""
    site = Site(KafkaSettings(bootstrap=bootstrap, topic_prefix=f"faults-{uuid.uuid4().hex[:8]}."), directory)
    begun = time.monotonic()
    try:
        STORIES[fault](site)
        said = [[ack.status.value, ack.version, ack.serving_version, ack.reason] for ack in site.acks]
        seconds = round(time.monotonic() - begun, 2)
        line = {"fault": fault, "what": STORIES[fault].__doc__, "healed": site.healed(), "seconds": seconds}
        print(json.dumps({**line, "acks": said}), flush=True)
    finally:
        site.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Six faults of the weight log, refused and healed.")
    parser.add_argument("--bootstrap", default="")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with scratch_log(arguments.bootstrap) as (bootstrap, root):
        for fault in STORIES:
            directory = root / fault.replace(" ", "-")
            directory.mkdir()
            tell(fault, bootstrap, directory)


if __name__ == "__main__":
    main()
