"""Rows a second of the sink's write path: rollouts of 512 tokens in flushes of 4000, into the embedded engine.

    python tests/bench/bench_sink.py [--flushes 5] [--rows 4000]

Prints wall-clock rows a second and CPU microseconds a row (the figure that other load on the machine does not move).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from tests.consumers.sink_support import rollout, rows_of
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
from tidemill.consumers.sink.rows import Row
from tidemill.consumers.sink.writer import Writer
from tidemill.schemas.records import Segment, VersionSpan

TOKENS = 512


def flush_of(rows: int, first: int) -> list[Row]:
    generator = np.random.default_rng(first)
    made = []
    for number in range(rows):
        ids = generator.zipf(1.3, TOKENS).astype("<u4").tobytes()
        logprobs = generator.normal(size=TOKENS).astype("<f4").tobytes()
        tokens = Segment(TOKENS, ids, b"\x01" * TOKENS, logprobs, [VersionSpan(1, 0, TOKENS)])
        made.append(dataclasses.replace(rollout(f"r{first + number}", f"g{number // 16}"), segments=[tokens]))
    return rows_of(made, first=first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flushes", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        client = connect(SinkSettings(path=folder))
        writer = Writer(client, "bench", SinkSettings().table_engine)
        wall = cpu = 0.0
        for number in range(options.flushes):
            rows = flush_of(options.rows, number * options.rows)
            wall, cpu = wall - time.perf_counter(), cpu - time.process_time()
            writer.write(rows, {("tidemill.rollouts", 0): (number + 1) * options.rows})
            wall, cpu = wall + time.perf_counter(), cpu + time.process_time()
        total = options.flushes * options.rows
        client.close()
    print(f"{total / wall:.0f} rows/s, {TOKENS * total / wall / 1e6:.1f} Mtokens/s, {cpu / total * 1e6:.1f} CPU us/row")


if __name__ == "__main__":
    main()
