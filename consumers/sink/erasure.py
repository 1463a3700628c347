"""What the tables must not hold: rows of users who had themselves erased, and rows under keys that the log let go of.

Two things order a deletion. An ERASE request takes every row of its user that dates from before it, and what others
said about their interactions; a tombstone takes the older rows of its own key. In any order of reading, also
when the log is read again from its beginning, this stays true: a row that dates from before its user's newest ERASE is
not written. A row dates from the earlier of its event time and its time in the log.

Members of online batches are no rows of a user: a pseudonym, a reward and a reference stay there, so that it can be
told which versions learnt from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.consumers.sink.rows import DeletedKey, Row
from tidemill.consumers.sink.tables import tables
from tidemill.schemas.catalogue import CATALOGUE, Topic
from tidemill.schemas.log.consumed import Partition
from tidemill.schemas.records import Feedback, Interaction, Outcome, UserRequest, UserWish

EVENT_TIMES: Mapping[type, str] = {Interaction: "served_at", Feedback: "observed_at", Outcome: "served_at"}
"""Record types that belong to a user, and the field that dates them."""
DEAD_LETTERS = "dead_letters"


@dataclass(frozen=True, slots=True)
class Deletion:
    """Rows of one table that must go: a condition in SQL, with its parameters."""

    table: str
    condition: str
    parameters: dict[str, Any] = field(default_factory=dict)


class Erasures:
    """The newest ERASE of each user."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def observe(self, record: object) -> None:
        """Take a request in; anything else is let pass. The same one twice changes nothing."""
        if isinstance(record, UserRequest) and record.wish is UserWish.ERASE:
            self._before[record.user_id] = max(record.at, self._before.get(record.user_id, record.at))

    def hides(self, row: Row) -> bool:
        """Whether a row is of an erased user and dates from before their request."""
        event_time = EVENT_TIMES.get(type(row.record))
        if event_time is None:
            return False
        before = self._before.get(row.record.user_id)  # type: ignore[union-attr]  # the types of EVENT_TIMES have it
        return before is not None and min(getattr(row.record, event_time), 1000 * row.timestamp_ms) <= before


def requested(rows: Iterable[Row]) -> list[UserRequest]:
    """The ERASE requests among rows, the newest of each user."""
    newest: dict[str, UserRequest] = {}
    for request in (row.record for row in rows if isinstance(row.record, UserRequest)):
        if request.wish is UserWish.ERASE and request.at >= newest.get(request.user_id, request).at:
            newest[request.user_id] = request
    return list(newest.values())


def of_user(request: UserRequest, database: str) -> Iterator[Deletion]:
    """The deletions that an ERASE orders, in order: records about the user's interactions go before these do."""
    parameters = {"user": request.user_id, "at": request.at}
    served = tables()[Interaction].name
    served_to_user = f"SELECT interaction_id FROM `{database}`.`{served}` WHERE {_of_user(Interaction)}"
    for record_type in (Feedback, Outcome):
        condition = f"({_of_user(record_type)}) OR interaction_id IN ({served_to_user})"
        yield Deletion(tables()[record_type].name, condition, parameters)
    yield Deletion(DEAD_LETTERS, f"splitByChar('/', _key)[1] IN ({served_to_user})", parameters)
    yield Deletion(served, _of_user(Interaction), parameters)


def _of_user(record_type: type) -> str:
    dated = f"least(toUnixTimestamp64Micro({EVENT_TIMES[record_type]}), 1000 * toUnixTimestamp64Milli(_timestamp))"
    return f"user_id = %(user)s AND {dated} <= %(at)s"


def of_tombstones(rows: Iterable[Row]) -> Iterator[Deletion]:
    """The deletions that tombstones order: older rows of the same key in the same partition."""
    newest: dict[tuple[Topic, Partition], dict[str, int]] = defaultdict(dict)
    for row in rows:
        if isinstance(row.record, DeletedKey):
            # Keys are bytes of anybody's making; as hexadecimal digits they pass through SQL unharmed.
            newest[row.record.topic, (row.topic, row.partition)][row.key.hex().upper()] = row.offset
    for (topic, (full, partition)), ends in newest.items():
        yield Deletion(
            tables()[CATALOGUE[topic].values[0]].name,
            "_topic = %(topic)s AND _partition = %(partition)s"
            " AND _offset < transform(hex(_key), %(keys)s, %(ends)s, toInt64(-1))",
            {"topic": full, "partition": partition, "keys": list(ends), "ends": list(ends.values())},
        )
