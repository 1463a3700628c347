"""The feedback join as a pure state machine: interactions and feedback of one partition in, outcomes out.

Invariants:

- the outcomes are a function of the two logs alone, independent of the order in which the topics are read: both are
  decided in one order (`streams.merge`), and event time is the earlier of the two clocks;
- every interaction of the run ends in exactly one outcome of revision 0: a reward, or an exclusion with its reason;
  a later change of its reward is one more outcome with the next revision;
- an event counts once, by its id; a correction replaces the event that it names, even if it is read first;
- only feedback of the user who was served counts;
- memory is bounded in event time: ended interactions, feedback without an interaction and idle users are deleted.
"""

from __future__ import annotations

from collections import Counter

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import to_us
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Feedback, Outcome, OutcomeExclusion, SignalKind, SignalUse, UserRequest, UserWish
from tidemill.streams.join.config import JoinSettings
from tidemill.streams.join.join_state import (
    DatedRequest,
    EarlyFeedback,
    InteractionState,
    Item,
    JoinHead,
    JoinStore,
    PendingSignal,
    item_of,
)
from tidemill.streams.join.reward_map import RewardResult, Signal, map_version, reward_of, standing
from tidemill.streams.machine import Output, OutputRecord, Rejected
from tidemill.streams.merge import TopicMerge
from tidemill.streams.state import NEVER, Changes, MachineState

INPUTS = (Topic.INTERACTIONS, Topic.FEEDBACK)
"""At equal times, the interaction is decided first."""
INTERACTIONS, FEEDBACK = Topic.INTERACTIONS.value, Topic.FEEDBACK.value
OUTCOMES_PARTITION = 0


class FeedbackJoin:
    """The state machine for the interactions and the feedback of one partition."""

    def __init__(self, partition: int, run_id: str, settings: JoinSettings, state: MachineState | None = None) -> None:
        """Raises StateError."""
        self._partition = partition
        self._run_id = run_id
        self._settings = settings
        self._map = settings.map
        self._map_version = map_version(self._map)
        self._wait_us = to_us(self._map.wait_s)
        self._clock_skew_us = to_us(self._settings.clock_skew_s)
        self._late_us = to_us(self._settings.late_s)
        self._grace_us = to_us(self._settings.grace_s)
        self._settle_us = to_us(self._settings.settle_s)
        self._early_wait_us = to_us(self._settings.early_wait_s)
        self._bot_window_us = to_us(self._settings.bot_window_s)
        self._done_ttl_us = to_us(self._settings.done_ttl_s)
        self._close_on = frozenset(settings.close_on)
        self._too_many = f"the interaction has {settings.max_signals} signals already"
        self._horizons_us = {kind: to_us(self._map.horizon_s(kind)) for kind in SignalKind}
        self._store = JoinStore(partition, state)
        head = self._store.head or JoinHead({}, {})
        self._merge: TopicMerge[Item] = TopicMerge(INPUTS, {Topic(name): mark for name, mark in head.marks.items()})
        self.counts = Counter(head.counts)
        """Number of records without an outcome of their own, by reason."""
        self._outputs: list[Output] = []
        """The outputs that the current record decides."""

    def next_offset(self, topic: Topic) -> int:
        return self._merge.next_offset(topic)

    def clock_us(self, topic: Topic) -> int:
        """Return the event time of a topic, including the records that wait for the other topic."""
        return self._merge.clock_us(topic)

    def next_deadline_us(self) -> int | None:
        """Return the earliest time at which an interaction ends, early feedback is rejected or a record is decided.

        Entries that are only deleted do not count.
        """
        times = (self._store.next_awaited_us(), self._merge.wanted_us())
        return min((time for time in times if time is not None), default=None)

    def observe(self, located: ConsumedRecord) -> list[Output]:
        """Process one record of either topic. Return the outputs that it decides."""
        if self._merge.has_read(located.topic, located.offset):
            return []
        item = item_of(located, self._run_id, self._clock_skew_us)
        self._merge.read(located.topic, located.offset, located.timestamp_ms * 1_000, item)
        self._outputs = []
        while (step := self._merge.take()) is not None:
            at_us, _offset, item = step
            self._advance(at_us)
            match item:
                case InteractionState():
                    self._admit(item, at_us)
                case ConsumedRecord(record=Feedback() as feedback):
                    self._on_feedback(item, feedback, at_us)
                case ConsumedRecord(record=UserRequest() as request):
                    self._on_user_request(request, at_us)
                case ConsumedRecord():
                    self._erase((item.key or b"").decode(), at_us)
                case Rejected():
                    self._outputs.append(item)
            # Process entries that are due at once: `next_deadline_us` would not cause a tick for them.
            self._advance(at_us)
        return self._outputs

    def take_changes(self) -> Changes:
        marks = {topic.value: mark for topic, mark in self._merge.marks.items()}
        return self._store.changes(JoinHead(marks, dict(self.counts)))

    def _advance(self, time_us: int) -> None:
        """Process all entries that are due up to a time, in order of time."""
        for entry in self._store.due(time_us):
            if isinstance(entry, InteractionState) and entry.open:
                self._end(entry, self._exclusion(entry), entry.due_at)
            elif isinstance(entry, EarlyFeedback):
                overdue = [held for held in entry.held if held.arrived_at + self._early_wait_us <= entry.due_at]
                self._keep_held(entry, [held for held in entry.held if held not in overdue])
                for held in overdue:
                    self._reject(held, f"unknown interaction: no record of it within {self._settings.early_wait_s:g} s")
            else:
                self._store.forget(entry)

    def _keep_held(self, early: EarlyFeedback, held: list[PendingSignal]) -> None:
        for user_id in {one.user_id for one in early.held} - {one.user_id for one in held}:
            self._store.release(early, user_id)
        early.held = held
        if held:
            early.due_at = min(one.arrived_at for one in held) + self._early_wait_us
            self._store.save(early)
        else:
            self._store.forget(early)

    # Records

    def _admit(self, case: InteractionState, at_us: int) -> None:
        if self._store.case(case.interaction_id) is not None:
            self.counts["duplicate_interaction"] += 1
            return
        # Feedback may be delayed as much as the interaction was.
        case.full_wait_at = case.due_at = max(case.served_at + self._wait_us, at_us) + self._grace_us
        early = self._store.early(case.interaction_id)
        if early is not None:
            self._store.forget(early)
        if case.sealed:
            # Remembered, so that its feedback is ignored too and not rejected for an unknown interaction.
            self.counts["other_run"] += 1
            self._finalise(case, at_us + self._done_ttl_us)
        else:
            self._store.save(case)
            case.bot = self._is_bot(case.user_id, at_us)
            if self._store.wishes(case.user_id).erased(case.served_at):
                self._end(case, OutcomeExclusion.ERASED, at_us)
            elif at_us - case.served_at > self._late_us:
                self._end(case, OutcomeExclusion.TOO_LATE, at_us)
        for held in early.held if early else ():
            self._add(case, held, at_us)

    def _on_feedback(self, located: ConsumedRecord, feedback: Feedback, at_us: int) -> None:
        signal = Signal(
            event_id=feedback.event_id,
            kind=feedback.kind,
            value=feedback.value,
            observed_at=feedback.observed_at,
            corrects=feedback.corrects,
            offset=located.offset,
        )
        key, value = located.key or b"", located.value or b""
        held = PendingSignal(at_us, feedback.user_id, signal, key, value, located.timestamp_ms)
        case = self._store.case(feedback.interaction_id)
        if case is not None:
            if not case.sealed and signal.event_id not in case.signals:
                self._is_bot(feedback.user_id, at_us)
            self._add(case, held, at_us)
            return
        early = self._store.early(feedback.interaction_id) or EarlyFeedback(feedback.interaction_id, NEVER)
        # It is not known yet whether a signal is within its horizon: only an equal one is certainly a duplicate.
        if any((h.user_id, h.value) == (held.user_id, held.value) for h in early.held):
            self.counts["duplicate_feedback"] += 1
            return
        self._is_bot(held.user_id, at_us)
        if len(early.held) >= self._settings.max_signals:
            self._reject(held, self._too_many)
        else:
            self._keep_held(early, [*early.held, held])

    def _add(self, case: InteractionState, held: PendingSignal, at_us: int) -> None:
        signal = held.signal
        earliest = case.served_at - round(case.latency_ms * 1_000) - self._clock_skew_us
        if case.sealed:
            self.counts["after_exclusion"] += 1
        elif held.user_id != case.user_id:
            self._reject(held, f"user {held.user_id!r} was not served interaction {case.interaction_id!r}")
        elif signal.event_id in case.signals:
            self.counts["duplicate_feedback"] += 1
        elif not earliest <= signal.observed_at <= case.served_at + self._horizons_us[signal.kind]:
            self.counts["out_of_horizon"] += 1
        elif len(case.signals) >= self._settings.max_signals:
            self._reject(held, self._too_many)
        else:
            case.signals[signal.event_id] = signal
            case.arrivals[signal.event_id] = at_us
            self._use_signals(case, at_us)

    def _use_signals(self, case: InteractionState, at_us: int) -> None:
        """Use a changed set of signals: set when an open interaction ends, or correct the reward of an ended one."""
        if not case.open:
            self._store.save(case)
            result = reward_of(self._map, case.signals.values())
            if result.reward != case.reward and not self._exclusion(case):
                previous, case.reward = case.reward, result.reward
                case.revision += 1
                self._emit(case, result, "", previous, at_us)
            return
        end_at = case.full_wait_at
        for kind, signal in standing(case.signals.values()).items():
            if kind in self._close_on:
                end_at = min(end_at, case.arrivals[signal.event_id] + self._settle_us)
        case.due_at = max(end_at, at_us)
        self._store.save(case)

    # Users

    def _is_bot(self, user_id: str, at_us: int) -> bool:
        """Count an event of a user. Return whether they count as a bot now; without a user, nobody does."""
        if not user_id:
            return False
        activity = self._store.activity(user_id, at_us)
        if at_us >= activity.opened_at + self._bot_window_us:
            activity.opened_at, activity.events = at_us, 0
        activity.events += 1
        if activity.events > self._settings.bot_max_events:
            # While the user is a bot, an interaction is marked when it is admitted.
            for case in self._store.of_user(user_id, InteractionState) if at_us >= activity.bot_until else ():
                if case.open and not case.bot:
                    case.bot = True
                    self._store.save(case)
            activity.bot_until = at_us + self._bot_window_us
        activity.due_at = max(activity.opened_at + self._bot_window_us, activity.bot_until)
        self._store.save(activity)
        return at_us < activity.bot_until

    def _on_user_request(self, request: UserRequest, at_us: int) -> None:
        user_id, wishes = request.user_id, self._store.wishes(request.user_id)
        if any(wish.request_id == request.request_id for wish in wishes.wishes):
            return
        # A request never covers time after it was read.
        wish = DatedRequest(min(request.at, at_us), request.request_id, request.wish)
        settings = self._settings
        # An interaction that was served before a request ends within this time after it.
        keep_us = to_us(settings.late_s + settings.clock_skew_s + self._map.wait_s + 2 * settings.grace_s)
        ordered = sorted([*wishes.wishes, wish], key=lambda w: (w.at, w.request_id))
        past = [w for w in ordered if w.at + keep_us <= at_us and w.wish is not UserWish.ERASE]
        wishes.wishes = past[-1:] + [w for w in ordered if w.at + keep_us > at_us]
        wishes.due_at = NEVER if wishes.opted_out(at_us) else at_us + keep_us
        self._store.save(wishes)
        if wish.wish is not UserWish.ERASE:
            return
        for case in self._store.of_user(user_id, InteractionState):
            if case.served_at <= wish.at:
                self._erase_case(case, at_us)
        for early in self._store.of_user(user_id, EarlyFeedback):
            kept = [h for h in early.held if h.user_id != user_id or h.signal.observed_at > wish.at]
            self.counts["erased_feedback"] += len(early.held) - len(kept)
            self._keep_held(early, kept)

    def _erase(self, key: str, at_us: int) -> None:
        """Process a tombstone of an interaction or of one feedback event."""
        case = self._store.case(key)
        if case is not None:
            self._erase_case(case, at_us)
            return
        unclaimed = self._store.early(key)
        if unclaimed is not None:
            self.counts["erased_feedback"] += len(unclaimed.held)
            self._store.forget(unclaimed)
        # Both ids may contain slashes, so each slash may be the separator.
        for place in (place for place, letter in enumerate(key) if letter == "/"):
            interaction_id, event_id = key[:place], key[place + 1 :]
            found, early = self._store.case(interaction_id), self._store.early(interaction_id)
            if found is not None and event_id in found.signals:
                del found.signals[event_id], found.arrivals[event_id]
                self.counts["erased_feedback"] += 1
                self._use_signals(found, at_us)
            elif early is not None and any(held.signal.event_id == event_id for held in early.held):
                self.counts["erased_feedback"] += 1
                self._keep_held(early, [held for held in early.held if held.signal.event_id != event_id])

    def _erase_case(self, case: InteractionState, at_us: int) -> None:
        if case.open:
            self._end(case, OutcomeExclusion.ERASED, at_us)
        else:
            self._finalise(case, case.due_at)

    # Endings

    def _exclusion(self, case: InteractionState) -> str:
        """Return why an interaction is excluded regardless of its signals; empty if it is not."""
        wishes = self._store.wishes(case.user_id)
        if wishes.erased(case.served_at):
            return OutcomeExclusion.ERASED
        if not case.consent:
            return OutcomeExclusion.NO_CONSENT
        if wishes.opted_out(case.served_at):
            return OutcomeExclusion.OPTED_OUT
        if case.bot:
            return OutcomeExclusion.BOT
        return "" if case.sampled_tokens else OutcomeExclusion.NO_TOKENS

    def _end(self, case: InteractionState, exclusion: str, at_us: int) -> None:
        """End an interaction: emit its first outcome."""
        result = reward_of(self._map, case.signals.values())
        if exclusion:
            observed = {} if exclusion == OutcomeExclusion.ERASED else result.observed
            result = RewardResult(None, (), observed)
        case.revision, case.reward = 0, result.reward
        self._emit(case, result, exclusion, None, at_us)
        if exclusion:
            self._finalise(case, at_us + self._done_ttl_us)
        else:
            case.due_at = at_us + self._done_ttl_us
            self._store.save(case)

    def _finalise(self, case: InteractionState, due_at: int) -> None:
        """Seal an ended interaction: no record can change its outcome now, so its reward and signals are deleted."""
        case.revision, case.reward, case.sealed = max(case.revision, 0), None, True
        case.signals.clear()
        case.arrivals.clear()
        case.due_at = due_at
        self._store.save(case)

    def _emit(
        self, case: InteractionState, result: RewardResult, exclusion: str, previous: float | None, closed_at: int
    ) -> None:
        signals = [
            SignalUse(
                kind=signal.kind,
                event_id=signal.event_id,
                value=signal.value or 0.0,
                contribution=contribution,
                topic=FEEDBACK,
                partition=self._partition,
                offset=signal.offset,
            )
            for signal, contribution in result.uses
        ]
        outcome = Outcome(
            interaction_id=case.interaction_id,
            run_id=self._run_id,
            branch=case.branch,
            user_id=case.user_id,
            arm=case.arm,
            topic=INTERACTIONS,
            partition=self._partition,
            offset=case.offset,
            version_min=case.version_min,
            version_max=case.version_max,
            sampled_tokens=case.sampled_tokens,
            latency_ms=case.latency_ms,
            reward=result.reward,
            exclusion=str(exclusion) or ("" if result.reward is not None else OutcomeExclusion.NO_SIGNAL.value),
            signals=signals,
            observed=dict(result.observed),
            map_version=self._map_version,
            revision=case.revision,
            previous_reward=previous,
            served_at=case.served_at,
            feedback_at=max((signal.observed_at for signal, _ in result.uses), default=None),
            closed_at=closed_at,
        )
        self._outputs.append(OutputRecord(Topic.OUTCOMES, case.interaction_id, outcome, OUTCOMES_PARTITION))

    def _reject(self, held: PendingSignal, reason: str) -> None:
        place = Topic.FEEDBACK, self._partition, held.signal.offset
        located = ConsumedRecord(*place, held.timestamp_ms, held.key, held.value, None)
        self._outputs.append(Rejected(located, reason))
