"""A transactional worker that is killed at a point of a transaction, or gets an error at each of several points.

    killed_worker FATE POINT... SETTINGS.json

FATE is `kill` or `fail`. A point is `before` or `after` the third call of a producer's method, counted from the
previous point: `before:flush`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.shutdown import stop_on_signals
from tidemill.streams.config import StreamSettings
from tidemill.streams.runner import transactional
from tidemill.streams.runner.worker import group_assembly


class Doomed:
    """A producer that kills the process or raises an error at each point in turn."""

    def __init__(self, real: Any, fate: str, points: Sequence[str]) -> None:
        self._real, self._fate, self._points = real, fate, list(points)
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)

        def called(*arguments: Any, **options: Any) -> Any:
            when, _, call = self._points[0].partition(":") if self._points else ("", "", "")
            self._calls += call == name
            reached = call == name and self._calls == 3
            if reached and when == "before":
                self._end()
            answer = found(*arguments, **options)
            if reached and when == "after":
                self._end()
            return answer

        return called

    def _end(self) -> None:
        if self._fate == "kill":
            self._real.flush(10)
            os.kill(os.getpid(), signal.SIGKILL)
        self._calls = 0
        point = self._points.pop(0)
        print(f"an error {point}", file=sys.stderr, flush=True)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "told to fail"))


def main() -> None:
    """Run the worker."""
    fate, *points, path = sys.argv[1:]
    sections = json.loads(Path(path).read_text("utf-8"))
    stream, settings = StreamSettings(**sections["stream"]), RunSettings(**sections["run"])
    transactional.AGAIN_S = 0.05
    processor = group_assembly(settings, stream)
    runner = transactional.TransactionalRunner(KafkaSettings(**sections["kafka"]), settings, stream, processor)
    runner._producer = Doomed(runner._producer, fate, points)  # type: ignore[assignment]
    runner.serve(stop_on_signals())
