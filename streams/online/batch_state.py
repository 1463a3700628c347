"""The state of the online batcher, and its bytes: outcomes, pending members, open batches, and the decided position.

A batch is a biased selection: outcomes of short answers and of angry users arrive first, and some users consent more
than others. `FeatureSums` sums over the served or over the trained interactions; its numbers are means and shares, so
that the two can be compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import field
from enum import StrEnum
from typing import ClassVar

from tidemill.schemas.record_class import record
from tidemill.schemas.records import OnlineMember, Outcome
from tidemill.streams.state import NEVER, EntryBytes


@record(frozen=True, slots=True)
class SelectionFeatures:
    """The features of one interaction that are compared."""

    tokens: int
    latency_ms: float
    reward: float | None
    arm: str
    kinds: tuple[str, ...]
    """The kinds of signals that were observed."""

    @classmethod
    def of(cls, outcome: Outcome) -> SelectionFeatures:
        kinds = tuple(sorted(outcome.observed))
        return cls(outcome.sampled_tokens, outcome.latency_ms, outcome.reward, outcome.arm, kinds)


@record(slots=True)
class FeatureSums:
    """Sums over interactions."""

    interactions: int = 0
    rewarded: int = 0
    tokens: int = 0
    latency_ms: float = 0.0
    reward: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)
    arms: dict[str, int] = field(default_factory=dict)

    def add(self, figures: SelectionFeatures) -> None:
        self.interactions += 1
        self.tokens += figures.tokens
        self.latency_ms += figures.latency_ms
        if figures.reward is not None:
            self.rewarded += 1
            self.reward += figures.reward
        for kind in figures.kinds:
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.arms[figures.arm] = self.arms.get(figures.arm, 0) + 1

    def numbers(self, users: int) -> dict[str, float]:
        """Return counts of interactions and users, means, and shares by signal and arm; no mean if it has no data."""
        found: dict[str, float] = {"interactions": self.interactions, "users": users}
        if self.interactions:
            found["mean_tokens"] = self.tokens / self.interactions
            found["mean_latency_ms"] = self.latency_ms / self.interactions
            found["rewarded_share"] = self.rewarded / self.interactions
        if self.rewarded:
            found["mean_reward"] = self.reward / self.rewarded
        found |= {f"signal_share/{kind}": n / self.interactions for kind, n in sorted(self.kinds.items())}
        found |= {f"arm_share/{arm}": n / self.interactions for arm, n in sorted(self.arms.items())}
        return found


class InteractionStatus(StrEnum):
    """The state of an interaction so far."""

    WAITING = "waiting"
    BATCHED = "batched"
    DROPPED = "dropped"
    EXCLUDED = "excluded"


@record(slots=True)
class OutcomeState:
    """The newest outcome of an interaction that was read."""

    interaction_id: str
    revision: int
    fate: InteractionStatus
    due_at: int
    """Event time at which it is deleted from the state."""

    @property
    def key(self) -> str:
        return f"mark/{self.interaction_id}"


@record(frozen=True, slots=True)
class PendingMember:
    """A rewarded interaction, or a correction, that waits for its batch to close."""

    interaction_id: str
    order: int
    """Offset of its outcome: members are kept in this order."""
    user_id: str
    topic: str
    partition: int
    offset: int
    reward: float
    correction: bool
    version_min: int
    version_max: int
    feedback_at: int | None
    served_at: int
    figures: SelectionFeatures
    due_at: ClassVar[int] = NEVER
    """No timer: it is deleted when its batch closes."""

    @property
    def key(self) -> str:
        return f"wait/{self.interaction_id}"

    @classmethod
    def of(cls, outcome: Outcome, order: int, reward: float, *, correction: bool) -> PendingMember:
        """Return the pending member of an outcome, with its reward in the batch."""
        return cls(
            interaction_id=outcome.interaction_id,
            order=order,
            user_id=outcome.user_id,
            topic=outcome.topic,
            partition=outcome.partition,
            offset=outcome.offset,
            reward=reward,
            correction=correction,
            version_min=outcome.version_min,
            version_max=outcome.version_max,
            feedback_at=outcome.feedback_at,
            served_at=outcome.served_at,
            figures=SelectionFeatures.of(outcome),
        )

    def member(self) -> OnlineMember:
        """Return its reference for a batch."""
        return OnlineMember(
            interaction_id=self.interaction_id,
            user_id=self.user_id,
            topic=self.topic,
            partition=self.partition,
            offset=self.offset,
            reward=self.reward,
            correction=self.correction,
            sampled_tokens=self.figures.tokens,
            version_min=self.version_min,
            version_max=self.version_max,
            arm=self.figures.arm,
            feedback_at=self.feedback_at,
        )


@record(slots=True)
class OpenBatch:
    """A batch that collects members."""

    version: int
    map_version: str
    opened_at: int
    overdue_at: int
    due_at: int
    """Equal to `overdue_at`; NEVER after it was processed at that time."""

    @property
    def key(self) -> str:
        return f"open/{self.version}"


@record(frozen=True, slots=True)
class ErasedUser:
    """A user whose interactions up to a time are dropped, after an erasure."""

    user_id: str
    until: int
    due_at: int

    @property
    def key(self) -> str:
        return f"erased/{self.user_id}"


@record(frozen=True, slots=True)
class ServedUser:
    """A user who was served since the previous batch."""

    user_id: str
    due_at: ClassVar[int] = NEVER
    """No timer: the next batch deletes it."""

    @property
    def key(self) -> str:
        return f"served/{self.user_id}"


Entry = OutcomeState | PendingMember | OpenBatch | ErasedUser | ServedUser


@record(slots=True)
class BatchHead:
    """The decided position in the outcomes, and the counts."""

    offset: int = -1
    clock_us: int = 0
    sequence: int = 0
    """Number of the next batch."""
    read: int = 0
    """Number of outcomes that had a reward, or changed one."""
    batched: int = 0
    """Number of these that are in a batch."""
    lost: int = 0
    """Number of these that were dropped."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Dropped since the previous batch, by reason."""
    last_served: dict[str, int] = field(default_factory=dict)
    """When each version that may be served now was served last, by version."""
    served: FeatureSums = field(default_factory=FeatureSums)
    """The interactions that were served since the previous batch."""


BYTES: EntryBytes[Entry, BatchHead] = EntryBytes(
    {b"m": OutcomeState, b"w": PendingMember, b"o": OpenBatch, b"e": ErasedUser, b"u": ServedUser}, BatchHead
)


class PendingMembers:
    """Pending members by version, in the order of their outcomes; corrections separately, since any batch has them."""

    def __init__(self, waiting: Iterable[PendingMember] = ()) -> None:
        self._of_version: dict[int, dict[str, PendingMember]] = defaultdict(dict)
        self._corrections: dict[str, PendingMember] = {}
        for one in sorted(waiting, key=lambda w: w.order):
            self.add(one)

    def __len__(self) -> int:
        return len(self._corrections) + sum(map(len, self._of_version.values()))

    def add(self, one: PendingMember) -> None:
        queue = self._corrections if one.correction else self._of_version[one.version_max]
        queue[one.interaction_id] = one

    def remove(self, one: PendingMember) -> None:
        if one.correction:
            del self._corrections[one.interaction_id]
            return
        queue = self._of_version[one.version_max]
        del queue[one.interaction_id]
        if not queue:
            del self._of_version[one.version_max]

    def of_version(self, version: int) -> list[PendingMember]:
        """Return the members that wait for the batch of a version."""
        return list(self._of_version.get(version, {}).values())

    def corrections(self, most: int) -> list[PendingMember]:
        """Return the first corrections, at most `most`."""
        return list(self._corrections.values())[:most]

    def of_user(self, user_id: str) -> list[PendingMember]:
        everyone = [*self._corrections.values(), *(one for q in self._of_version.values() for one in q.values())]
        return [one for one in everyone if one.user_id == user_id]


def within_share(waiting: Sequence[PendingMember], share: float, room: int) -> list[PendingMember]:
    """Return the first members of each user, at most `room`, such that no user has more than `share` of the result, or
    only one member. A member without a user counts as one of a separate user."""
    users = [one.user_id or one.interaction_id for one in waiting]
    members = Counter(users)
    most = max(members.values(), default=0)
    # A lower limit also makes the total smaller: search for the greatest limit that keeps every share.
    while most > 1 and most > share * min(room, sum(min(n, most) for n in members.values())):
        most -= 1
    taken: Counter[str] = Counter()
    kept = []
    for user, one in zip(users, waiting, strict=True):
        if taken[user] < most:
            taken[user] += 1
            kept.append(one)
    return kept[:room]
