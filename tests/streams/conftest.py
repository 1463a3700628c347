"""The helpers of the stream tests are modules in this folder; tests of workers run with each runner."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Kafka
from tidemill.schemas.config import KafkaSettings
from tidemill.streams.config import RunnerName

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def settings(kafka: Kafka, topic_prefix: str) -> KafkaSettings:
    """Topics of group assembly that only this test uses."""
    import stream_support

    return stream_support.fresh_topics(kafka.bootstrap, topic_prefix, topics=stream_support.ASSEMBLY)


@pytest.fixture(scope="module", params=list(RunnerName))
def runner(request: pytest.FixtureRequest) -> Iterator[RunnerName]:
    """The runner of the workers that `stream_process` starts during the test."""
    import stream_support

    before, stream_support.runner = stream_support.runner, request.param
    yield request.param
    stream_support.runner = before
