"""A stream worker with input that was deleted before it was read: it exits and names the gap, or may continue."""

from __future__ import annotations

import pytest
from stream_support import fresh_topics, group_of, read_records, rollout, stream_process

from tests.documents import delete
from tests.waiting import until
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader

pytestmark = pytest.mark.usefixtures("runner")


@pytest.fixture
def settings(kafka, topic_prefix: str) -> KafkaSettings:
    return fresh_topics(kafka.bootstrap, topic_prefix, partitions=1)


def send(settings: KafkaSettings, *names: str) -> None:
    with RecordProducer(settings, "test") as producer:
        for name in names:
            producer.send(Topic.ROLLOUTS, rollout(name, 0, group_size=1), key=name)


def test_a_retention_gap_ends_the_worker_unless_the_settings_allow_it(settings, tmp_path):
    send(settings, "a", "b", "c", "d")
    delete(settings, 2, topic=Topic.ROLLOUTS)
    with LogReader(settings, [Topic.GROUPS]) as groups:
        with stream_process(settings, tmp_path) as worker:
            found = read_records(groups, lambda read: len(read) >= 2, 240, worker)
            assert [group_of(f).group_id for f in found] == ["c", "d"], "a fresh worker begins with what there is"
            assert worker.stop() == 0
            assert "is read from its beginning, which is now offset 2" in worker.log.read_text()
            send(settings, "e", "f", "g")
            delete(settings, 6, topic=Topic.ROLLOUTS)
            worker.start()
            until(lambda: not worker.running(), "the worker's end", 240)
            assert worker.stop() == 1
            said = worker.log.read_text()
            assert "rollouts[0]: the log no longer keeps offset 4, the log begins at 6" in said
            assert "stream.accept_gaps" in said
        with stream_process(settings, tmp_path / "accepting", accept_gaps=True) as worker:
            (found,) = read_records(groups, lambda read: len(read) >= 1, 240, worker)
            assert group_of(found).group_id == "g"
            assert worker.stop() == 0
            assert "2 offsets skipped so far" in worker.log.read_text()
