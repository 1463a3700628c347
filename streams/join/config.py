"""Settings of the feedback join: what signals are worth, how long they are waited for, and whom to leave out."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Literal, Self

from pydantic import Field, model_validator

from tidemill.schemas.config import Section
from tidemill.schemas.records import SignalKind

MINUTE_S = 60.0
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


class ValueReading(StrEnum):
    """How a signal's value becomes a number to be weighted."""

    LINEAR = "linear"
    """The value itself."""
    CLIPPED = "clipped"
    """The value, within `low` and `high`."""
    THRESHOLD = "threshold"
    """`high` at or above `threshold`, `low` below it."""


class SignalRule(Section):
    """The worth of one kind of signal, and its horizon."""

    horizon_s: float = Field(gt=0)
    """A signal counts when it was observed at most this long after the answer was served."""

    weight: float = Field(default=0.0, allow_inf_nan=False)
    """The factor for the value, as read. 0: seen and recorded, but no part of the reward."""

    reading: ValueReading = ValueReading.LINEAR
    """How the value is read."""

    threshold: float = 0.5
    """For `reading = "threshold"`: from which value on."""

    low: float = -1.0
    """Least number that a clipped or a threshold reading gives."""

    high: float = 1.0
    """Largest number that a clipped or a threshold reading gives."""

    alone: bool = True
    """Whether this kind is enough for a reward when nothing else is known. A report that comes with every answer, such
    as latency, is not: it would turn every silent interaction into a rewarded one."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        return self


class TargetRate(Section):
    """Reward of an answer that the user accepts or not: accepted 1-rate, rejected -rate, not shown 0.

    An answer is then worth showing when it is accepted more often than `rate`. Cursor's Tab uses 0.25: 0.75, -0.25, 0.
    """

    rate: float = Field(default=0.25, gt=0, lt=1)
    """The rate of acceptance at which showing and not showing are worth the same."""

    accepted_by: SignalKind = SignalKind.EDIT_KEPT_SOON
    """The signal that tells whether the user accepted."""

    accepted_from: float = 0.5
    """From which value of `accepted_by` on it is an acceptance; below, a rejection."""

    shown_by: SignalKind = SignalKind.EDIT_MADE
    """The signal that tells whether something was shown. 0: it was not. 1, and no word of `accepted_by` within its
    horizon: it was rejected."""


def default_rules() -> dict[SignalKind, SignalRule]:
    """The rules of a chat or coding product.

    A broken tool call is a negative like any other: a sample that was dropped instead would be a way to escape a likely
    failure. So is a question: at what it costs here, doing pays from one success in five.
    """
    return {
        SignalKind.THUMB: SignalRule(horizon_s=HOUR_S, weight=1.0),
        SignalKind.EDIT_KEPT_SOON: SignalRule(horizon_s=HOUR_S, weight=0.25, reading=ValueReading.THRESHOLD),
        SignalKind.EDIT_KEPT_LATER: SignalRule(horizon_s=DAY_S, weight=0.5, reading=ValueReading.THRESHOLD),
        SignalKind.RETRY: SignalRule(horizon_s=HOUR_S, weight=-0.5),
        SignalKind.UNDO: SignalRule(horizon_s=HOUR_S, weight=-0.5),
        SignalKind.ABANDONMENT: SignalRule(horizon_s=HOUR_S, weight=-0.25),
        SignalKind.SENTIMENT: SignalRule(horizon_s=HOUR_S, weight=0.25),
        SignalKind.LATENCY: SignalRule(horizon_s=HOUR_S, alone=False),
        SignalKind.TOOL_ERROR: SignalRule(horizon_s=HOUR_S, weight=-1.0),
        SignalKind.EDIT_MADE: SignalRule(horizon_s=HOUR_S),
        SignalKind.QUESTION_ASKED: SignalRule(horizon_s=HOUR_S, weight=-0.6),
    }


class RewardMap(Section):
    """How signals become one reward: the weighted sum of what was read, within bounds.

    Its version, a name and a hash of everything here, is in every outcome. Thumbs alone make a poor reward: a model
    learns to please. They are allowed as the only weighted kind, and `notes` says so.
    """

    name: str = Field(default="default", pattern=r"^[A-Za-z0-9._]+$")
    """Name of the map, for people; the hash tells two maps of one name apart."""

    rules: dict[SignalKind, SignalRule] = Field(default_factory=default_rules)
    """The rule of each kind. Replaces the default table as a whole; a kind without a rule has weight 0 and the longest
    horizon of the others."""

    low: float = Field(default=-1.0, allow_inf_nan=False)
    """Least reward."""

    high: float = Field(default=1.0, allow_inf_nan=False)
    """Largest reward."""

    target_rate: TargetRate | None = None
    """Adds a term for acceptance at a target rate; the two kinds that it reads then have no weight of their own."""

    no_signal: Literal["exclude"] | float = "exclude"
    """What an interaction is worth of which no signal tells anything: it is left out, or it has this reward."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        if self.no_signal != "exclude" and not self.low <= self.no_signal <= self.high:
            raise ValueError(f"no_signal {self.no_signal:g} is outside of the bounds {self.low:g} and {self.high:g}")
        twice = sorted(kind for kind in self.target_kinds if kind in self.rules and self.rules[kind].weight)
        if twice:
            raise ValueError(f"target_rate reads {', '.join(twice)}: set their weight to 0, or they count twice")
        if not any(self.weighs(kind) for kind in SignalKind):
            raise ValueError("no kind of signal has weight: give one a weight in `rules`, or set `target_rate`")
        return self

    @cached_property
    def target_kinds(self) -> frozenset[SignalKind]:
        """The kinds that the target rate reads."""
        target = self.target_rate
        return frozenset((target.accepted_by, target.shown_by)) if target else frozenset()

    def weighs(self, kind: SignalKind) -> bool:
        """Whether a kind has a part in the reward."""
        return kind in self.target_kinds or (kind in self.rules and self.rules[kind].weight != 0)

    def horizon_s(self, kind: SignalKind) -> float:
        """Until when a signal counts, seconds after the answer was served."""
        if kind in self.rules:
            return self.rules[kind].horizon_s
        return max((rule.horizon_s for rule in self.rules.values()), default=DAY_S)

    @property
    def wait_s(self) -> float:
        """The longest horizon of the kinds that have a part in the reward, seconds."""
        return max(self.horizon_s(kind) for kind in SignalKind if self.weighs(kind))

    def notes(self) -> list[str]:
        """Warnings about settings that are allowed and probably not intended."""
        if [kind for kind in SignalKind if self.weighs(kind)] == [SignalKind.THUMB]:
            return [
                f"reward map {self.name!r}: thumbs are the only reward, and a model learns to please from them; give "
                "weight to what users do with answers (edit_kept_soon, retry, undo) as well"
            ]
        return []


class JoinSettings(Section):
    """The feedback join: which signals end an interaction, and how long the rest is waited for.

    All times are event time, in the order of record timestamps.
    """

    application: str = Field(default="feedback-join", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the processor. With the topic prefix and the run it makes the consumer group and the name of the state
    topic: change it and the processor starts from an empty state at the beginning of the log."""

    map: RewardMap = Field(default_factory=RewardMap)
    """From signals to a reward."""

    grace_s: float = Field(default=MINUTE_S, ge=0)
    """How long after the longest horizon an interaction still waits for signals that are on their way."""

    close_on: list[SignalKind] = Field(default_factory=lambda: [SignalKind.THUMB])
    """Kinds that say enough: after one of them an interaction waits for `settle_s` only. What comes later is a
    correction. Empty: every interaction waits for every horizon."""

    settle_s: float = Field(default=2.0, ge=0)
    """How long an interaction waits on after a signal of `close_on`, so that a change of mind costs no correction."""

    early_wait_s: float = Field(default=10 * MINUTE_S, gt=0)
    """How long feedback waits for an interaction that is not known (yet), before it is rejected."""

    late_s: float = Field(default=HOUR_S, gt=0)
    """An interaction whose record comes this long after it was served is left out as `too_late`."""

    clock_skew_s: float = Field(default=MINUTE_S, ge=0)
    """How far the clocks of users' machines and of replicas may be apart from the log's."""

    done_ttl_s: float = Field(default=3 * DAY_S, gt=0)
    """How long an ended interaction is remembered: for corrections, and so that the same record again is no new one.
    Longer than the longest horizon, and than the longest replay into a live topic."""

    max_signals: int = Field(default=64, ge=1)
    """Most signals of one interaction; what comes on top is rejected."""

    bot_max_events: int = Field(default=300, ge=1)
    """More interactions and signals of one user than this within `bot_window_s` are a bot's. Counted in each partition
    by itself, over which a user's interactions are spread evenly."""

    bot_window_s: float = Field(default=MINUTE_S, gt=0)
    """Length of the window that opens with a user's first event. A bot's interactions that are open, or come within
    the next such time, are left out."""

    @model_validator(mode="after")
    def _remembers_long_enough(self) -> Self:
        longest = max(self.map.horizon_s(kind) for kind in SignalKind)
        if self.done_ttl_s < longest + self.grace_s:
            raise ValueError(
                f"done_ttl_s {self.done_ttl_s:g} must cover the longest horizon and the grace, {longest:g} + "
                f"{self.grace_s:g}: later signals would meet an interaction that is forgotten"
            )
        idle = sorted(kind for kind in self.close_on if not self.map.weighs(kind))
        if idle:
            raise ValueError(f"close_on names {', '.join(idle)}, which the map gives no weight: they decide nothing")
        return self
