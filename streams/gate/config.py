"""Settings of the gate."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from tidemill.schemas.config import Section
from tidemill.streams.gate.guardrails import GUARDRAILS


class OnAlert(StrEnum):
    """What becomes of a candidate that sets off an alert: the verdict of the same name."""

    REJECT = "reject"
    HOLD = "hold"
    """Its traffic ends, and nothing more is decided until a person releases the branch."""


class GateSettings(Section):
    """Which versions reach users, and on what evidence. Times are event time; rewards as the reward map gives them."""

    name: str = Field(default="gate", min_length=1)
    """Name of the gate in its decisions."""

    reward_low: float = -1.0
    """Least reward that the map gives. A lower one counts as this."""

    reward_high: float = 1.0
    """Greatest reward that the map gives."""

    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Chance of a wrong verdict by evidence, in each direction, however often the evidence is looked at."""

    margin: float = Field(default=0.1, ge=0)
    """A candidate whose mean reward is lower by no more than this is not worse."""

    share: float = Field(default=0.2, gt=0, lt=1)
    """Part of the users that the canary pool serves while a candidate is compared."""

    outcomes_per_user: int = Field(default=8, ge=1)
    """Outcomes of one user that count in one comparison. He counts once, by their mean."""

    user_window_s: float = Field(default=600.0, gt=0)
    """A user with fewer outcomes counts so long after their first."""

    min_users: int = Field(default=20, ge=1)
    """Users with a reward that each arm needs before a candidate is promoted."""

    max_interactions: int = Field(default=20_000, ge=1)
    """Outcomes of the candidate after which the comparison ends for want of evidence."""

    max_seconds: float = Field(default=6 * 3600.0, gt=0)
    """Length of the comparison after which it ends for want of evidence, once `min_users` are there."""

    promote_without_evidence: bool = False
    """Promote a candidate whose comparison ended without evidence of harm. Else it is held for a person."""

    bench_rollouts: int = Field(default=64, ge=1)
    """Held-out rollouts of one version that make its bench result."""

    bench_margin: float = Field(default=0.1, ge=0, le=1)
    """A candidate's success on held-out tasks may be lower than the promoted version's by so much."""

    bench_alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Chance that a candidate which keeps to `bench_margin` fails by it; also that of a wrong admission."""

    bench_seconds: float = Field(default=1800.0, gt=0)
    """A candidate whose bench result is not there by then is passed over as soon as there is a newer one."""

    floor: float = Field(default=0.0, ge=0, le=1)
    """Success on held-out tasks below which a version is not tried on users; and the success that the lower bound of
    one version's result must reach before it and its descendants may learn from users."""

    watch_seconds: float = Field(default=3600.0, ge=0)
    """How long a promoted version is compared with what its predecessor did, ready to be rolled back. 0: not at all."""

    watch_margin: float = Field(default=0.2, gt=0)
    """How far its mean reward may fall below its predecessor's then. Greater than `margin`: times differ as well."""

    guard_alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Chance of any alert in one comparison where every measure keeps to its tolerance."""

    rate_tolerance: float = Field(default=0.1, gt=0, lt=1)
    """How far a rate (edits, questions, tool errors, each reason of exclusion) may be from the baseline's."""

    ratio_tolerance: float = Field(default=1.5, gt=1, lt=8)
    """Factor by which length and latency may differ from the baseline's."""

    drift_rate_tolerance: float = Field(default=0.25, gt=0, lt=1)
    """As `rate_tolerance`, against what the first baseline did: many small steps go a long way."""

    drift_ratio_tolerance: float = Field(default=3.0, gt=1, lt=8)
    """As `ratio_tolerance`, against what the first baseline did."""

    on_alert: OnAlert = OnAlert.REJECT
    """The treatment of a candidate that differs from the baseline by more than a tolerance."""

    on_drift: OnAlert = OnAlert.HOLD
    """The treatment of a candidate that differs from the first baseline by more than a tolerance. A release accepts the
    change: the next comparison's baseline is then the first one."""

    ignored: frozenset[str] = frozenset()
    """Measures without an alert: edit_rate, question_rate, tool_error_rate, tokens, latency_ms, excluded/REASON."""

    settle_s: float = Field(default=2.0, ge=0)
    """How long after a decision the next candidate waits, so that no user's request is under way to the canary pool
    when it takes a version that the bench has not seen."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.reward_high <= self.reward_low:
            raise ValueError(f"reward_high {self.reward_high:g} must be above reward_low {self.reward_low:g}")
        widest = self.reward_width
        for key, value in (("margin", self.margin), ("watch_margin", self.watch_margin)):
            if value >= widest:
                raise ValueError(f"{key} {value:g} must be below reward_high - reward_low, which is {widest:g}")
        unknown = self.ignored - {guardrail.name for guardrail in GUARDRAILS}
        if unknown:
            known = ", ".join(guardrail.name for guardrail in GUARDRAILS)
            raise ValueError(f"ignored: {', '.join(sorted(unknown))} is no measure; these are: {known}")
        return self

    @property
    def reward_width(self) -> float:
        """Greatest reward minus least."""
        return self.reward_high - self.reward_low
