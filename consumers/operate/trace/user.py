"""The weight versions that learnt from a user: a pure fold over outcomes, online batches and the user's requests.

Closed batches keep the pseudonym of each member, also after an erasure: what was learnt can then still be told, and is
told here. The steps name the versions, since a step may have left members of its batch out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.consumers.operate.rights.requests import UserRequests
from tidemill.consumers.operate.trace.versions import Ended, TracedVersion, VersionHistory, ended_in_batch, ranges
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.records import OnlineBatch, OnlineMember, Outcome, UserRequest


@dataclass(frozen=True, slots=True)
class UserBatch:
    """A batch that has interactions of the user."""

    place: Position
    batch_id: str
    run_id: str
    branch: str
    sequence: int
    interactions: int
    reward: float
    """Sum over the user's members."""
    trained: int
    """Of the user's members."""
    ended: list[Ended]
    """The different endings of the user's members."""


@dataclass(frozen=True, slots=True)
class RunTouched:
    """The versions of one run that learnt from the user, or descend from one that did."""

    run_id: str
    trained: list[TracedVersion]
    """Versions whose step trained on interactions of the user."""
    contained_in: str
    """These and every version that descends from one of them, as ranges."""
    served_by: dict[str, int]
    """Replicas that serve such a version now."""


@dataclass(frozen=True, slots=True)
class UserPath:
    """What the log says of one user."""

    user_id: str
    demands: list[UserRequest]
    outcomes: dict[str, int]
    """The user's interactions that ended, by ending; erased ones are gone from the log and are not counted."""
    batches: list[UserBatch]
    runs: list[RunTouched]


class UserTrace:
    """Follows one user, by pseudonym."""

    def __init__(self, user_id: str) -> None:
        self._user_id = user_id
        self._demands = UserRequests(user_id)
        self._endings: dict[str, str] = {}
        self._batches: dict[str, tuple[Position, OnlineBatch]] = {}

    @property
    def runs(self) -> set[str]:
        """The runs whose batches hold interactions of the user."""
        return {batch.run_id for _, batch in self._batches.values()}

    @property
    def found(self) -> bool:
        """Whether the log holds anything of the user."""
        return bool(self._demands.made or self._endings or self._batches)

    def observe(self, located: ConsumedRecord) -> None:
        """Take a record in; records that are not about the user change nothing."""
        match located.record:
            case UserRequest():
                self._demands.observe(located.record)
            case Outcome() if located.record.user_id == self._user_id:
                self._endings[located.record.interaction_id] = located.record.exclusion or "reward"
            case OnlineBatch() if self._members(located.record):
                self._batches.setdefault(located.record.batch_id, (located.position, located.record))
            case None if located.value is None:
                self._endings.pop((located.key or b"").decode("utf-8", "replace"), None)

    def path(self, histories: Mapping[str, VersionHistory]) -> UserPath:
        """Everything observed so far, with the versions of each run of `runs`."""
        batches = [self._batch(place, batch, histories[batch.run_id]) for place, batch in self._batches.values()]
        touched = []
        for run in sorted(self.runs):
            endings = [ending for batch in batches if batch.run_id == run for ending in batch.ended]
            trained = {ending.version for ending in endings if ending.version is not None}
            containing = histories[run].containing(trained)
            made = [histories[run].made(version) for version in sorted(trained)]
            touched.append(RunTouched(run, made, ranges(containing), histories[run].serving(containing)))
        return UserPath(self._user_id, self._demands.made, dict(Counter(self._endings.values())), batches, touched)

    def _members(self, batch: OnlineBatch) -> list[OnlineMember]:
        return [member for member in batch.members if member.user_id == self._user_id]

    def _batch(self, place: Position, batch: OnlineBatch, history: VersionHistory) -> UserBatch:
        members = self._members(batch)
        endings = [ended_in_batch(history, batch.batch_id, member.interaction_id) for member in members]
        return UserBatch(
            place=place,
            batch_id=batch.batch_id,
            run_id=batch.run_id,
            branch=batch.branch,
            sequence=batch.sequence,
            interactions=len({member.interaction_id for member in members}),
            reward=sum(member.reward for member in members),
            trained=sum(ending.version is not None for ending in endings),
            ended=list(dict.fromkeys(endings)),
        )
