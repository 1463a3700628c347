"""A process with the embedded engine's tables open: writes the page's run, and more rows while it serves queries.

    python -m tests.consumers.view.tables_process DIRECTORY [--serve]

One process has one directory open, and other tests of the caller's process have theirs. With `--serve` it is asked as a
running sink is. Each line on standard input is the number of the next step, whose rows are written; it answers `ok`. It
ends with its input.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing

from tests.consumers.sink_support import rows_of
from tests.consumers.view.run_records import SimulatedLoop, page_rows
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
from tidemill.consumers.sink.http_api import query_server
from tidemill.consumers.sink.query import SinkState, write_state
from tidemill.consumers.sink.rows import Row
from tidemill.consumers.sink.writer import Writer


def main(directory: str, *, serve: bool) -> None:
    """Write the run; serve it until the end of standard input."""
    sink = SinkSettings(path=directory, http_port=0)
    with closing(connect(sink)) as client:
        writer = Writer(client, sink.database, sink.table_engine)
        reached: dict[str, int] = {}

        def write(rows: list[Row]) -> None:
            placed = []
            for row in rows:
                offset = reached.get(row.topic, 0)
                reached[row.topic] = offset + 1
                placed.append(Row(row.topic, 0, offset, row.timestamp_ms, row.key, row.record, row.n_bytes))
            writer.write(placed, {(topic, 0): offset for topic, offset in reached.items()})

        loop = SimulatedLoop()
        write(page_rows(loop))
        print("ok", flush=True)
        if not serve:
            return
        with query_server(sink) as server:
            write_state(sink.directory, SinkState(os.getpid(), server.url, sink.database))
            print("ok", flush=True)
            for line in sys.stdin:
                write(rows_of(loop.step(int(line))))
                print("ok", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], serve="--serve" in sys.argv)
