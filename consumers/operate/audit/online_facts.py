"""The records of answers to users that an audit keeps: interactions, outcomes, online batches and erasures."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from tidemill.consumers.operate.reading import RecordAt, record_at
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.records import Interaction, OnlineBatch, Outcome, UserRequest, UserWish


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """An answer served to a user."""

    place: Position
    interaction_id: str
    user_id: str
    version_min: int
    version_max: int
    replica_id: str
    incarnation: str
    served_at: int


@dataclass(frozen=True, slots=True)
class OutcomeFacts:
    """One outcome of an interaction."""

    interaction_id: str
    user_id: str
    revision: int
    reward: float | None
    exclusion: str
    partition: int
    offset: int
    """The place of the interaction."""


class OnlineFacts:
    """Interactions, outcomes and online batches."""

    def __init__(self) -> None:
        self.served: dict[str, ServedAnswer] = {}
        self.served_at_place: dict[Position, ServedAnswer] = {}
        self.erased: dict[str, int] = {}
        """Interactions with a tombstone, and when the first one was written, in microseconds."""
        self.ends: defaultdict[str, list[RecordAt[OutcomeFacts]]] = defaultdict(list)
        self.batches: list[RecordAt[OnlineBatch]] = []
        self.erasures: dict[str, int] = {}
        """By user: the newest time for which they asked to be erased."""
        self.erasure_times: defaultdict[str, set[int]] = defaultdict(set)
        """By user: every time for which they asked to be erased."""
        self.repeats: Counter[str] = Counter()

    def observe(self, consumed: ConsumedRecord) -> None:
        """Take in a record of the run, or a tombstone or a user's request, which belong to no run."""
        match consumed.record:
            case Interaction() as answer:
                place = consumed.position
                served = ServedAnswer(
                    place, answer.interaction_id, answer.user_id, answer.version_min, answer.version_max,
                    answer.replica_id, answer.incarnation, answer.served_at,
                )  # fmt: skip
                self.repeats["interactions"] += answer.interaction_id in self.served
                self.served.setdefault(answer.interaction_id, served)
                self.served_at_place[place] = served
            case Outcome() as outcome:
                self._take_outcome(record_at(consumed, outcome))
            case OnlineBatch() as batch:
                self.batches.append(record_at(consumed, batch))
            case UserRequest(user_id=user, wish=UserWish.ERASE, at=at):
                self.erasures[user] = max(at, self.erasures.get(user, at))
                self.erasure_times[user].add(at)
            case None if consumed.value is None:
                self._erase(consumed)

    def _take_outcome(self, outcome: RecordAt[Outcome]) -> None:
        of = outcome.record
        end = OutcomeFacts(of.interaction_id, of.user_id, of.revision, of.reward, of.exclusion, of.partition, of.offset)
        known = self.ends[of.interaction_id]
        if any(other.digest == outcome.digest for other in known):
            self.repeats["outcomes"] += 1
        else:
            known.append(RecordAt(outcome.place, end, outcome.digest))

    def _erase(self, tombstone: ConsumedRecord) -> None:
        name = (tombstone.key or b"").decode("utf-8", "replace")
        if tombstone.topic is Topic.INTERACTIONS:
            self.erased.setdefault(name, tombstone.timestamp_ms * 1_000)
            gone = self.served.pop(name, None)
            if gone is not None:
                self.served_at_place.pop(gone.place, None)
        elif tombstone.topic is Topic.OUTCOMES:
            self.ends.pop(name, None)
