"""The input of the feedback join: converts a record into an item to decide, or into a rejection with a reason."""

from __future__ import annotations

import math

from tidemill.schemas import signals
from tidemill.schemas.catalogue import Topic, feedback_key
from tidemill.schemas.clock import to_s
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Feedback, Interaction, Tick, UserRequest
from tidemill.streams.join.join_state import InteractionState
from tidemill.streams.machine import Rejected
from tidemill.streams.state import NO_IDENTIFIER

Item = InteractionState | ConsumedRecord | Rejected | None
"""An interaction without its tokens, which remain in the log; feedback, a user request or a tombstone; None: the
record only advances the clock."""


def read(located: ConsumedRecord, run_id: str, clock_skew_us: int) -> Item:
    """Return the item of a record of `interactions` or `feedback`; an interaction of another run is sealed."""
    topic, record = located.topic, located.record
    if isinstance(record, Feedback) and topic is Topic.FEEDBACK:
        problem = broken_feedback(located.key, record)
        return Rejected(located, problem) if problem else located
    if isinstance(record, Interaction) and topic is Topic.INTERACTIONS:
        problem = broken_interaction(located, record, clock_skew_us)
        if problem:
            return Rejected(located, problem)
        case = InteractionState.of(record, located.offset)
        case.sealed = record.run_id != run_id
        return case
    if isinstance(record, UserRequest) and topic is Topic.INTERACTIONS:
        problem = "" if record.user_id and record.request_id else "a user's request names no user or has no id"
        return Rejected(located, problem) if problem else located
    if isinstance(record, Tick):
        return None
    if record is not None:
        return Rejected(located, f"{type(record).__name__} is not a record of {topic.value}")
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
    if not name or name.startswith(NO_IDENTIFIER) or not interaction.user_id:
        return f"interaction_id {name!r} or user_id {interaction.user_id!r} is not an identifier"
    if interaction.sampled_tokens < 0 or not -1 <= interaction.version_min <= interaction.version_max:
        versions = f"versions {interaction.version_min} to {interaction.version_max}"
        return f"{interaction.sampled_tokens} sampled tokens of {versions} are impossible"
    if not (math.isfinite(interaction.latency_ms) and interaction.latency_ms >= 0):
        return f"latency_ms {interaction.latency_ms} is not a duration"
    ahead_us = interaction.served_at - located.timestamp_ms * 1_000
    if interaction.served_at < 0 or ahead_us > clock_skew_us:
        return f"served_at {interaction.served_at} is {to_s(ahead_us):g} s after the time of its own record"
    return ""


def broken_feedback(key: bytes | None, feedback: Feedback) -> str:
    """Return why feedback cannot be joined; empty if it can."""
    if not feedback.event_id or not feedback.interaction_id or not feedback.user_id:
        return "event_id, interaction_id and user_id must not be empty"
    expected = feedback_key(feedback.interaction_id, feedback.event_id)
    if key != expected.encode():
        return f"the key {key!r} is not interaction_id/event_id, {expected!r}"
    if feedback.observed_at < 0:
        return f"observed_at {feedback.observed_at} is before 1970"
    if feedback.corrects == feedback.event_id:
        return f"event {feedback.event_id!r} corrects itself"
    if feedback.value is None:
        return (
            "" if feedback.corrects else "without a value, a signal must name in `corrects` the event that it withdraws"
        )
    return signals.check(feedback.kind, feedback.value)
