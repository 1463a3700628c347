"""The topic catalogue: the one place where topics are named and their key, value, partitions and retention declared.

Topics that must be joined partition by partition have the same count and the same partitioner (`co_partitioned`).
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

ERASABLE = {
    "cleanup.policy": "compact,delete",
    "message.timestamp.after.max.ms": "60000",
    "max.compaction.lag.ms": str(DAY_MS),
}
"""A record under a key of its own can be erased by a tombstone, and its bytes are gone a day later at the latest: by
default a broker leaves the newest segment of a quiet partition alone for a week. A clock that runs ahead is refused by
the broker, since event time would run ahead with it."""


class Topic(StrEnum):
    """Every topic of Tidemill, without its prefix."""

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
    """How one topic is keyed, typed, partitioned and kept."""

    topic: Topic
    key: str
    """The record field that is the key."""
    values: tuple[type, ...]
    partitions: int
    retention_ms: int
    keyed: bool = True
    """Its partition count may be overridden by `kafka.partitions`; single-partition topics are totally ordered."""
    config: Mapping[str, str] = field(default_factory=dict)
    dead_letters: bool = True

    def partition_count(self, kafka: KafkaSettings) -> int:
        """Partitions to create."""
        return kafka.partitions or self.partitions if self.keyed else self.partitions

    def topic_config(self) -> dict[str, str]:
        """Topic settings as Kafka takes them."""
        return {"cleanup.policy": "delete", "retention.ms": str(self.retention_ms), **self.config}


def _catalogue() -> dict[Topic, TopicSpec]:
    specs = (
        TopicSpec(Topic.DOCUMENTS, "document_id", (records.Document,), 4, 30 * DAY_MS),
        TopicSpec(Topic.TASKS, "task_id", (records.Task,), 8, 30 * DAY_MS),
        TopicSpec(Topic.ROLLOUTS, "group_id", (records.Rollout, records.Tick), 8, 30 * DAY_MS),
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
    return {spec.topic: spec for spec in specs}


CATALOGUE: Mapping[Topic, TopicSpec] = _catalogue()

_TOPICS = {topic.value: topic for topic in Topic}

DEAD_LETTER_SUFFIX = ".dlq"
DEAD_LETTER_RETENTION_MS = 90 * DAY_MS


@dataclass(frozen=True, slots=True)
class Names:
    """Full topic names under a prefix."""

    prefix: str

    def of(self, topic: Topic) -> str:
        """The full name of a topic."""
        return f"{self.prefix}{topic.value}"

    def dead_letter(self, topic: Topic) -> str:
        """The full name of a topic's dead-letter topic."""
        return f"{self.of(topic)}{DEAD_LETTER_SUFFIX}"

    def parse(self, full: str) -> Topic:
        """The topic of a full name; ValueError when it is none of this prefix's."""
        if not full.startswith(self.prefix):
            raise ValueError(f"topic {full!r} does not start with the prefix {self.prefix!r}")
        name = full[len(self.prefix) :]
        # Asked for every record that is read; the look-up of an enum costs ten times as much.
        return _TOPICS.get(name) or Topic(name)


def feedback_key(interaction_id: str, event_id: str) -> str:
    """Key of a feedback record: its own, so that one event can be erased. The partition is the interaction's."""
    return f"{interaction_id}/{event_id}"


def tick_key(partition: int) -> str:
    """Key of a tick in a compacted topic, which takes no record without a key; no identifier begins like it."""
    return f"\x00tick/{partition}"


def user_request_key(user_id: str, partition: int) -> str:
    """Key of the copy of a user's request in one partition of another topic."""
    return f"\x00user/{user_id}/{partition}"


def is_compacted(topic: Topic) -> bool:
    """Whether records of a topic may be gone from its middle, and none may be without a key."""
    return "compact" in CATALOGUE[topic].topic_config()["cleanup.policy"]


def co_partitioned(first: Topic, second: Topic, kafka: KafkaSettings) -> bool:
    """Whether equal keys of both topics lie in equal partitions."""
    return CATALOGUE[first].partition_count(kafka) == CATALOGUE[second].partition_count(kafka)
