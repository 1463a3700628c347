"""The named query about slow tasks: how many rollouts of each length were dispatched, and how many were trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.consumers.operate.audit_support import RunLog, rollout, task, turn
from tests.consumers.sink_support import rows_of
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
from tidemill.consumers.sink.query import ask
from tidemill.consumers.sink.writer import Writer


def asked(path: Path, log: RunLog) -> list[dict[str, Any]]:
    sink = SinkSettings(path=str(path), http_port=0)
    client = connect(sink)
    Writer(client, sink.database, sink.table_engine).write(rows_of([one.record for one in log.all()]), {})
    client.close()
    answer = ask(sink, "fairness")
    return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]


def test_slow_rollouts_that_timed_out_are_missing_from_the_trained_ones(tmp_path: Path):
    log = RunLog()
    quick = log.issue(task("quick", 2))
    slow = log.issue(task("slow", 2))
    for number in (1, 2):
        for index in (0, 1):
            log.put(replace(turn(slow, index, 0), turn=number), at=slow.issued_at)
    for index in (0, 1):
        log.roll(rollout(quick, index, float(index)), at=quick.issued_at)
    log.roll(rollout(slow, 0, 1.0, turns=3, sampled_tokens=12), at=slow.issued_at)
    log.roll(replace(rollout(slow, 1, None), failure="timeout: no result within 60 s"), at=slow.issued_at)
    log.train([0, 1])
    found = asked(tmp_path / "sink", log)
    told = [(r["turns"], r["dispatched"], r["finished"], r["out_of_time"], r["trained"]) for r in found]
    assert told == [(1, 2, 2, 0, 2), (3, 2, 1, 1, 1)]
    shares = [(r["share_dispatched"], r["share_trained"], r["difference"]) for r in found]
    assert shares == [(0.5, 0.6667, 0.1667), (0.5, 0.3333, -0.1667)]
    assert [row["sampled_tokens"] for row in found] == [4.0, 12.0]
