"""Settings of online batches: what is learned from, when a batch is full, and what becomes of the rest."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from tidemill.schemas.config import Section

DAY_S = 86_400.0
MOST_MEMBERS = 4_096
"""References of this many members fit into one record."""


class Leftovers(StrEnum):
    """The treatment of rewarded interactions of another version than the one served now."""

    DROP = "drop"
    """They are in no batch, and counted as `old_version`: the trainer learns from the version served now alone."""
    KEEP = "keep"
    """They wait in a batch of their own version, which time closes; the trainer weights them by importance."""


class Corrections(StrEnum):
    """The treatment of a reward that changed after its interaction was in a batch."""

    COUNT = "count"
    """It is in no batch, and counted as `correction`."""
    NEXT_BATCH = "next_batch"
    """The next batch has a member whose reward is what the reward changed by."""


class BatchSettings(Section):
    """Online batches: rewarded interactions of one serving version each. All times are event time."""

    application: str = Field(default="online-batches", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the processor. With the topic prefix and the run it makes the consumer group and the name of the state
    topic: change it and the processor starts from an empty state at the beginning of the log."""

    max_tokens: int = Field(default=16_384, ge=1)
    """A batch closes when its members have this many sampled tokens."""

    max_wait_s: float = Field(default=20.0, gt=0)
    """A batch closes this long after its first outcome, where it has `min_members`; else as soon as it has them."""

    min_members: int = Field(default=8, ge=1, le=MOST_MEMBERS)
    """No batch has fewer members: too few make a step of noise."""

    max_members: int = Field(default=MOST_MEMBERS, ge=1, le=MOST_MEMBERS)
    """No batch has more members; it closes as one with enough tokens does."""

    arms: list[str] = Field(default_factory=list)
    """Arms that are learned from; outcomes of others are counted as `other_arm`. Empty: all."""

    leftovers: Leftovers = Leftovers.DROP
    """The treatment of interactions of another version than the one served now, which is the newest of the arms that
    are learned from. While a canary is tried in one of them, "drop" learns from the canary's share of the traffic
    alone."""

    version_idle_s: float = Field(default=60.0, gt=0)
    """A version is no longer served when others were, and it was not, for this long: after a roll-back the version
    served now is an older one."""

    max_share_per_user: float = Field(default=0.5, gt=0, le=1)
    """Largest share of one user in the members of a batch, though one member is never too many; and in `max_tokens`.
    Interactions above it are counted as `user_cap`."""

    corrections: Corrections = Corrections.COUNT
    """The treatment of a reward that changed after its interaction was in a batch."""

    done_ttl_s: float = Field(default=3 * DAY_S, gt=0)
    """How long an outcome is remembered, so that the same record again is silent, and a correction finds what it
    corrects; and for how long after an erasure a user's earlier interactions are kept out."""

    @model_validator(mode="after")
    def _can_close(self) -> Self:
        if self.min_members > self.max_members:
            raise ValueError(f"min_members {self.min_members} is above max_members {self.max_members}")
        return self
