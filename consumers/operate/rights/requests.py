"""A user's requests about their data: opting out of training and in again, and erasure, as `user.requests` holds them.

A request is written once into `user.requests`, then copied into every partition whose readers must know it. The
copies carry the request's own id and time, so that writing them again changes nothing: a command that was stopped
between the two starts again with the copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.schemas.catalogue import Topic, user_request_key
from tidemill.schemas.clock import now_us, to_ms
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import UserRequest, UserWish
from tidemill.schemas.stored_object import digest

LONGEST_NAME = 200


class BadUser(ValueError):
    """A user that no request can be about; the message says why."""


def checked_pseudonym(text: str) -> str:
    """A pseudonym as it was given. Raises BadUser for a text that names no user of the log."""
    if not text:
        raise BadUser("the user is empty: interactions that name no user belong to nobody and cannot be told apart")
    if len(text) > LONGEST_NAME or not text.isprintable():
        raise BadUser(f"a pseudonym has at most {LONGEST_NAME} printable characters, not {len(text)}")
    return text


def new_request(user_id: str, wish: UserWish, requested_by: str, at: int) -> UserRequest:
    """A request made now. Raises BadUser."""
    checked_pseudonym(user_id)
    if not 0 < len(requested_by.strip()) <= LONGEST_NAME:
        raise BadUser(f"who demands it has a name of 1 to {LONGEST_NAME} characters: give it with --by")
    name = digest(f"{user_id}\x00{wish.value}\x00{at}".encode())
    return UserRequest(request_id=name, user_id=user_id, wish=wish, requested_by=requested_by.strip(), at=at)


@dataclass(slots=True)
class UserRequests:
    """The demands of one user in the order of the log; a repeated record counts once."""

    user_id: str
    made: list[UserRequest] = field(default_factory=list)

    def observe(self, record: object) -> None:
        """Take a record in; other users' and other kinds are let pass."""
        if isinstance(record, UserRequest) and record.user_id == self.user_id and record not in self.made:
            self.made.append(record)

    @property
    def newest(self) -> UserRequest | None:
        """The demand that holds now."""
        return self.made[-1] if self.made else None

    def standing(self, wish: UserWish) -> UserRequest | None:
        """The newest demand, where it is this wish: to be carried on, not made again."""
        return self.newest if self.newest is not None and self.newest.wish is wish else None


CLIENT_ID = "tidemill-rights"
COPIED = (Topic.INTERACTIONS, Topic.OUTCOMES)


def requests_of(kafka: KafkaSettings, user_id: str) -> UserRequests:
    """The requests of a user so far."""
    requests = UserRequests(user_id)
    with LogReader(kafka, [Topic.USER_REQUESTS], client_id=CLIENT_ID) as reader:
        for located in reader.read_to_end():
            requests.observe(located.record)
    return requests


def record_request(producer: RecordProducer, request: UserRequest) -> None:
    """Write a demand that is made for the first time, and wait for the log. Raises DeliveryError."""
    producer.send_acked(Topic.USER_REQUESTS, [(request.user_id, request)])


def copy_request(producer: RecordProducer, request: UserRequest, partitions: Mapping[Topic, Sequence[int]]) -> int:
    """Write its copy into every partition, and wait for the log; the number of copies. Raises DeliveryError."""
    places = [(topic, partition) for topic in COPIED for partition in partitions[topic]]
    for topic, partition in places:
        key = user_request_key(request.user_id, partition)
        producer.send(topic, request, key=key, partition=partition, timestamp_ms=to_ms(request.at))
    producer.flush()
    return len(places)


@dataclass(frozen=True, slots=True)
class RecordedWish:
    """A demand and how many partitions have it."""

    request: UserRequest
    carried_on: bool
    """It holds since an earlier run; its copies were written again."""
    copies: int


def choose(
    kafka: KafkaSettings, user_id: str, wish: UserWish, requested_by: str, at: int | None = None
) -> RecordedWish:
    """Write a user's wish and its copies, unless it is their wish already. A user may choose before the first answer.

    Raises BadUser, LookupError for a topic that does not exist, DeliveryError.
    """
    new = new_request(user_id, wish, requested_by, now_us() if at is None else at)
    standing = requests_of(kafka, user_id).standing(wish)
    request = standing or new
    with LogReader(kafka, COPIED, start="end", client_id=CLIENT_ID) as reader:
        partitions = {topic: reader.partitions(topic) for topic in COPIED}
    with RecordProducer(kafka, CLIENT_ID) as producer:
        if standing is None:
            record_request(producer, request)
        return RecordedWish(request, standing is not None, copy_request(producer, request, partitions))
