"""The erased data of users, which the tables must not show: requests to erase, interactions, and letters about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from itertools import chain

from confluent_kafka import OFFSET_BEGINNING

from tidemill.consumers.sink.rows import DeadLetter, DeletedKey, Row
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import decoded
from tidemill.schemas.log.reader import LogReader, PartitionReader
from tidemill.schemas.log.watermarks import partitions_of
from tidemill.schemas.records import Feedback, Interaction, Outcome, UserRequest, UserWish

CLIENT_ID = "tidemill-sink-requests"
EVENT_TIMES: Mapping[type, str] = {Interaction: "served_at", Feedback: "observed_at", Outcome: "served_at"}
"""Record types that belong to a user, and the field with their event time."""


PRODUCT = (Topic.INTERACTIONS, Topic.OUTCOMES, Topic.FEEDBACK)
"""The topics whose keys begin with the id of an interaction."""


def interaction_of(key: bytes) -> bytes:
    """Return the id of the interaction that a record or a dead letter of the topics `PRODUCT` is about."""
    return key.split(b"/")[0]


class Erasures:
    """The newest ERASE of each user, and interactions that were erased."""

    def __init__(self) -> None:
        self.before: dict[str, int] = {}
        """Time of each user's newest ERASE, in microseconds."""
        self.interactions: set[bytes] = set()
        """Ids of erased interactions that are known, to leave out dead letters about them."""

    def observe(self, record: object) -> None:
        """Observe a request; other records are ignored. A repeated request changes nothing."""
        if isinstance(record, UserRequest) and record.wish is UserWish.ERASE:
            self.before[record.user_id] = max(record.at, self.before.get(record.user_id, record.at))

    def observe_rows(self, rows: Sequence[Row]) -> set[bytes]:
        """Observe the requests, interactions and tombstones among `rows`; return the ids of the erased interactions
        that were not known before."""
        for row in rows:
            self.observe(row.record)
        found = set[bytes]()
        for row in rows:
            record = row.record
            if isinstance(record, Interaction) and self.covers(record, row.timestamp_ms):
                found.add(record.interaction_id.encode())
            elif isinstance(record, DeletedKey) and record.topic is Topic.INTERACTIONS:
                found.add(row.key)
        # A dead letter without a key is about no interaction.
        found -= self.interactions | {b""}
        self.interactions |= found
        return found

    def covers(self, record: object, timestamp_ms: int) -> bool:
        """Whether a record belongs to an erased user and dates from before their request."""
        event_time = EVENT_TIMES.get(type(record))
        if event_time is None:
            return False
        before = self.before.get(record.user_id)  # type: ignore[attr-defined]  # the types of EVENT_TIMES have it
        return before is not None and min(getattr(record, event_time), 1000 * timestamp_ms) <= before

    def hides(self, row: Row) -> bool:
        """Whether a row must not be shown: data of an erased user, or a dead letter about an erased interaction."""
        if isinstance(row.record, DeadLetter):
            return interaction_of(row.key) in self.interactions
        return self.covers(row.record, row.timestamp_ms)


def known_erasures(kafka: KafkaSettings) -> Erasures:
    """Read every ERASE of the log before the first row is written, so that a rebuild does not show erased records."""
    erasures = Erasures()
    with LogReader(kafka, [Topic.USER_REQUESTS], client_id=CLIENT_ID) as reader:
        for located in reader.read_to_end():
            erasures.observe(located.record)
    return erasures


def erased_interactions(kafka: KafkaSettings, letters: Iterable[tuple[bytes, int]], erasures: Erasures) -> set[bytes]:
    """Return the ids of the erased interactions among those that dead letters are about.

    The broker removes an erased interaction, and later its tombstone. An interaction without both counts as erased if a
    user was erased after the record that became the letter was written.

    Args:
        letters: the key of each letter, and the time of its record in milliseconds.
        erasures: every erasure in the log.

    Raises like `LogReader.read_to_end`.
    """
    if not erasures.before:
        return set()
    times: dict[bytes, int] = {}
    for key, written_ms in letters:
        if name := interaction_of(key):
            times[name] = min(written_ms, times.get(name, written_ms))
    if not times:
        return set()
    last = max(erasures.before.values())
    erased = {name for name, written_ms in times.items() if written_ms * 1_000 <= last}
    codec, topic = Codec(kafka.registry_url), Names(kafka.topic_prefix).of(Topic.INTERACTIONS)
    with closing(PartitionReader(kafka, CLIENT_ID, may_have_holes={topic})) as log:
        log.assign({(topic, number): OFFSET_BEGINNING for number in partitions_of(log.client, topic)})
        for message in chain.from_iterable(log.read_until(log.ends())):
            name, value = message.key() or b"", message.value()
            # Few records are of these interactions, and decoding all would take long.
            if name in times:
                record, _ = decoded(codec, value)
                if value is None or erasures.covers(record, message.timestamp()[1]):
                    erased.add(name)
                else:
                    erased.discard(name)
    return erased
