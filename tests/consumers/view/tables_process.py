"""A process with the embedded engine's tables open: writes the page's run, and more rows while it serves queries.

    python -m tests.consumers.view.tables_process DIRECTORY

A process can open only one directory, and other tests of the caller's process open theirs. This process answers
queries as a running sink does. Each line on standard input is the number of the next step, whose rows it writes; it
replies `ok`, first when the run is written. It ends at the end of its input.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from tests.consumers.sink_support import rows_of
from tests.consumers.view.run_records import SimulatedLoop, page_rows
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.rows import Row
from tidemill.consumers.sink.service import open_tables


def placed(rows: list[Row], reached: dict[str, int]) -> list[Row]:
    """Return the rows with the next offset of each topic; update `reached`."""
    found = []
    for row in rows:
        offset = reached.get(row.topic, 0)
        reached[row.topic] = offset + 1
        found.append(replace(row, partition=0, offset=offset))
    return found


def main(directory: str) -> None:
    """Write the run; serve it until the end of standard input."""
    with open_tables(SinkSettings(path=directory, http_port=0)) as (writer, _url):
        reached: dict[str, int] = {}

        def write(rows: list[Row]) -> None:
            fresh = placed(rows, reached)
            writer.write(fresh, {(topic, 0): offset for topic, offset in reached.items()})
            print("ok", flush=True)

        loop = SimulatedLoop()
        write(page_rows(loop))
        for line in sys.stdin:
            write(rows_of(loop.step(int(line))))


if __name__ == "__main__":
    main(sys.argv[1])
