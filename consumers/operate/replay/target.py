"""The topics that a replay writes: under its own prefix, with no consumer group and no other writer.

`check_prefix` is called before anything is read, `Target.check` before anything is written; both also in a dry run. The
headers of a copy name its replay and its original. The first copy also contains the `ReplayStart`: the end of each
source partition, and the selection. An interrupted replay can thus continue from its own topics alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs re-export nothing
    AdminClient,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from tidemill.consumers.operate.replay.records import RANK, READ_UNCOMMITTED, Header, Lane, LogSource, RawRecord
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.admin import REQUEST_TIMEOUT_S, admin_client, create_missing, wait_until_led
from tidemill.schemas.log.client_settings import MAX_RECORD_BYTES
from tidemill.schemas.log.consumed import HEADER_REPLAY_ID, HEADER_REPLAY_SOURCE, replay_headers, replay_id_of

DEFAULT_PREFIX = str(KafkaSettings.model_fields["topic_prefix"].default)
MARKS_BYTES = 65_536
"""Space for the headers that a copy has in addition to those of its original."""


HEADER_REPLAY_AT = "tidemill-replay-at"
"""When the replay began, microseconds since the Unix epoch."""
HEADER_REPLAY_BEGAN = "tidemill-replay-began"
"""On the first copy of a replay: its `ReplayStart`, as JSON."""
OWN = (HEADER_REPLAY_ID, HEADER_REPLAY_SOURCE, HEADER_REPLAY_AT, HEADER_REPLAY_BEGAN)


def check_prefix(source: str, into: str) -> None:
    """Raise ValueError if a replay of the topics under `source` must not write under `into`; empty is refused."""
    if not into:
        raise ValueError("--into is empty: give a prefix of the replay's own, for instance replay-1.")
    for live in (source, DEFAULT_PREFIX):
        hit = {into + name for name in RANK} & {live + name for name in RANK}
        if hit:
            raise ValueError(
                f"--into {into!r} would write into the live topic {min(hit)}: give a prefix of the replay's own, for "
                "instance replay-1."
            )
    KafkaSettings(topic_prefix=into)  # raises ValidationError


@dataclass(slots=True)
class TargetState:
    begun: ReplayStart | None = None
    """None if it has no record there."""
    copied: dict[Lane, list[int]] = field(default_factory=dict)
    """Offsets of the originals that were copied, by partition, in order."""
    first: dict[Lane, int] = field(default_factory=dict)
    """Offset of the first copy in each partition that has one."""

    @property
    def records(self) -> int:
        return sum(len(offsets) for offsets in self.copied.values())


class Target:
    """The topics under a replay's own prefix."""

    def __init__(self, kafka: KafkaSettings, into: str) -> None:
        check_prefix(kafka.topic_prefix, into)
        self._kafka = kafka.model_copy(update={"topic_prefix": into})
        self._source_prefix = kafka.topic_prefix
        self.prefix = into
        self._admin: AdminClient = admin_client(kafka)

    def check(self, replay_id: str | None) -> TargetState:
        """Check that the topics under the prefix hold no other records, and return their state.

        Args:
            replay_id: the replay that may have written there; None for a new one.

        Raises:
            ValueError: a consumer group reads there, or there are records that this replay did not write.
            TimeoutError: the broker stops responding.
        """
        existing = self._admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics
        topics = [name for name in RANK if self.prefix + name in existing]
        listed = self._admin.list_consumer_groups(request_timeout=REQUEST_TIMEOUT_S).result()
        active = [group.group_id for group in listed.valid if group.state is not ConsumerGroupState.EMPTY]
        for group_id, future in (self._admin.describe_consumer_groups(active) if active else {}).items():
            for member in future.result().members:
                read = {place.topic for place in member.assignment.topic_partitions} & {self.prefix + n for n in RANK}
                if read:
                    raise ValueError(
                        f"consumer group {group_id} reads {min(read)}: a replay would feed it. Stop it, or give "
                        "another prefix"
                    )
        standing = TargetState()
        with closing(LogSource(self._kafka, READ_UNCOMMITTED)) as reader:
            for record in reader.scan(reader.whole(topics)):
                of = replay_id_of(record.headers)
                if not of:
                    raise ValueError(
                        f"{self.prefix}{record} was not written by a replay: give another prefix than --into "
                        f"{self.prefix!r}"
                    )
                if replay_id is None or of != replay_id:
                    raise ValueError(
                        f"{self.prefix}{record} was written by replay {of}: give another prefix, or, if that was a "
                        f"copy or an import that was interrupted, continue it with --resume {of}"
                    )
                standing.copied.setdefault(record.lane, []).append(copied_offset(record))
                standing.first.setdefault(record.lane, record.offset)
                began = header(record, HEADER_REPLAY_BEGAN)
                if began is not None:
                    standing.begun = beginning(began)
        return standing

    def prepare(self, partitions: Mapping[str, int]) -> None:
        """Create the topics that do not exist, each with its number of partitions.

        They have unlimited retention, since the replayed records may be older than the live topics' retention. Raises
        ValueError if one exists with another number of partitions.
        """
        existing = self.check_partitions(partitions)
        missing = [topic for topic in partitions if self.prefix + topic not in existing]
        sources = [self._source_prefix + topic for topic in missing if self._source_prefix + topic in existing]
        asked = [ConfigResource(ResourceType.TOPIC, full) for full in sources]
        described = self._admin.describe_configs(asked) if asked else {}
        limits = {of.name: int(future.result()["max.message.bytes"].value) for of, future in described.items()}
        new = [
            NewTopic(
                self.prefix + topic,
                partitions[topic],
                replication_factor=self._kafka.replication_factor,
                config={
                    "cleanup.policy": "delete",
                    "retention.ms": "-1",
                    "max.message.bytes": str(limits.get(self._source_prefix + topic, MAX_RECORD_BYTES) + MARKS_BYTES),
                },
            )
            for topic in missing
        ]
        if new:
            create_missing(self._admin, new)
        wait_until_led(self._admin, {self.prefix + topic for topic in partitions})

    def check_partitions(self, partitions: Mapping[str, int]) -> set[str]:
        """Return the topics that exist. Raises ValueError if one has another number of partitions than its original."""
        found = self._admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics
        for topic, wanted in partitions.items():
            full = self.prefix + topic
            if full in found and len(found[full].partitions) != wanted:
                raise ValueError(
                    f"{full} exists with {len(found[full].partitions)} partitions, and its original has {wanted}: give "
                    "another prefix"
                )
        return set(found)

    def ends(self, lanes: Iterable[Lane]) -> dict[Lane, int]:
        """Return the offset that the next record will have in each partition."""
        with closing(LogSource(self._kafka)) as reader:
            return {lane: reader.bounds(lane).end for lane in lanes}


@dataclass(frozen=True, slots=True)
class ReplayStart:
    """The settings of a replay at its start; a continuation uses the same ones."""

    replay_id: str
    began_at: int
    """Microseconds since the Unix epoch."""
    selected: str
    """Digest of the selection."""
    ends: dict[Lane, int]
    """The end of each source partition."""

    def to_json(self) -> str:
        ends = {f"{topic}/{partition}": end for (topic, partition), end in sorted(self.ends.items())}
        return json.dumps(
            {"replay_id": self.replay_id, "began_at": self.began_at, "selected": self.selected, "ends": ends}
        )


def beginning(text: bytes) -> ReplayStart:
    """Parse a `ReplayStart` from its JSON. Raises ValueError."""
    try:
        tree = json.loads(text)
        ends = {(place.rsplit("/", 1)[0], int(place.rsplit("/", 1)[1])): end for place, end in tree["ends"].items()}
        return ReplayStart(tree["replay_id"], tree["began_at"], tree["selected"], ends)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"header {HEADER_REPLAY_BEGAN} cannot be read: {error}") from error


def copy_headers(record: RawRecord, source_prefix: str, begun: ReplayStart, first: bool) -> list[Header]:
    """Return the headers of a copy: the original's, its replay and its source. A copied copy names the last replay."""
    kept = [(name, value) for name, value in record.headers if name not in OWN]
    marks: dict[str, bytes] = {
        **replay_headers(begun.replay_id, source_prefix + record.topic, record.partition, record.offset),
        HEADER_REPLAY_AT: str(begun.began_at).encode(),
    }
    if first:
        marks[HEADER_REPLAY_BEGAN] = begun.to_json().encode()
    return [*kept, *marks.items()]


def copied_offset(record: RawRecord) -> int:
    """Return the offset of a copy's original. Raises ValueError."""
    source = header(record, HEADER_REPLAY_SOURCE) or b""
    try:
        return int(source.rsplit(b"/", 1)[1])
    except (IndexError, ValueError) as error:
        raise ValueError(f"{record}: header {HEADER_REPLAY_SOURCE} is {source!r}") from error


def header(record: RawRecord, name: str) -> bytes | None:
    return next((value for found, value in record.headers if found == name), None)
