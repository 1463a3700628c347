"""Settings of the feedback join: the weights of signals, how long the join waits for them, and exclusions."""

from __future__ import annotations

from functools import cached_property
from typing import Literal, Self

from pydantic import Field, model_validator

from tidemill.schemas.config import Section
from tidemill.schemas.records import SignalKind
from tidemill.streams.config import DAY_S, HOUR_S, Application

MINUTE_S = 60.0


class SignalRule(Section):
    """Weight and horizon of one kind of signal."""

    horizon_s: float = Field(gt=0)
    """A signal counts if it was observed at most this long after the answer was served."""

    weight: float = 0.0
    """Factor for the converted value. 0: the signal is recorded, but is not part of the reward."""

    reading: Literal["linear", "clipped", "threshold"] = "linear"
    """The conversion of the value into the number that is weighted. linear: the value itself. clipped: the value,
    clipped to `low` and `high`. threshold: `high` at or above `threshold`, `low` below it."""

    threshold: float = 0.5
    """For `reading = "threshold"`: the lowest value that gives `high`."""

    low: float = -1.0
    """Least result of a clipped or a threshold reading."""

    high: float = 1.0
    """Greatest result of a clipped or a threshold reading."""

    alone: bool = True
    """Whether this kind alone is enough for a reward. A signal that arrives for every answer, such as latency, is not:
    it would give a reward to every interaction without an opinion of the user."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        return self


class TargetRate(Section):
    """Reward of an answer by its acceptance: accepted 1-rate, rejected -rate, not shown 0.

    To show an answer then pays if it is accepted more often than `rate`. Cursor's Tab uses 0.25: 0.75, -0.25, 0.
    """

    rate: float = Field(default=0.25, gt=0, lt=1)
    """The acceptance rate at which showing and not showing have the same expected reward."""

    accepted_by: SignalKind = SignalKind.EDIT_KEPT_SOON
    """The signal that shows whether the user accepted."""

    accepted_from: float = 0.5
    """Lowest value of `accepted_by` that is an acceptance; a lower one is a rejection."""

    shown_by: SignalKind = SignalKind.EDIT_MADE
    """The signal that shows whether something was shown. 0: it was not. 1, without an `accepted_by` signal within its
    horizon: it was rejected."""


def default_rules() -> dict[SignalKind, SignalRule]:
    """Return the rules for a chat or coding product.

    A broken tool call has a negative weight, and is not excluded: otherwise the policy could break a call to avoid a
    likely failure. A question has one too: with this cost, acting pays from one success in five.
    """
    return {
        SignalKind.THUMB: SignalRule(horizon_s=HOUR_S, weight=1.0),
        SignalKind.EDIT_KEPT_SOON: SignalRule(horizon_s=HOUR_S, weight=0.25, reading="threshold"),
        SignalKind.EDIT_KEPT_LATER: SignalRule(horizon_s=DAY_S, weight=0.5, reading="threshold"),
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
    """The conversion of signals into one reward: the weighted sum of the converted values, within bounds.

    Its version, the name and a hash of all these settings, is in every outcome. Thumbs alone make a poor reward: a
    model learns to please. They are allowed as the only weighted kind, with a warning from `notes`.
    """

    name: str = Field(default="default", pattern=r"^[A-Za-z0-9._]+$")
    """Name of the map, for people; the hash distinguishes two maps with the same name."""

    rules: dict[SignalKind, SignalRule] = Field(default_factory=default_rules)
    """The rule of each kind. A setting replaces the whole default table; a kind without a rule has weight 0 and the
    longest horizon of the others."""

    low: float = -1.0
    """Least reward."""

    high: float = 1.0
    """Greatest reward."""

    target_rate: TargetRate | None = None
    """Adds a term for acceptance at a target rate; the two kinds that it reads must then have no weight in `rules`."""

    no_signal: Literal["exclude"] | float = "exclude"
    """The result for an interaction without any signal that counts alone: it is excluded, or it has this reward."""

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
        """Whether a kind is part of the reward."""
        return kind in self.target_kinds or (kind in self.rules and self.rules[kind].weight != 0)

    def horizon_s(self, kind: SignalKind) -> float:
        """Return how long a signal of a kind counts, seconds after the answer was served."""
        if kind in self.rules:
            return self.rules[kind].horizon_s
        return max((rule.horizon_s for rule in self.rules.values()), default=DAY_S)

    @property
    def wait_s(self) -> float:
        """The longest horizon of the kinds that are part of the reward, seconds."""
        return max(self.horizon_s(kind) for kind in SignalKind if self.weighs(kind))

    def notes(self) -> list[str]:
        """Return warnings about settings that are allowed but probably not intended."""
        if [kind for kind in SignalKind if self.weighs(kind)] == [SignalKind.THUMB]:
            return [
                f"reward map {self.name!r}: thumbs are the only reward, and a model learns to please from them; give "
                "weight to what users do with answers (edit_kept_soon, retry, undo) as well"
            ]
        return []


class JoinSettings(Section):
    """Settings of the feedback join: which signals end an interaction, and how long it waits for the others.

    All times are event time, in the order of record timestamps.
    """

    application: Application = "feedback-join"
    """Name of the feedback join."""

    map: RewardMap = Field(default_factory=RewardMap)
    """The conversion of signals into a reward."""

    grace_s: float = Field(default=MINUTE_S, ge=0)
    """How long after the longest horizon an interaction still waits for delayed signals."""

    close_on: list[SignalKind] = Field(default_factory=lambda: [SignalKind.THUMB])
    """Kinds that are sufficient: after one of them, an interaction waits only for `settle_s`. A later signal is a
    correction. Empty: every interaction waits for every horizon."""

    settle_s: float = Field(default=2.0, ge=0)
    """How long an interaction still waits after a signal of `close_on`, so that a quick change needs no correction."""

    early_wait_s: float = Field(default=10 * MINUTE_S, gt=0)
    """How long feedback waits for an interaction that is not known yet, before it is rejected."""

    late_s: float = Field(default=HOUR_S, gt=0)
    """An interaction whose record arrives more than this long after it was served is excluded as `too_late`."""

    clock_skew_s: float = Field(default=MINUTE_S, ge=0)
    """Greatest difference of the clocks of users' machines and of replicas from the log's clock."""

    done_ttl_s: float = Field(default=3 * DAY_S, gt=0)
    """How long an ended interaction is remembered: for corrections, and to detect a repeated record. Longer than the
    longest horizon, and than the longest replay into a live topic."""

    max_signals: int = Field(default=64, ge=1)
    """Most signals of one interaction; further signals are rejected."""

    bot_max_events: int = Field(default=300, ge=1)
    """A user with more interactions and signals than this within `bot_window_s` counts as a bot. Each partition counts
    separately; a user's interactions are spread evenly over the partitions."""

    bot_window_s: float = Field(default=MINUTE_S, gt=0)
    """Length of the window that opens with a user's first event. A bot's interactions that are open, or arrive within
    the same time afterwards, are excluded."""

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
