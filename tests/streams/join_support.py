"""Interactions, feedback and users' requests for the tests of the join and of online batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.records import build
from tidemill.schemas.catalogue import Topic, feedback_key, tick_key, user_request_key
from tidemill.schemas.codec import Codec
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import Feedback, Interaction, Outcome, Record, SignalKind, Tick, UserRequest, UserWish
from tidemill.streams.join.config import JoinSettings, RewardMap, SignalRule
from tidemill.streams.join.feedback_join import INPUTS, FeedbackJoin
from tidemill.streams.machine import Output
from tidemill.streams.state import MachineState

RUN_ID = "run"
CODEC = Codec()
SECOND_US = 1_000_000

RULES = {
    SignalKind.THUMB: SignalRule(horizon_s=10, weight=1.0),
    SignalKind.RETRY: SignalRule(horizon_s=20, weight=-0.5),
    SignalKind.TOOL_ERROR: SignalRule(horizon_s=10, weight=-1.0),
    SignalKind.EDIT_MADE: SignalRule(horizon_s=10),
}


def settings_of(**changes: Any) -> JoinSettings:
    """Return settings in seconds: horizons of 10 and 20 s, 5 s of grace, and an end 1 s after a thumb."""
    fields: dict[str, Any] = {
        "map": RewardMap(name="test", rules=RULES),
        "grace_s": 5,
        "settle_s": 1,
        "early_wait_s": 8,
        "late_s": 30,
        "clock_skew_s": 2,
        "done_ttl_s": 1_000,
        "bot_max_events": 1_000,
        "bot_window_s": 10,
        "max_signals": 20,
    }
    return JoinSettings(**{**fields, **changes})


SERVED = build(
    Interaction, run_id=RUN_ID, session_id="s", propensity=0.9, prompt_tokens=3, sampled_tokens=7, version_min=3,
    version_max=3, first_token_ms=1.0, latency_ms=10.0, served_at=100 * SECOND_US,
)  # fmt: skip
THUMB = build(Feedback, kind=SignalKind.THUMB, value=1.0, observed_at=101 * SECOND_US, source="sdk")


def interaction(name: str, **changes: Any) -> Interaction:
    """Return an answer to user `u` with 7 tokens of version 3, served at 100 s."""
    return replace(SERVED, interaction_id=name, **changes)


def feedback(name: str, event: str, **changes: Any) -> Feedback:
    """Return a thumb up of user `u` about an interaction, observed at 101 s."""
    return replace(THUMB, interaction_id=name, event_id=event, **changes)


def request(wish: UserWish, at_s: float, user_id: str = "u", request_id: str = "") -> UserRequest:
    """Return a user request."""
    return UserRequest(request_id or f"{user_id}-{wish}-{at_s:g}", user_id, wish, "him", round(at_s * SECOND_US))


def located(topic: Topic, record: Record | None, offset: int, at_s: float, **changes: Any) -> ConsumedRecord:
    """Return a record in partition 0 of a topic, with its encoded bytes; without a record, an unreadable value."""
    fields: dict[str, Any] = {
        "topic": topic,
        "partition": 0,
        "offset": offset,
        "timestamp_ms": round(at_s * 1000),
        "key": _key(record),
        "value": CODEC.encode(record) if record else b"junk",
        "record": record,
        "error": "" if record else "cannot be read",
    }
    return ConsumedRecord(**{**fields, **changes})


def _key(record: Record | None) -> bytes:
    match record:
        case Feedback():
            return feedback_key(record.interaction_id, record.event_id).encode()
        case Interaction() | Outcome():
            return record.interaction_id.encode()
        case UserRequest():
            return user_request_key(record.user_id, 0).encode()
        case _:
            return tick_key(0).encode()


class TwoLogs:
    """The logs of one partition, written in the order of their times."""

    def __init__(self) -> None:
        self.inputs: dict[Topic, list[ConsumedRecord]] = {topic: [] for topic in INPUTS}

    def write(self, at_s: float, record: Record | None, topic: Topic | None = None, **changes: Any) -> TwoLogs:
        """Append a record to its topic."""
        to = topic or (Topic.FEEDBACK if isinstance(record, Feedback) else Topic.INTERACTIONS)
        self.inputs[to].append(located(to, record, len(self.inputs[to]), at_s, **changes))
        return self

    def erase(self, at_s: float, topic: Topic, key: str) -> TwoLogs:
        return self.write(at_s, None, topic, key=key.encode(), value=None, error="no value")

    def tick(self, at_s: float) -> TwoLogs:
        """Append a tick to both topics."""
        for topic in INPUTS:
            self.write(at_s, Tick("test", round(at_s * SECOND_US)), topic)
        return self


def join_of(settings: JoinSettings, state: MachineState | None = None) -> FeedbackJoin:
    """Return a join of partition 0."""
    return FeedbackJoin(0, RUN_ID, settings, state)


def played(logs: TwoLogs, **changes: Any) -> tuple[FeedbackJoin, list[Output]]:
    """Run a join without kills over one topic after the other. Returns the join and its outputs."""
    join = join_of(settings_of(**changes))
    return join, [output for records in logs.inputs.values() for record in records for output in join.observe(record)]
