"""Settings of the gate."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tidemill.schemas.config import Section
from tidemill.streams.gate.guardrails import GUARDRAILS

OnAlert = Literal["reject", "hold"]
"""The verdict for a candidate that causes an alert. hold: its traffic ends, and the gate takes no further decision
until a person releases the branch."""


class GateSettings(Section):
    """Settings of the gate: trials, evidence and alerts. Times are event time; rewards are those of the reward map."""

    name: str = Field(default="gate", min_length=1)
    """Name of the gate in its decisions."""

    reward_low: float = -1.0
    """Least reward of the map. A lower reward is clipped to it."""

    reward_high: float = 1.0
    """Greatest reward of the map. A greater reward is clipped to it."""

    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Probability of a wrong verdict by evidence, in each direction; it does not grow with the number of checks."""

    margin: float = Field(default=0.1, ge=0)
    """A candidate whose mean reward is lower by at most this is not worse."""

    share: float = Field(default=0.2, gt=0, lt=1)
    """Share of the users that the canary pool serves during a comparison."""

    outcomes_per_user: int = Field(default=8, ge=1)
    """Outcomes of one user that count in one comparison. A user counts once, by the mean of these outcomes."""

    user_window_s: float = Field(default=600.0, gt=0)
    """A user with fewer outcomes counts this long after their first outcome."""

    min_users: int = Field(default=20, ge=1)
    """Users with a reward that each arm needs before a candidate is promoted."""

    max_interactions: int = Field(default=20_000, ge=1)
    """Outcomes of the candidate after which the comparison ends without evidence."""

    max_seconds: float = Field(default=6 * 3600.0, gt=0)
    """Length of the comparison after which it ends without evidence, when both arms have `min_users`."""

    promote_without_evidence: bool = False
    """Promote a candidate whose comparison ended without evidence of harm. Otherwise it is held for a person."""

    bench_rollouts: int = Field(default=64, ge=1)
    """Number of held-out rollouts of one version for its bench result."""

    bench_margin: float = Field(default=0.1, ge=0, le=1)
    """A candidate's success on held-out tasks may be lower than the promoted version's by this much."""

    bench_alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Probability that a candidate within `bench_margin` is rejected by it; also that of a wrong admission."""

    bench_seconds: float = Field(default=1800.0, gt=0)
    """A candidate without a bench result after this time is skipped as soon as a newer version exists."""

    floor: float = Field(default=0.0, ge=0, le=1)
    """Success on held-out tasks below which a version is not tried on users. The lower bound of a version's result must
    also reach it before this version and its descendants may learn from users."""

    watch_seconds: float = Field(default=3600.0, ge=0)
    """How long a promoted version is compared with its predecessor's results, and can be rolled back. 0: not at all."""

    watch_margin: float = Field(default=0.2, gt=0)
    """How far its mean reward may then fall below its predecessor's. Greater than `margin`: the times differ too."""

    guard_alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Probability of any alert in one comparison in which every measure is within its tolerance."""

    rate_tolerance: float = Field(default=0.1, gt=0, lt=1)
    """Greatest allowed difference of a rate (edits, questions, tool errors, exclusions by reason) to the baseline's."""

    ratio_tolerance: float = Field(default=1.5, gt=1, lt=8)
    """Greatest allowed factor between length or latency and the baseline's."""

    drift_rate_tolerance: float = Field(default=0.25, gt=0, lt=1)
    """As `rate_tolerance`, against the first baseline's results: many small steps can add up."""

    drift_ratio_tolerance: float = Field(default=3.0, gt=1, lt=8)
    """As `ratio_tolerance`, against the first baseline's results."""

    on_alert: OnAlert = "reject"
    """The verdict for a candidate that differs from the baseline by more than a tolerance."""

    on_drift: OnAlert = "hold"
    """The verdict for a candidate that differs from the first baseline by more than a tolerance. A release accepts the
    change: the next comparison's baseline then becomes the first one."""

    ignored: frozenset[str] = frozenset()
    """Measures without an alert: edit_rate, question_rate, tool_error_rate, tokens, latency_ms, excluded/REASON."""

    settle_s: float = Field(default=2.0, ge=0)
    """How long after a decision the next candidate waits, so that no user's request is on its way to the canary pool
    when the pool loads a version that the bench has not measured."""

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
            raise ValueError(f"ignored: {', '.join(sorted(unknown))} is not a measure; the measures are: {known}")
        return self

    @property
    def reward_width(self) -> float:
        """Greatest reward minus least."""
        return self.reward_high - self.reward_low
