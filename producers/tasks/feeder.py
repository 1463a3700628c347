"""The task feeder: issues evaluation and training tasks, and exits when the run's last evaluation has closed.

It holds no state that the log does not: it reads the topics to their end, and then follows them. The decisions are
`feeder_state`'s; this module does the talking.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Set
from contextlib import closing
from types import MappingProxyType

from tidemill.producers.config import FeedSettings
from tidemill.producers.environments.open import open_environment
from tidemill.producers.environments.process import HostLimits
from tidemill.producers.tasks.feeder_state import FeederState
from tidemill.producers.tasks.source import TaskEnvironment, TaskSource
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us, to_us
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.client_settings import LOG_WAIT_S
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.guard import Stillness
from tidemill.schemas.log.liveness import Liveness
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Group, Task
from tidemill.schemas.shutdown import stop_on_signals

LOG = logging.getLogger(__name__)
TOPICS = (Topic.TASKS, Topic.GROUPS, Topic.STEPS, Topic.MANIFESTS, Topic.ACKS)
CLIENT_ID = "tidemill-feeder"
POLL_S = 0.05


WRITERS = MappingProxyType(
    {
        Topic.GROUPS: "rollout workers (`tidemill rollout`) and group assembly (`tidemill stream`)",
        Topic.STEPS: "the trainer (`tidemill train`)",
        Topic.MANIFESTS: "the trainer (`tidemill train`)",
        Topic.ACKS: "the replicas (`tidemill serve`)",
    }
)


class SilentTopics:
    """How long each topic that is waited for has been silent, so that a dead producer is not waited for in silence."""

    def __init__(self, timeout_us: int) -> None:
        self._still: Stillness[Topic] = Stillness(timeout_us)
        self._read: Counter[Topic] = Counter()

    def observe(self, topic: Topic, now_us: int) -> None:
        """A record of `topic` arrived."""
        self._read[topic] += 1
        self._look(topic, True, now_us)

    def silent(self, waiting_for: Set[Topic], now_us: int) -> list[Topic]:
        """The topics that were waited for without a record for the timeout; each is named once per timeout."""
        return [topic for topic in WRITERS if self._look(topic, topic in waiting_for, now_us)]

    def _look(self, topic: Topic, waiting: bool, now_us: int) -> bool:
        return self._still.observe(topic, self._read[topic], waiting, now_us) is not None


class Feeder:
    """One run's feeder: records in, tasks out."""

    def __init__(self, run: RunSettings, feed: FeedSettings, source: TaskSource, producer: RecordProducer) -> None:
        self._state = FeederState(run, feed)
        self._source = source
        self._silence = SilentTopics(to_us(feed.stall_timeout_s))
        self._producer = producer

    def observe(self, located: ConsumedRecord) -> None:
        """Take one record of the log. One that cannot be read is its writer's or its group reader's to answer for."""
        if located.record is None:
            LOG.warning("skipped an unreadable record at %s: %s", located.position, located.error)
            return
        self._state.observe(located.record)
        self._silence.observe(located.topic, now_us())
        if isinstance(located.record, Task | Group):
            self._source.observe(located.record)

    def advance(self) -> bool:
        """Issue what may be issued now; true when the run is over. Raises DeliveryError, TaskError."""
        decision = self._state.decide(now_us())
        for group in decision.expired.groups:
            LOG.warning("group %s never closed; it no longer counts as unfinished", group)
        for replica in decision.expired.replicas:
            LOG.warning("replica %s fell behind and is silent; not waiting for it", replica)
        for topic in self._silence.silent(self._state.waiting_for(), now_us()):
            LOG.warning("no progress: nothing on topic %s. Look at %s", topic, WRITERS[topic])
        if decision.names:
            issued_at, version = now_us(), self._state.admission.newest_version
            tasks = [self._source.task(name, issued_at, version) for name in decision.names]
            self._producer.send_acked(Topic.TASKS, [(task.task_id, task) for task in tasks])
            for task in tasks:
                self._state.observe(task)
            LOG.info(
                "issued %d tasks, %s to %s, at version %d", len(tasks), tasks[0].task_id, tasks[-1].task_id, version
            )
        return decision.done


async def opened(run: RunSettings, limits: HostLimits) -> list[TaskEnvironment]:
    """The environments of a run, to draw tasks from. Raises UnknownEnvironment, TaskError, EnvironmentFailed."""
    found = []
    for entry in run.environments:
        environment = await open_environment(entry, entry.options, limits)
        await environment.close()  # it is not played here, and draws tasks all the same
        found.append(TaskEnvironment(entry, environment))
    return found


def run(
    kafka: KafkaSettings,
    run: RunSettings,
    feed: FeedSettings,
    limits: HostLimits,
    stop: threading.Event | None = None,
) -> bool:
    """Feed a run until it is over or `stop` is set (without one: SIGINT or SIGTERM comes); whether it is over.

    Raises UnknownEnvironment, EnvironmentFailed or TaskError when an environment cannot be opened or has no such tasks,
    DeliveryError when the log refuses them.
    """
    stop = stop or stop_on_signals()
    source = TaskSource(asyncio.run(opened(run, limits)), run, feed)
    with (
        closing(source),
        RecordProducer(kafka, CLIENT_ID) as producer,
        LogReader(kafka, TOPICS, client_id=CLIENT_ID) as reader,
        Liveness("the feeder", kafka.stall_timeout_s) as liveness,
    ):
        feeder = Feeder(run, feed, source, producer)
        for located in reader.read_to_end():
            liveness.beat("reading the log to its end")
            feeder.observe(located)
        while not stop.is_set():
            liveness.beat("following the log", LOG_WAIT_S)
            if feeder.advance():
                return True
            for located in reader.poll(POLL_S):
                feeder.observe(located)
    return False
