"""Settings of online batches: which interactions are trained on, when a batch closes, and what is dropped."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tidemill.schemas.config import Section

DAY_S = 86_400.0
MOST_MEMBERS = 4_096
"""References of this many members fit into one record."""


class BatchSettings(Section):
    """Settings of online batches: rewarded interactions of one serving version each. All times are event time."""

    application: str = Field(default="online-batches", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the processor. Topic prefix, name and run form the names of the consumer group and the state topic:
    with another name, the processor starts from an empty state at the beginning of the log."""

    max_tokens: int = Field(default=16_384, ge=1)
    """A batch closes when its members have this many sampled tokens."""

    max_wait_s: float = Field(default=20.0, gt=0)
    """A batch closes this long after its first outcome if it has `min_members`; otherwise as soon as it has them."""

    min_members: int = Field(default=8, ge=1, le=MOST_MEMBERS)
    """Fewest members of a batch: a step on too few is mostly noise."""

    max_members: int = Field(default=MOST_MEMBERS, ge=1, le=MOST_MEMBERS)
    """Most members of a batch; it then closes as a batch with `max_tokens` does."""

    arms: list[str] = Field(default_factory=list)
    """Arms that are trained on; outcomes of others are counted as `other_arm`. Empty: all."""

    leftovers: Literal["drop", "keep"] = "drop"
    """The treatment of rewarded interactions of a version that is not the one served now, which is the newest version
    in `arms`. drop: they are dropped and counted as `old_version`. keep: they wait in a batch of their own version,
    which closes by time; the trainer weights them by importance. While a canary is on trial in one of the arms, "drop"
    trains only on the canary's share of the traffic."""

    version_idle_s: float = Field(default=60.0, gt=0)
    """A version counts as no longer served if only other versions were served for this long: after a roll-back, the
    version served now is an older one."""

    max_share_per_user: float = Field(default=0.5, gt=0, le=1)
    """Largest share of one user in the members of a batch, and in `max_tokens`; one member is always allowed.
    Interactions above it are counted as `user_cap`."""

    corrections: Literal["count", "next_batch"] = "count"
    """The treatment of a reward that changed after its interaction was in a batch. count: it is in no batch, and
    counted as `correction`. next_batch: the next batch has a member whose reward is the change of the reward."""

    done_ttl_s: float = Field(default=3 * DAY_S, gt=0)
    """How long an outcome is remembered, so that a repeated record has no effect and a correction finds its outcome;
    also how long after an erasure a user's earlier interactions are dropped."""

    @model_validator(mode="after")
    def _can_close(self) -> Self:
        if self.min_members > self.max_members:
            raise ValueError(f"min_members {self.min_members} is above max_members {self.max_members}")
        return self
