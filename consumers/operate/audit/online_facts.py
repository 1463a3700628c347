"""What the log says of answers served to users: their ends, the batches they came into, and who had himself erased."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from tidemill.consumers.operate.audit.copies import Standing, standing
from tidemill.consumers.operate.trace.place import Place, place_of
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Interaction, OnlineBatch, Outcome, UserRequest, UserWish


@dataclass(frozen=True, slots=True)
class Served:
    """An answer served to a user."""

    place: Place
    interaction_id: str
    user_id: str
    version_min: int
    version_max: int
    replica_id: str
    incarnation: str
    served_at: int


@dataclass(frozen=True, slots=True)
class End:
    """One outcome of an interaction."""

    interaction_id: str
    user_id: str
    revision: int
    reward: float | None
    exclusion: str
    partition: int
    offset: int
    """Where the interaction lies."""


class Online:
    """Interactions, outcomes and online batches."""

    def __init__(self) -> None:
        self.served: dict[str, Served] = {}
        self.served_at_place: dict[Place, Served] = {}
        self.erased: dict[str, int] = {}
        """Interactions that a tombstone ended, and when the first one was written, in microseconds."""
        self.ends: defaultdict[str, list[Standing[End]]] = defaultdict(list)
        self.batches: list[Standing[OnlineBatch]] = []
        self.erasures: dict[str, int] = {}
        """The newest time for which a user demanded to be erased."""
        self.demands: defaultdict[str, set[int]] = defaultdict(set)
        """Every time for which he did."""
        self.repeats: Counter[str] = Counter()

    def observe(self, located: ConsumedRecord) -> None:
        """Take a record of the run in, or a tombstone or a demand of a user, which are of no run."""
        match located.record:
            case Interaction() as interaction:
                self._take_interaction(place_of(located), interaction)
            case Outcome() as outcome:
                self._take_outcome(standing(located, outcome))
            case OnlineBatch() as batch:
                self.batches.append(standing(located, batch))
            case UserRequest(user_id=user, wish=UserWish.ERASE, at=at):
                self.erasures[user] = max(at, self.erasures.get(user, at))
                self.demands[user].add(at)
            case None if located.value is None:
                self._bury(located)

    def _take_interaction(self, place: Place, said: Interaction) -> None:
        facts = Served(
            place, said.interaction_id, said.user_id, said.version_min, said.version_max, said.replica_id,
            said.incarnation, said.served_at,
        )  # fmt: skip
        self.repeats["interactions"] += said.interaction_id in self.served
        self.served.setdefault(said.interaction_id, facts)
        self.served_at_place[place] = facts

    def _take_outcome(self, outcome: Standing[Outcome]) -> None:
        said = outcome.record
        end = End(
            said.interaction_id, said.user_id, said.revision, said.reward, said.exclusion, said.partition, said.offset
        )
        known = self.ends[said.interaction_id]
        if any(other.digest == outcome.digest for other in known):
            self.repeats["outcomes"] += 1
        else:
            known.append(Standing(outcome.place, end, outcome.digest))

    def _bury(self, located: ConsumedRecord) -> None:
        name = (located.key or b"").decode("utf-8", "replace")
        if located.topic is Topic.INTERACTIONS:
            self.erased.setdefault(name, located.timestamp_ms * 1_000)
            gone = self.served.pop(name, None)
            if gone is not None:
                self.served_at_place.pop(gone.place, None)
        elif located.topic is Topic.OUTCOMES:
            self.ends.pop(name, None)
