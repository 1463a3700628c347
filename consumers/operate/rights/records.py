"""The records of one user in the log: a pure fold over `interactions`, `outcomes` and `feedback`, and its reader.

A record belongs to a user when it is an interaction that was served to them, its outcome, feedback that they gave, or
feedback that anyone gave on their interactions. A record under a key that has a tombstone is gone, though its bytes
stay until the broker compacts. Interactions are observed before feedback, since they say which feedback of other users
belongs to the user.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tidemill.consumers.operate import Progress, no_progress
from tidemill.consumers.operate.rights.requests import CLIENT_ID
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Claim, Feedback, Interaction, Outcome, UserRequest

SWEPT = (Topic.INTERACTIONS, Topic.OUTCOMES, Topic.FEEDBACK)
"""The topics that hold users' data, in the order of reading."""


@dataclass(frozen=True, slots=True)
class UserRecord:
    """One record of the user that a reader of the log still gets."""

    topic: Topic
    partition: int
    key: bytes
    dated_at: int
    """Event time, in microseconds."""
    claims: tuple[Claim, ...]
    """Where its bytes lie beside the log: of this value and of the ones that it replaced."""


Slot = tuple[Topic, int, bytes]
"""Topic, partition and key: what one tombstone erases."""


class UserRecords:
    """The records of one user, by slot."""

    def __init__(self, user_id: str) -> None:
        self._user_id = user_id
        self._held: dict[Slot, UserRecord] = {}
        self._interactions: set[str] = set()
        self.slots: set[Slot] = set()
        """Every slot that ever held a record of the user, those with a tombstone as well."""
        self.unreadable: Counter[Topic] = Counter()
        """Records that cannot be decoded: whether they belong to the user is not known. Their readers sent them to dead
        letters."""

    @property
    def held(self) -> list[UserRecord]:
        """What is there now, in the order in which it was read."""
        return list(self._held.values())

    @property
    def counts(self) -> dict[str, int]:
        """Number of records by topic; topics without one are left out."""
        return dict(Counter(held.topic.value for held in self._held.values()))

    @property
    def newest_at(self) -> int:
        """Event time of the newest record; -1 without one."""
        return max((held.dated_at for held in self._held.values()), default=-1)

    def observe(self, located: ConsumedRecord) -> None:
        """Take a record in, in the order of its partition."""
        slot = (located.topic, located.partition, located.key or b"")
        if located.value is None:
            self._held.pop(slot, None)
            return
        if located.record is None:
            self.unreadable[located.topic] += 1
            return
        dated_at = self._dated(located.record)
        if dated_at is None:
            return
        claims = self._held[slot].claims if slot in self._held else ()
        if isinstance(located.record, Interaction) and located.record.claim is not None:
            claims = tuple(dict.fromkeys([*claims, located.record.claim]))
        self._held[slot] = UserRecord(*slot, dated_at, claims)
        self.slots.add(slot)

    def _dated(self, record: object) -> int | None:
        """Event time of a record of the user; None for any other."""
        match record:
            case Interaction() if record.user_id == self._user_id:
                self._interactions.add(record.interaction_id)
                return record.served_at
            case Outcome() if self._is_of_user(record):
                return record.served_at
            case Feedback() if self._is_of_user(record):
                return record.observed_at
        return None

    def _is_of_user(self, record: Outcome | Feedback) -> bool:
        return record.user_id == self._user_id or record.interaction_id in self._interactions

    def owns_key(self, key: bytes, user_id: str | None) -> bool:
        """Whether a dead letter with this key, or with a value of this user, is about them."""
        interaction = key.split(b"/")[0].decode("utf-8", "replace")
        return user_id == self._user_id or interaction in self._interactions


def user_of(record: object) -> str | None:
    """The user that a record names."""
    return record.user_id if isinstance(record, Interaction | Outcome | Feedback | UserRequest) else None


TELL_EVERY = 500
"""Records between two words about progress."""


class Survey:
    """The topics of users' data, each read forward once however often it is asked for more."""

    def __init__(self, kafka: KafkaSettings, progress: Progress = no_progress) -> None:
        self._progress = progress
        with ExitStack() as opening:
            self._readers = [opening.enter_context(LogReader(kafka, [t], client_id=CLIENT_ID)) for t in SWEPT]
            self._open = opening.pop_all()
        self._from = sum(sum(reader.next_offsets().values()) for reader in self._readers)

    def read_on(self, holdings: UserRecords) -> None:
        """Hand over everything up to the ends as they are now. Raises TimeoutError when the broker falls silent."""
        total = sum(sum(reader.end_offsets().values()) for reader in self._readers) - self._from
        for reader in self._readers:
            for n, located in enumerate(reader.read_to_end()):
                holdings.observe(located)
                if n % TELL_EVERY == 0:
                    self._progress(sum(sum(each.next_offsets().values()) for each in self._readers) - self._from, total)
        self._progress(total, total)

    def partitions(self, topic: Topic) -> list[int]:
        """Partition numbers of a topic. Raises LookupError when it does not exist."""
        return self._readers[0].partitions(topic)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
