"""A broker that stops answering: the reader reports it and continues when the broker answers again."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest

from tests.conftest import create_some
from tests.documents import write
from tests.waiting import until
from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.reader import LogReader


@pytest.fixture
def stack(tmp_path, broker: None) -> Iterator[tuple[KafkaSettings, int]]:
    """Start a separate broker; also yields its process."""
    own = LocalStack(StackSettings(data_dir=tmp_path / "stack", heap_mb=256))
    try:
        status = own.up()
        assert status.nodes[0].pid is not None
        yield KafkaSettings(bootstrap=status.bootstrap, stall_timeout_s=8.0), status.nodes[0].pid
    finally:
        if (pid := own.status().nodes[0].pid) is not None:
            os.kill(pid, signal.SIGCONT)
        own.down()


def test_a_broker_that_is_stopped_is_named_and_nothing_is_lost_when_it_goes_on(stack, caplog):
    settings, broker = stack
    create_some(settings, [Topic.DOCUMENTS])
    write(settings, range(20))
    found: list[str] = []

    def read_until(condition) -> None:
        def read() -> bool:
            found.extend(located.record.document_id for located in reader.poll(0.1))
            return condition()

        until(read, lambda: caplog.text)

    caplog.set_level(logging.WARNING, logger="tidemill.schemas")
    with LogReader(settings, [Topic.DOCUMENTS], client_id="test-reader") as reader:
        read_until(lambda: len(found) == 20)
        os.kill(broker, signal.SIGSTOP)
        read_until(lambda: "the log does not answer" in caplog.text)
        assert "test-reader: no progress for" in caplog.text
        assert "tidemill.documents[0] at " in caplog.text
        os.kill(broker, signal.SIGCONT)
        read_until(lambda: "the log answers again" in caplog.text)
        write(settings, range(20, 30))
        read_until(lambda: len(found) == 30)
    assert sorted(found) == sorted(f"d{n}" for n in range(30))
