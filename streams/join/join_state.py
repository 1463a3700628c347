"""The state of the feedback join and its bytes: interactions, early feedback, users, and the decided positions; and the
conversion of a record into an item to decide, or into a rejection with a reason.

Each entry of the state has a timer, `due_at`: the event time at which it is processed again without a record.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import field
from typing import TypeVar

from tidemill.schemas import signals
from tidemill.schemas.catalogue import Topic, feedback_key
from tidemill.schemas.clock import to_s
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.record_class import record
from tidemill.schemas.records import Feedback, Interaction, Tick, UserRequest, UserWish
from tidemill.streams.join.reward_map import Signal
from tidemill.streams.machine import Rejected
from tidemill.streams.merge import SourceMark
from tidemill.streams.state import NEVER, NO_IDENTIFIER, EntryBytes, MachineState, TimedEntries, too_long

OPEN = -1


@record(slots=True)
class InteractionState:
    """One interaction: open, or ended and remembered."""

    interaction_id: str
    offset: int
    branch: str
    user_id: str
    arm: str
    version_min: int
    version_max: int
    sampled_tokens: int
    latency_ms: float
    consent: bool
    served_at: int
    full_wait_at: int
    """Event time at which it ends if no signal ends it earlier."""
    due_at: int
    """Event time at which it ends while it is open; afterwards, at which it is deleted from the state."""
    revision: int = OPEN
    """-1 while open; then the revision of its newest outcome."""
    reward: float | None = None
    """That outcome's reward."""
    bot: bool = False
    sealed: bool = False
    """No later record changes its outcome: it is excluded permanently, erased, or belongs to another run."""
    signals: dict[str, Signal] = field(default_factory=dict)
    arrivals: dict[str, int] = field(default_factory=dict)
    """Event time at which each signal was read, by event id."""

    @classmethod
    def of(cls, interaction: Interaction, offset: int) -> InteractionState:
        """Return the state of an interaction; its times are set when it is admitted."""
        return cls(
            interaction_id=interaction.interaction_id,
            offset=offset,
            branch=interaction.branch,
            user_id=interaction.user_id,
            arm=interaction.arm,
            version_min=interaction.version_min,
            version_max=interaction.version_max,
            sampled_tokens=interaction.sampled_tokens,
            latency_ms=interaction.latency_ms,
            consent=interaction.consent,
            served_at=interaction.served_at,
            full_wait_at=NEVER,
            due_at=NEVER,
        )

    @property
    def open(self) -> bool:
        """Whether it has no outcome yet."""
        return self.revision == OPEN

    @property
    def key(self) -> str:
        return f"case/{self.interaction_id}"


@record(frozen=True, slots=True)
class PendingSignal:
    """Feedback that waits for its interaction. It includes the record's bytes, since it may become a dead letter."""

    arrived_at: int
    user_id: str
    signal: Signal
    key: bytes
    value: bytes
    timestamp_ms: int


@record(slots=True)
class EarlyFeedback:
    """The feedback of an interaction that is not known yet, in order of arrival."""

    interaction_id: str
    due_at: int
    held: list[PendingSignal] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"early/{self.interaction_id}"


@record(frozen=True, slots=True)
class DatedRequest:
    """One request of a user, and its time."""

    at: int
    request_id: str
    wish: UserWish


@record(slots=True)
class UserRequestState:
    """The requests of one user that later interactions may still need."""

    partition: int
    user_id: str
    due_at: int
    """Event time at which they may be deleted; never while the user has opted out."""
    wishes: list[DatedRequest] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"wishes/{self.partition}/{self.user_id}"

    def opted_out(self, served_at: int) -> bool:
        """Whether the newest consent request before an interaction was served is an opt-out."""
        if not self.wishes:
            return False
        earlier = [wish for wish in self.wishes if wish.wish is not UserWish.ERASE and wish.at <= served_at]
        return bool(earlier) and earlier[-1].wish is UserWish.OPT_OUT

    def erased(self, served_at: int) -> bool:
        """Whether an erasure was requested that covers an interaction served at this time."""
        return bool(self.wishes) and any(wish.wish is UserWish.ERASE and wish.at >= served_at for wish in self.wishes)


@record(slots=True)
class Activity:
    """The number of events of one user in the newest window."""

    partition: int
    user_id: str
    due_at: int
    """Event time at which the window and any exclusion as a bot are over."""
    opened_at: int
    events: int = 0
    bot_until: int = 0

    @property
    def key(self) -> str:
        return f"activity/{self.partition}/{self.user_id}"


@record(frozen=True, slots=True)
class JoinHead:
    """The decided position of each input topic, and the counts."""

    marks: Mapping[str, SourceMark]
    counts: Mapping[str, int]


Entry = InteractionState | EarlyFeedback | UserRequestState | Activity
OfUser = TypeVar("OfUser", InteractionState, EarlyFeedback)


BYTES: EntryBytes[Entry, JoinHead] = EntryBytes(
    {b"c": InteractionState, b"e": EarlyFeedback, b"w": UserRequestState, b"a": Activity}, JoinHead
)


class JoinStore(TimedEntries[Entry, JoinHead]):
    """The entries of one partition: interactions, feedback and users."""

    def __init__(self, partition: int, state: MachineState | None) -> None:
        """Raises StateError."""
        self._partition = partition
        self._of_user: dict[str, set[str]] = defaultdict(set)
        # Awaited: an outcome follows, or feedback is rejected.
        super().__init__(
            state,
            BYTES,
            lambda entry: isinstance(entry, EarlyFeedback) or (isinstance(entry, InteractionState) and entry.open),
        )

    def case(self, interaction_id: str) -> InteractionState | None:
        """Return an interaction, open or ended; None if it is not known."""
        entry = self._entries.get(f"case/{interaction_id}")
        return entry if isinstance(entry, InteractionState) else None

    def early(self, interaction_id: str) -> EarlyFeedback | None:
        """Return the feedback that waits for an interaction; None if there is none."""
        entry = self._entries.get(f"early/{interaction_id}")
        return entry if isinstance(entry, EarlyFeedback) else None

    def wishes(self, user_id: str) -> UserRequestState:
        """Return the requests of a user; empty if none are known."""
        entry = self._entries.get(f"wishes/{self._partition}/{user_id}")
        return entry if isinstance(entry, UserRequestState) else UserRequestState(self._partition, user_id, NEVER)

    def activity(self, user_id: str, at_us: int) -> Activity:
        """Return the recent activity of a user; if none is known, a window that opens at `at_us`."""
        entry = self._entries.get(f"activity/{self._partition}/{user_id}")
        return entry if isinstance(entry, Activity) else Activity(self._partition, user_id, NEVER, at_us)

    def of_user(self, user_id: str, kind: type[OfUser]) -> list[OfUser]:
        """Return the interactions of a user, or the entries with waiting feedback of theirs, sorted by interaction."""
        found = (self.get(key) for key in sorted(self._of_user.get(user_id, ())))
        return [entry for entry in found if isinstance(entry, kind)]

    def save(self, entry: Entry) -> None:
        if isinstance(entry, InteractionState):
            # The user of an interaction never changes.
            if entry.key not in self._entries:
                self._of_user[entry.user_id].add(entry.key)
        elif isinstance(entry, EarlyFeedback):
            for held in entry.held:
                self._of_user[held.user_id].add(entry.key)
        super().save(entry)

    def forget(self, entry: Entry) -> None:
        super().forget(entry)
        if isinstance(entry, InteractionState):
            self.release(entry, entry.user_id)
        elif isinstance(entry, EarlyFeedback):
            for held in entry.held:
                self.release(entry, held.user_id)

    def release(self, entry: Entry, user_id: str) -> None:
        """Remove an entry from a user's index: it no longer contains data of this user."""
        keys = self._of_user.get(user_id, set())
        keys.discard(entry.key)
        if not keys:
            self._of_user.pop(user_id, None)


Item = InteractionState | ConsumedRecord | Rejected | None
"""An interaction without its tokens, which remain in the log; feedback, a user request or a tombstone; None: the
record only advances the clock."""


def item_of(located: ConsumedRecord, run_id: str, clock_skew_us: int) -> Item:
    """Return the item of a record of `interactions` or `feedback`; an interaction of another run is sealed."""
    topic, found = located.topic, located.record
    if isinstance(found, Feedback) and topic is Topic.FEEDBACK:
        problem = broken_feedback(located.key, found)
        return Rejected(located, problem) if problem else located
    if isinstance(found, Interaction) and topic is Topic.INTERACTIONS:
        problem = broken_interaction(located, found, clock_skew_us)
        if problem:
            return Rejected(located, problem)
        case = InteractionState.of(found, located.offset)
        case.sealed = found.run_id != run_id
        return case
    if isinstance(found, UserRequest) and topic is Topic.INTERACTIONS:
        problem = "" if found.user_id and found.request_id else "a user's request names no user or has no id"
        problem = problem or too_long(found.user_id, found.request_id)
        return Rejected(located, problem) if problem else located
    if isinstance(found, Tick):
        return None
    if found is not None:
        return Rejected(located, f"{type(found).__name__} is not a record of {topic.value}")
    if located.value is None:
        try:
            key = (located.key or b"").decode()
        except UnicodeDecodeError:
            return Rejected(located, f"the key {located.key!r} of a tombstone is not UTF-8 text")
        return None if key.startswith(NO_IDENTIFIER) else located
    return Rejected(located, located.error)


def broken_interaction(located: ConsumedRecord, interaction: Interaction, clock_skew_us: int) -> str:
    """Return why an interaction cannot be joined; empty if it can."""
    name = interaction.interaction_id
    if located.key != name.encode():
        return f"the key {located.key!r} is not the interaction_id {name!r}"
    if not name or name.startswith(NO_IDENTIFIER):
        return f"interaction_id {name!r} is not an identifier"
    if interaction.sampled_tokens < 0 or not -1 <= interaction.version_min <= interaction.version_max:
        versions = f"versions {interaction.version_min} to {interaction.version_max}"
        return f"{interaction.sampled_tokens} sampled tokens of {versions} are impossible"
    if not (math.isfinite(interaction.latency_ms) and interaction.latency_ms >= 0):
        return f"latency_ms {interaction.latency_ms} is not a duration"
    ahead_us = interaction.served_at - located.timestamp_ms * 1_000
    if interaction.served_at < 0 or ahead_us > clock_skew_us:
        return f"served_at {interaction.served_at} is {to_s(ahead_us):,.1f} s after the time of its own record"
    return too_long(name, interaction.user_id, interaction.branch, interaction.arm)


def broken_feedback(key: bytes | None, feedback: Feedback) -> str:
    """Return why feedback cannot be joined; empty if it can."""
    if not feedback.event_id or not feedback.interaction_id:
        return "event_id and interaction_id must not be empty"
    expected = feedback_key(feedback.interaction_id, feedback.event_id)
    if key != expected.encode():
        return f"the key {key!r} is not interaction_id/event_id, {expected!r}"
    if feedback.observed_at < 0:
        return f"observed_at {feedback.observed_at} is before 1970"
    if feedback.corrects == feedback.event_id:
        return f"event {feedback.event_id!r} corrects itself"
    names = (feedback.event_id, feedback.interaction_id, feedback.user_id, feedback.corrects, feedback.source)
    if problem := too_long(*names):
        return problem
    if feedback.value is None:
        return (
            "" if feedback.corrects else "without a value, a signal must name in `corrects` the event that it withdraws"
        )
    return signals.check(feedback.kind, feedback.value)
