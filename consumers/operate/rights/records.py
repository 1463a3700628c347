"""A user's data in the log: their requests about it, and their records.

User requests (opt-out, opt-in, erasure) are written once to `user.requests`, then copied into every partition whose
readers must know them. The copies have the request's own id and time, so that writing them again changes nothing: a
command that was stopped between the two steps continues with the copies.

A record belongs to a user if it is an interaction that was served to them, its outcome, feedback that they gave, or
feedback that any user gave on their interactions. A record whose key has a tombstone counts as deleted, although its
bytes remain until the broker compacts. Interactions are observed before feedback, since they determine which feedback
of other users belongs to the user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from tidemill.consumers.operate import Progress, no_progress
from tidemill.schemas.catalogue import Topic, user_request_key
from tidemill.schemas.clock import now_us, to_ms
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Claim, Feedback, Interaction, Outcome, UserRequest, UserWish
from tidemill.schemas.stored_object import digest

LONGEST_NAME = 200


def checked_pseudonym(text: str) -> str:
    """Return a pseudonym unchanged. Raises ValueError for a text that cannot be a user id of the log."""
    if not text:
        raise ValueError("the user id is empty: interactions without a user id cannot be assigned to a user")
    if len(text) > LONGEST_NAME or not text.isprintable():
        raise ValueError(
            f"a pseudonym has at most {LONGEST_NAME} characters, all printable; this one is {text[:LONGEST_NAME]!r}"
        )
    return text


def new_request(user_id: str, wish: UserWish, requested_by: str, at: int) -> UserRequest:
    """Return a new request made at the time `at`. Raises ValueError."""
    checked_pseudonym(user_id)
    if not 0 < len(requested_by.strip()) <= LONGEST_NAME:
        raise ValueError(
            f"the person who requests it needs a name of 1 to {LONGEST_NAME} characters: give it with --by"
        )
    name = digest(f"{user_id}\x00{wish.value}\x00{at}".encode())
    return UserRequest(request_id=name, user_id=user_id, wish=wish, requested_by=requested_by.strip(), at=at)


def requests_among(records: Iterable[object], user_id: str) -> list[UserRequest]:
    """Return the requests of one user in the order of the log; a repeated record counts once."""
    return list(dict.fromkeys(one for one in records if isinstance(one, UserRequest) and one.user_id == user_id))


def standing(requests: Sequence[UserRequest], wish: UserWish) -> UserRequest | None:
    """Return the newest request if it has this wish: it is continued, not made again."""
    return requests[-1] if requests and requests[-1].wish is wish else None


CLIENT_ID = "tidemill-rights"
COPIED = (Topic.INTERACTIONS, Topic.OUTCOMES)


def requests_of(kafka: KafkaSettings, user_id: str) -> list[UserRequest]:
    with LogReader(kafka, [Topic.USER_REQUESTS], client_id=CLIENT_ID) as reader:
        return requests_among((located.record for located in reader.read_to_end()), user_id)


def copy_request(producer: RecordProducer, request: UserRequest, partitions: Mapping[Topic, Sequence[int]]) -> int:
    """Write a copy to every partition, wait for the log, and return the number of copies. Raises DeliveryError."""
    places = [(topic, partition) for topic in COPIED for partition in partitions[topic]]
    for topic, partition in places:
        key = user_request_key(request.user_id, partition)
        producer.send(topic, request, key=key, partition=partition, timestamp_ms=to_ms(request.at))
    producer.flush()
    return len(places)


def choose(
    kafka: KafkaSettings, user_id: str, wish: UserWish, requested_by: str, at: int | None = None
) -> dict[str, Any]:
    """Write a user's request and its copies, unless it is in effect already. A user may choose before the first answer.

    Returns:
        the `request`; `carried_on`: it is in effect since an earlier run, and only its copies were written again; and
        the number of `copies`.

    Raises ValueError, LookupError if a topic does not exist, DeliveryError.
    """
    new = new_request(user_id, wish, requested_by, now_us() if at is None else at)
    old = standing(requests_of(kafka, user_id), wish)
    request = old or new
    with LogReader(kafka, COPIED, start="end", client_id=CLIENT_ID) as reader:
        partitions = {topic: reader.partitions(topic) for topic in COPIED}
    with RecordProducer(kafka, CLIENT_ID) as producer:
        if old is None:
            producer.send_acked(Topic.USER_REQUESTS, [(request.user_id, request)])
        copies = copy_request(producer, request, partitions)
    return {"request": request, "carried_on": old is not None, "copies": copies}


SWEPT = (Topic.INTERACTIONS, Topic.OUTCOMES, Topic.FEEDBACK)
"""The topics that hold users' data, in the order of reading."""


Slot = tuple[Topic, int, bytes]
"""Topic, partition and key: the scope of one tombstone."""


class UserRecords:
    def __init__(self, user_id: str) -> None:
        self._user_id = user_id
        self.held: dict[Slot, tuple[int, tuple[Claim, ...]]] = {}
        """The user's records that readers of the log still receive: the event time of each, in microseconds, and its
        payloads in the object store, those of this value and of the values that it replaced."""
        self._interactions: set[str] = set()
        self.slots: set[Slot] = set()
        """Every slot that ever held a record of the user, including those with a tombstone."""
        self._unreadable: set[Position] = set()

    @property
    def counts(self) -> dict[str, int]:
        """Number of records by topic; topics without records are omitted."""
        return dict(Counter(topic.value for topic, _, _ in self.held))

    @property
    def interactions(self) -> int:
        """Number of the user's interactions that were observed, including those with a tombstone."""
        return len(self._interactions)

    @property
    def unreadable(self) -> dict[str, int]:
        """Records by topic that cannot be decoded: it is unknown whether they belong to the user. Their readers wrote
        them as dead letters."""
        return dict(Counter(place.topic for place in self._unreadable))

    @property
    def newest_at(self) -> int:
        """Event time of the newest record; -1 if there is none."""
        return max((dated_at for dated_at, _ in self.held.values()), default=-1)

    def observe(self, located: ConsumedRecord) -> None:
        slot = (located.topic, located.partition, located.key or b"")
        if located.value is None:
            self.held.pop(slot, None)
            return
        if located.record is None:
            self._unreadable.add(located.position)
            return
        record = located.record
        if not isinstance(record, Interaction | Outcome | Feedback):
            return
        if isinstance(record, Interaction):
            if record.user_id != self._user_id:
                return
            self._interactions.add(record.interaction_id)
        elif record.user_id != self._user_id and record.interaction_id not in self._interactions:
            return
        _, claims = self.held.get(slot, (0, ()))
        if isinstance(record, Interaction) and record.claim is not None:
            claims = tuple(dict.fromkeys([*claims, record.claim]))
        self.held[slot] = record.observed_at if isinstance(record, Feedback) else record.served_at, claims
        self.slots.add(slot)

    def owns_key(self, key: bytes, user_id: str | None) -> bool:
        """Whether a dead letter with this key, or with a value of this user, is about them."""
        interaction = key.split(b"/")[0].decode("utf-8", "replace")
        return user_id == self._user_id or interaction in self._interactions


def user_of(record: object) -> str | None:
    return record.user_id if isinstance(record, Interaction | Outcome | Feedback | UserRequest) else None


TELL_EVERY = 500
"""Number of records between two progress reports."""


class UserRecordReader:
    """Reads the topics of users' data; each call continues after the last record read.

    A record about an interaction may be read before the interaction, if both are written during the reading. So if a
    call finds further interactions of the user, it reads the topics of such records again from their beginnings.
    """

    def __init__(self, kafka: KafkaSettings, progress: Progress = no_progress) -> None:
        self._progress = progress
        with ExitStack() as opening:
            self._readers = [opening.enter_context(LogReader(kafka, [t], client_id=CLIENT_ID)) for t in SWEPT]
            self._open = opening.pop_all()
        self._firsts = [dict(reader.next_offsets()) for reader in self._readers]
        self._from = sum(sum(firsts.values()) for firsts in self._firsts)

    def read_on(self, holdings: UserRecords) -> None:
        """Observe all records up to the current ends. Raises TimeoutError if the broker stops responding."""
        total = sum(sum(reader.end_offsets().values()) for reader in self._readers) - self._from
        known = holdings.interactions
        for reader, firsts in zip(self._readers, self._firsts, strict=True):
            if holdings.interactions > known:
                for place, offset in reader.next_offsets().items():
                    if offset > firsts[place]:
                        reader.seek(*place, firsts[place])
            for n, located in enumerate(reader.read_to_end()):
                holdings.observe(located)
                if n % TELL_EVERY == 0:
                    self._progress(sum(sum(each.next_offsets().values()) for each in self._readers) - self._from, total)
        self._progress(total, total)

    def partitions(self, topic: Topic) -> list[int]:
        """Return the partition numbers of a topic. Raises LookupError if it does not exist."""
        return self._readers[0].partitions(topic)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._open.close()
