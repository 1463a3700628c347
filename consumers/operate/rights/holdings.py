"""What the log holds of one user: a pure fold over `interactions`, `outcomes` and `feedback`.

His are: interactions that were served to him, their outcomes, feedback that he gave, and feedback that anyone gave on
his interactions. What is under a key that has a tombstone is gone, though its bytes stay until the broker compacts.
Interactions are to be observed before feedback, since they say which feedback of others is about him.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Claim, Feedback, Interaction, Outcome, UserRequest

SWEPT = (Topic.INTERACTIONS, Topic.OUTCOMES, Topic.FEEDBACK)
"""The topics that hold users' data, in the order of reading."""


@dataclass(frozen=True, slots=True)
class Held:
    """One record of the user that a reader of the log still gets."""

    topic: Topic
    partition: int
    key: bytes
    dated_at: int
    """Event time, in microseconds."""
    claims: tuple[Claim, ...]
    """Where bytes of it lie beside the log: of this value and of the ones that it replaced."""


Slot = tuple[Topic, int, bytes]
"""Topic, partition and key: what one tombstone erases."""


class Holdings:
    """The records of one user, by slot."""

    def __init__(self, user_id: str) -> None:
        self._user_id = user_id
        self._held: dict[Slot, Held] = {}
        self._interactions: set[str] = set()
        self.slots: set[Slot] = set()
        """Every slot that ever held a record of his, those with a tombstone as well."""
        self.unreadable: Counter[Topic] = Counter()
        """Records that nobody can read: whether they are his is not known. Their readers sent them to dead letters."""

    @property
    def held(self) -> list[Held]:
        """What is there now, in the order in which it was read."""
        return list(self._held.values())

    @property
    def counts(self) -> dict[str, int]:
        """Number of records by topic; topics without one are left out."""
        return dict(Counter(held.topic.value for held in self._held.values()))

    @property
    def newest_at(self) -> int:
        """Event time of his newest record; -1 without one."""
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
        before = self._held[slot].claims if slot in self._held else ()
        self._held[slot] = Held(*slot, dated_at, tuple(dict.fromkeys([*before, *_claims(located.record)])))
        self.slots.add(slot)

    def _dated(self, record: object) -> int | None:
        """Event time of a record of his; None for any other."""
        match record:
            case Interaction() if record.user_id == self._user_id:
                self._interactions.add(record.interaction_id)
                return record.served_at
            case Outcome() if self._about_him(record):
                return record.served_at
            case Feedback() if self._about_him(record):
                return record.observed_at
        return None

    def _about_him(self, record: Outcome | Feedback) -> bool:
        return record.user_id == self._user_id or record.interaction_id in self._interactions

    def owns_key(self, key: bytes, user_id: str | None) -> bool:
        """Whether a dead letter with this key, or with a value of this user, is about him."""
        interaction = key.split(b"/")[0].decode("utf-8", "replace")
        return user_id == self._user_id or interaction in self._interactions


def _claims(record: object) -> list[Claim]:
    return [record.claim] if isinstance(record, Interaction) and record.claim is not None else []


def user_of(record: object) -> str | None:
    """The user that a record names."""
    return record.user_id if isinstance(record, Interaction | Outcome | Feedback | UserRequest) else None
