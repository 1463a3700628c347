"""Online batches as a pure state machine: outcomes in, batches of rewarded interactions of one serving version out.

Invariants:

- the batches are a function of the outcomes' log alone: no wall clock, no randomness;
- every member of a batch was sampled by the batch's one version, except for corrections if the settings include them;
- an outcome counts once, by interaction and revision;
- outcomes that had a reward or changed one = members of batches + dropped (by reason) + pending.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import to_us
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import BatchClose, OnlineBatch, Outcome, Tick, UserRequest, UserWish
from tidemill.streams.config import BatchSettings
from tidemill.streams.machine import OneTopicMachine, OutputRecord
from tidemill.streams.online.batch_state import (
    BYTES,
    BatchHead,
    Entry,
    ErasedUser,
    FeatureSums,
    InteractionStatus,
    OpenBatch,
    OutcomeState,
    PendingMember,
    PendingMembers,
    SelectionFeatures,
    ServedUser,
    within_share,
)
from tidemill.streams.state import NEVER, NO_IDENTIFIER, MachineState, TimedEntries, too_long

BATCHES_PARTITION = 0

# Reasons why an outcome with a reward is in no batch. `old_map`: the map changed before its batch had enough members;
# `replaced`: its reward changed while it waited, and the new one counts; `correction`: its reward changed after it was
# in a batch, or was withdrawn.
OLD_VERSION = "old_version"
MIXED_VERSIONS = "mixed_versions"
OTHER_ARM = "other_arm"
OLD_MAP = "old_map"
ERASED = "erased"
USER_CAP = "user_cap"
CORRECTION = "correction"
REPLACED = "replaced"


class OnlineBatcher(OneTopicMachine[Entry, BatchHead]):
    """The state machine for the online batches of one branch of one run."""

    def __init__(self, run_id: str, branch: str, settings: BatchSettings, state: MachineState | None = None) -> None:
        """Raises StateError."""
        self._run_id, self._branch = run_id, branch
        self._settings = settings
        # Awaited: an open batch may close when it is due.
        super().__init__(TimedEntries(state, BYTES, lambda entry: isinstance(entry, OpenBatch)), BatchHead())
        found = list(self._store.entries())
        self._room = PendingMembers(entry for entry in found if isinstance(entry, PendingMember))
        self._open = {entry.version: entry for entry in found if isinstance(entry, OpenBatch)}
        self._served_users = {entry.user_id: entry for entry in found if isinstance(entry, ServedUser)}

    @property
    def current_version(self) -> int | None:
        """The newest version that is served now; None before the first outcome."""
        return max(map(int, self._head.last_served), default=None)

    def fall_due(self) -> None:
        for entry in self._store.due(self._head.clock_us):
            match entry:
                case OpenBatch():
                    entry.due_at = NEVER
                    self._store.save(entry)
                    self._close_if_ready(entry)
                    self._end_leftovers()
                case OutcomeState() if self._waiting(entry.interaction_id) is not None:
                    # Keep the mark while the member waits: a repeated outcome must not be added again.
                    self._mark(entry.interaction_id, entry.revision, entry.fate)
                case _:
                    self._store.forget(entry)

    def decide(self, located: ConsumedRecord) -> str:
        match located.record:
            case Outcome() as outcome:
                problem = broken_outcome(located.key, outcome)
                if not problem and (outcome.run_id, outcome.branch) == (self._run_id, self._branch):
                    self._take(outcome, located.offset)
                return problem
            case UserRequest() as request if request.wish is UserWish.ERASE:
                if not request.user_id:
                    return "a user's request names no user"
                if problem := too_long(request.user_id):
                    return problem
                self._erase(request)
            case Tick() | UserRequest():
                pass
            case None if located.value is None:
                try:
                    key = (located.key or b"").decode()
                except UnicodeDecodeError:
                    return f"the key {located.key!r} of a tombstone is not UTF-8 text"
                erased = None if key.startswith(NO_IDENTIFIER) else self._waiting(key)
                if erased is not None:
                    self._drop(erased, ERASED)
            case None:
                return located.error
            case other:
                return f"{type(other).__name__} is not a record of this topic"
        return ""

    def _erase(self, request: UserRequest) -> None:
        # A request never covers time after it was read.
        until = min(request.at, self._head.clock_us)
        known = self._store.get(f"erased/{request.user_id}")
        if isinstance(known, ErasedUser):
            until = max(until, known.until)
        due_at = self._head.clock_us + to_us(self._settings.done_ttl_s)
        self._store.save(ErasedUser(request.user_id, until, due_at))
        for waiting in self._room.of_user(request.user_id):
            if waiting.served_at <= until:
                self._drop(waiting, ERASED)
        served = self._served_users.pop(request.user_id, None)
        if served is not None:
            self._store.forget(served)

    # Outcomes

    def _take(self, outcome: Outcome, order: int) -> None:
        mark = self._store.get(f"mark/{outcome.interaction_id}")
        known = mark if isinstance(mark, OutcomeState) else None
        if known is not None and outcome.revision <= known.revision:
            return
        if known is None:
            self._head.served.add(SelectionFeatures.of(outcome))
            if outcome.user_id not in self._served_users:
                self._served_users[outcome.user_id] = ServedUser(outcome.user_id)
                self._store.save(self._served_users[outcome.user_id])
        version = outcome.version_max
        if outcome.version_min == version >= 0 and self._learns_from(outcome.arm):
            # Update the versions that are served now.
            seen = {int(key): at for key, at in self._head.last_served.items()}
            seen[version] = max(seen.get(version, 0), outcome.served_at)
            oldest = max(seen.values()) - to_us(self._settings.version_idle_s)
            self._head.last_served = {str(v): at for v, at in sorted(seen.items()) if at >= oldest}
            self._end_leftovers()
        if outcome.reward is None and outcome.previous_reward is None:
            self._mark(outcome.interaction_id, outcome.revision, InteractionStatus.EXCLUDED)
            return
        self._head.read += 1
        erased = self._store.get(f"erased/{outcome.user_id}")
        if isinstance(erased, ErasedUser) and outcome.served_at <= erased.until:
            self._lose(outcome, ERASED)
        elif outcome.previous_reward is not None or (known is not None and known.fate is InteractionStatus.BATCHED):
            self._correct(outcome, known.fate if known is not None else InteractionStatus.DROPPED, order)
        else:
            self._admit(outcome, order)

    def _correct(self, outcome: Outcome, fate: InteractionStatus, order: int) -> None:
        waiting = self._waiting(outcome.interaction_id)
        if waiting is not None and not waiting.correction:
            self._drop(waiting, REPLACED)
            if outcome.reward is None:
                self._lose(outcome, CORRECTION)
            else:
                self._admit(outcome, order)
        elif fate is InteractionStatus.DROPPED or self._settings.corrections == "count":
            self._lose(outcome, CORRECTION, fate)
        else:
            change = (outcome.reward or 0.0) - (outcome.previous_reward or 0.0)
            if waiting is not None:
                change += waiting.reward
                self._drop(waiting, REPLACED)
            self._wait(outcome, order, change, correction=True)
            self._mark(outcome.interaction_id, outcome.revision, InteractionStatus.BATCHED)

    def _admit(self, outcome: Outcome, order: int) -> None:
        settings, version = self._settings, outcome.version_max
        if reason := self._obstacle(outcome):
            self._lose(outcome, reason)
            return
        batch = self._open.get(version)
        if batch is not None and batch.map_version != outcome.map_version:
            # A batch has rewards of one map only.
            if len(self._kept(batch)) >= settings.min_members:
                self._close(batch, BatchClose.TIME)
            self._drop_all(version, OLD_MAP)
            batch = None
        if batch is None:
            opened_at = self._head.clock_us
            overdue_at = opened_at + to_us(settings.max_wait_s)
            batch = OpenBatch(version, outcome.map_version, opened_at, overdue_at, overdue_at)
            self._store.save(batch)
            self._open[version] = batch
        self._wait(outcome, order, outcome.reward or 0.0, correction=False)
        self._mark(outcome.interaction_id, outcome.revision, InteractionStatus.WAITING)
        self._close_if_ready(batch)

    def _obstacle(self, outcome: Outcome) -> str:
        """Return why an outcome waits for no batch; empty if it does. The members of its version are read last."""
        version = outcome.version_max
        if not self._learns_from(outcome.arm):
            return OTHER_ARM
        if outcome.version_min != version:
            return MIXED_VERSIONS
        if self._settings.leftovers == "drop" and version != self.current_version:
            return OLD_VERSION
        batch = self._open.get(version)
        if not outcome.user_id or (batch is not None and batch.map_version != outcome.map_version):
            # Members with rewards of another map leave before this outcome is added.
            return ""
        own = [w for w in self._room.of_version(version) if w.user_id == outcome.user_id]
        tokens = sum(w.figures.tokens for w in own) + outcome.sampled_tokens
        return USER_CAP if own and tokens > self._settings.max_share_per_user * self._settings.max_tokens else ""

    def _learns_from(self, arm: str) -> bool:
        return not self._settings.arms or arm in self._settings.arms

    # Batches

    def _end_leftovers(self) -> None:
        """Drop the batches of versions that are not served now, as `leftovers` says."""
        for batch in list(self._open.values()):
            left_over = batch.version != self.current_version
            # With KEEP, an overdue batch with too few members would wait for a version that is no longer served.
            if left_over and (self._settings.leftovers == "drop" or batch.due_at == NEVER):
                self._drop_all(batch.version, OLD_VERSION)

    def _drop_all(self, version: int, reason: str) -> None:
        for waiting in self._room.of_version(version):
            self._drop(waiting, reason)

    def _kept(self, batch: OpenBatch) -> list[PendingMember]:
        waiting = self._room.of_version(batch.version)
        return within_share(waiting, self._settings.max_share_per_user, self._settings.max_members)

    def _close_if_ready(self, batch: OpenBatch) -> None:
        def full(waiting: Sequence[PendingMember]) -> bool:
            tokens = sum(w.figures.tokens for w in waiting)
            return tokens >= self._settings.max_tokens or len(waiting) >= self._settings.max_members

        overdue = batch.overdue_at <= self._head.clock_us
        if overdue or full(self._room.of_version(batch.version)):
            kept = self._kept(batch)
            if len(kept) >= self._settings.min_members and (overdue or full(kept)):
                self._close(batch, BatchClose.TOKENS if full(kept) else BatchClose.TIME)

    def _close(self, batch: OpenBatch, reason: BatchClose) -> None:
        head, kept = self._head, self._kept(batch)
        names = {waiting.interaction_id for waiting in kept}
        for waiting in self._room.of_version(batch.version):
            if waiting.interaction_id not in names:
                self._drop(waiting, USER_CAP)
        members = kept + self._room.corrections(self._settings.max_members - len(kept))
        named = sorted(members, key=lambda w: w.interaction_id)
        trained = FeatureSums()
        for waiting in kept:
            trained.add(waiting.figures)
        sides = {
            "served": head.served.numbers(len(self._served_users)),
            "trained": trained.numbers(len({w.user_id for w in kept})),
        }
        first = hashlib.sha256(named[0].interaction_id.encode()).hexdigest()[:12]
        made = OnlineBatch(
            batch_id=f"{self._run_id}.{self._branch}.{head.sequence:08d}-{first}",
            run_id=self._run_id,
            branch=self._branch,
            sequence=head.sequence,
            version=batch.version,
            members=[waiting.member() for waiting in named],
            tokens=sum(w.figures.tokens for w in named),
            closed_by=reason,
            dropped=dict(sorted(head.dropped.items())),
            selection={f"{side}/{name}": n for side, numbers in sides.items() for name, n in numbers.items()},
            map_version=batch.map_version,
            opened_at=batch.opened_at,
            closed_at=head.clock_us,
        )
        for waiting in members:
            self._end_wait(waiting, InteractionStatus.BATCHED)
        head.batched += len(members)
        head.sequence += 1
        head.dropped, head.served = {}, FeatureSums()
        for user in self._served_users.values():
            self._store.forget(user)
        self._served_users.clear()
        self._outputs.append(OutputRecord(Topic.ONLINE_BATCHES, made.batch_id, made, BATCHES_PARTITION))

    # Entries

    def _waiting(self, interaction_id: str) -> PendingMember | None:
        entry = self._store.get(f"wait/{interaction_id}")
        return entry if isinstance(entry, PendingMember) else None

    def _wait(self, outcome: Outcome, order: int, reward: float, *, correction: bool) -> None:
        waiting = PendingMember.of(outcome, order, reward, correction=correction)
        self._store.save(waiting)
        self._room.add(waiting)

    def _drop(self, waiting: PendingMember, reason: str) -> None:
        # The interaction of a dropped correction was in an earlier batch, so it stays BATCHED.
        self._end_wait(waiting, InteractionStatus.BATCHED if waiting.correction else InteractionStatus.DROPPED)
        self._count(reason)

    def _lose(self, outcome: Outcome, reason: str, fate: InteractionStatus = InteractionStatus.DROPPED) -> None:
        """Drop an outcome at once."""
        self._mark(outcome.interaction_id, outcome.revision, fate)
        self._count(reason)

    def _count(self, reason: str) -> None:
        self._head.lost += 1
        self._head.dropped[reason] = self._head.dropped.get(reason, 0) + 1

    def _end_wait(self, waiting: PendingMember, fate: InteractionStatus) -> None:
        self._store.forget(waiting)
        self._room.remove(waiting)
        if not waiting.correction and not self._room.of_version(waiting.version_max):
            self._store.forget(self._open.pop(waiting.version_max))
        mark = self._store.get(f"mark/{waiting.interaction_id}")
        if isinstance(mark, OutcomeState):
            self._store.save(replace(mark, fate=fate))

    def _mark(self, interaction_id: str, revision: int, fate: InteractionStatus) -> None:
        due_at = self._head.clock_us + to_us(self._settings.done_ttl_s)
        self._store.save(OutcomeState(interaction_id, revision, fate, due_at))


def broken_outcome(key: bytes | None, outcome: Outcome) -> str:
    """Return why an outcome cannot be used; empty if it can."""
    name = outcome.interaction_id
    if not name or name.startswith(NO_IDENTIFIER) or key != name.encode():
        return f"the key {key!r} is not the interaction_id {name!r}"
    if (outcome.reward is None) != bool(outcome.exclusion):
        return f"reward {outcome.reward} and exclusion {outcome.exclusion!r}: an outcome has exactly one of the two"
    numbers = [n for n in (outcome.reward, outcome.previous_reward, outcome.latency_ms) if n is not None]
    if not all(map(math.isfinite, numbers)):
        return f"rewards and latency must be finite: {numbers}"
    if outcome.revision < 0 or (outcome.revision == 0 and outcome.previous_reward is not None):
        return f"revision {outcome.revision} cannot follow a reward of {outcome.previous_reward}"
    if outcome.reward is not None and (outcome.sampled_tokens < 1 or outcome.version_min < 0):
        return f"a reward for {outcome.sampled_tokens} tokens of version {outcome.version_min}"
    return too_long(name, outcome.user_id, outcome.arm, outcome.map_version, outcome.topic)
