"""A transactional worker that is killed at one point of its n-th transaction, or gets an error there.

    python killed_worker.py SETTINGS.json CALL WHEN NUMBER FATE

CALL is a method of the producer, WHEN is `before` or `after`, NUMBER counts the calls from 1, FATE is `kill` or `fail`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.shutdown import stop_on_signals
from tidemill.streams.config import StreamSettings
from tidemill.streams.runner.transactional import TransactionalRunner
from tidemill.streams.runner.worker import group_assembly


class Doomed:
    """A producer whose n-th call of one method kills the process or raises an error."""

    def __init__(self, real: Any, call: str, when: str, number: int, fate: str) -> None:
        self._real, self._call, self._when, self._left, self._fate = real, call, when, number, fate

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name != self._call:
            return found

        def called(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0 and self._when == "before":
                self._end()
            answer = found(*arguments, **options)
            if self._left == 0 and self._when == "after":
                self._end()
            return answer

        return called

    def _end(self) -> None:
        if self._fate == "kill":
            self._real.flush(10)
            os.kill(os.getpid(), signal.SIGKILL)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "told to fail"))


def main() -> None:
    """Run the worker until the given point."""
    sections = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    stream, settings = StreamSettings(**sections["stream"]), RunSettings(**sections["run"])
    runner = TransactionalRunner(KafkaSettings(**sections["kafka"]), settings, stream, group_assembly(settings, stream))
    call, when, number, fate = sys.argv[2:]
    runner._producer = Doomed(runner._producer, call, when, int(number), fate)  # type: ignore[assignment]
    runner.serve(stop_on_signals())


if __name__ == "__main__":
    main()
