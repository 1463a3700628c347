"""The topic catalogue: the only declaration of all topics, with their key, value types, partitions and retention.

Topics that must be joined partition by partition have equal partition counts and partitioners (`co_partitioned`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tidemill.schemas import records
from tidemill.schemas.config import KafkaSettings

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
FOREVER_MS = -1

TIMED = {"message.timestamp.type": "CreateTime", "message.timestamp.after.max.ms": "60000"}
"""Deadlines follow the timestamps that the writers of the topic set, also where the brokers' default is the time of
appending: a replay and a redriven dead letter keep the original times. The broker refuses timestamps from a clock that
is ahead, because they would advance event time too far."""

ERASABLE = {"cleanup.policy": "compact,delete", "max.compaction.lag.ms": str(DAY_MS), **TIMED}
"""A tombstone can erase a record with a unique key. The bytes are deleted within a day: by default a broker does not
compact the newest segment of an idle partition for a week."""


class Topic(StrEnum):
    """All topics of Tidemill, without the prefix."""

    DOCUMENTS = "documents"
    TASKS = "tasks"
    ROLLOUTS = "rollouts"
    PROGRESS = "rollouts.progress"
    GROUPS = "groups"
    DELTAS = "weights.deltas"
    MANIFESTS = "weights.manifests"
    ACKS = "weights.acks"
    STEPS = "train.steps"
    MISMATCH = "train.mismatch"
    STALENESS = "staleness"
    GATE = "gate.decisions"
    INTERACTIONS = "interactions"
    FEEDBACK = "feedback"
    OUTCOMES = "outcomes"
    ONLINE_BATCHES = "online-batches"
    USER_REQUESTS = "user.requests"


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """Key, value types, partitions and retention of one topic."""

    topic: Topic
    key: str
    """Record field that is the key."""
    values: tuple[type, ...]
    partitions: int
    retention_ms: int
    keyed: bool = True
    """Whether `kafka.partitions` overrides its partition count; topics with a single partition are totally ordered."""
    config: Mapping[str, str] = field(default_factory=dict)

    def partition_count(self, kafka: KafkaSettings) -> int:
        """Return the number of partitions to create."""
        return kafka.partitions or self.partitions if self.keyed else self.partitions

    def topic_config(self) -> dict[str, str]:
        """Return the topic's configuration for Kafka."""
        return {"cleanup.policy": "delete", "retention.ms": str(self.retention_ms), **self.config}


CATALOGUE: Mapping[Topic, TopicSpec] = {
    spec.topic: spec
    for spec in (
        TopicSpec(Topic.DOCUMENTS, "document_id", (records.Document,), 4, 30 * DAY_MS),
        TopicSpec(Topic.TASKS, "task_id", (records.Task,), 8, 30 * DAY_MS),
        TopicSpec(Topic.ROLLOUTS, "group_id", (records.Rollout, records.Tick), 8, 30 * DAY_MS, config=TIMED),
        TopicSpec(Topic.PROGRESS, "task_id", (records.Dispatch, records.Turn), 8, 7 * DAY_MS),
        TopicSpec(Topic.GROUPS, "group_id", (records.Group,), 8, 30 * DAY_MS),
        TopicSpec(Topic.DELTAS, "shard", (records.DeltaChunk,), 8, 7 * DAY_MS),
        TopicSpec(Topic.MANIFESTS, "branch", (records.Manifest, records.SkipDelta), 1, FOREVER_MS, keyed=False),
        TopicSpec(Topic.ACKS, "replica_id", (records.WeightAck,), 1, 30 * DAY_MS, keyed=False),
        TopicSpec(Topic.STEPS, "run_id", (records.TrainStep, records.StepPlan), 1, FOREVER_MS, keyed=False),
        TopicSpec(Topic.MISMATCH, "run_id", (records.Mismatch,), 1, 30 * DAY_MS, keyed=False),
        TopicSpec(Topic.STALENESS, "replica_id", (records.Staleness,), 1, 7 * DAY_MS, keyed=False),
        TopicSpec(Topic.GATE, "branch", (records.GateDecision,), 1, FOREVER_MS, keyed=False),
        TopicSpec(
            Topic.INTERACTIONS,
            "interaction_id",
            (records.Interaction, records.UserRequest, records.Tick),
            8,
            90 * DAY_MS,
            config=ERASABLE,
        ),
        TopicSpec(Topic.FEEDBACK, "interaction_id", (records.Feedback, records.Tick), 8, 90 * DAY_MS, config=ERASABLE),
        TopicSpec(
            Topic.OUTCOMES,
            "interaction_id",
            (records.Outcome, records.UserRequest, records.Tick),
            1,
            90 * DAY_MS,
            keyed=False,
            config=ERASABLE,
        ),
        TopicSpec(Topic.ONLINE_BATCHES, "batch_id", (records.OnlineBatch,), 1, FOREVER_MS, keyed=False),
        TopicSpec(Topic.USER_REQUESTS, "user_id", (records.UserRequest,), 1, FOREVER_MS, keyed=False),
    )
}

_TOPICS = {topic.value: topic for topic in Topic}

DEAD_LETTER_SUFFIX = ".dlq"
DEAD_LETTER_RETENTION_MS = 90 * DAY_MS


@dataclass(frozen=True, slots=True)
class Names:
    """Full topic names under a prefix."""

    prefix: str

    def of(self, topic: Topic) -> str:
        """Return the full name of a topic."""
        return f"{self.prefix}{topic.value}"

    def dead_letter(self, topic: Topic) -> str:
        """Return the full name of a topic's dead-letter topic."""
        return f"{self.of(topic)}{DEAD_LETTER_SUFFIX}"

    def parse(self, full: str) -> Topic:
        """Return the topic with a full name. Raises ValueError if there is none with this prefix."""
        if not full.startswith(self.prefix):
            raise ValueError(f"topic {full!r} does not start with the prefix {self.prefix!r}")
        name = full[len(self.prefix) :]
        # Called for every record that is read; looking up the enum takes ten times as long.
        return _TOPICS.get(name) or Topic(name)


def feedback_key(interaction_id: str, event_id: str) -> str:
    """Return a feedback record's key, unique so that one event can be erased. The partition is the interaction's."""
    return f"{interaction_id}/{event_id}"


def tick_key(partition: int) -> str:
    """Return the key of a tick in a compacted topic, where each record needs a key. No identifier has this prefix."""
    return f"\x00tick/{partition}"


def user_request_key(user_id: str, partition: int) -> str:
    """Return the key of the copy of a user's request in one partition of another topic."""
    return f"\x00user/{user_id}/{partition}"


def is_compacted(topic: Topic) -> bool:
    """Return whether a topic is compacted: records between others may be missing, and each record needs a key."""
    return "compact" in CATALOGUE[topic].topic_config()["cleanup.policy"]


def co_partitioned(first: Topic, second: Topic, kafka: KafkaSettings) -> bool:
    """Return whether equal keys of both topics are in partitions with the same number."""
    return CATALOGUE[first].partition_count(kafka) == CATALOGUE[second].partition_count(kafka)
