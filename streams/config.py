"""Settings of the stream workers, of group assembly, and of online batches."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tidemill.schemas.config import Section

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
Application = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
"""Name of a processor. Topic prefix, name and run form the names of the consumer group and the state topic: with
another name, the processor starts from an empty state at the beginning of the log."""
LONGEST_TRANSACTION_S = 10.0
"""How long a transaction may accept records: 15 s after its beginning the brokers abort it."""
MOST_MEMBERS = 4_096
"""References of this many members fit into one record."""


class ProcessorName(StrEnum):
    """The stream processor that a worker runs."""

    ASSEMBLY = "assembly"
    JOIN = "join"
    BATCHES = "batches"


class RunnerName(StrEnum):
    """The runner with which a stream worker reads and writes the log."""

    FAUST = "faust"
    """At least once: after a kill, some outputs are in the log twice, with the same bytes."""
    TRANSACTIONAL = "transactional"
    """Outputs, dead letters, state and offsets in one transaction: exactly once for readers of committed records."""


class StreamSettings(Section):
    """Settings of every stream worker, and of group assembly: when groups close and how long they are remembered.

    The partition count comes from the topic catalogue (`kafka.partitions` overrides it); it is not set here.
    """

    runner: RunnerName = RunnerName.FAUST
    """The runner of all stream workers of a run. A run that started with `transactional` must keep it."""

    application: Application = "group-assembly"
    """Name of group assembly."""

    done_ttl_s: float = Field(default=6 * HOUR_S, gt=0)
    """How long, in event time, a closed group is remembered, so that a repeated rollout does not open a new group.
    Longer than the longest time between two deliveries of one task, and than the longest replay into a live topic."""

    min_completed: int = Field(default=1, ge=1)
    """A group with fewer completed rollouts has no mean reward and no advantages."""

    shuffle_rewards: bool = False
    """Control run: permute the rewards of a group's completed rollouts; the group's id is the seed."""

    tick_interval_s: float = Field(default=1.0, gt=0)
    """Interval of the check for deadlines that passed in idle partitions. Each such partition gets one tick record,
    which advances its clock."""

    max_batch: int = Field(default=500, ge=1)
    """Faust: most records that are decided before their outputs are written. A batch never waits for more records."""

    transaction_records: int = Field(default=10_000, ge=1)
    """Transactional runner: most records of one transaction."""

    transaction_s: float = Field(default=0.05, gt=0)
    """Transactional runner: how long a transaction accepts records before it is committed. Readers see its outputs
    after the commit; each transaction costs the brokers some milliseconds of work."""

    fetch_wait_ms: int = Field(default=100, ge=0)
    """Longest time that a fetch waits for records. Faust has one fetch in flight for each broker, so a record of a
    partition that is not in this fetch waits up to this long."""

    commit_interval_s: float = Field(default=1.0, gt=0)
    """Faust: interval of offset commits. They serve lag monitors; after a restart, the state topic gives the positions.
    Transactional runner: how much longer a transaction accepts records while more records wait to be read."""

    session_timeout_s: float = Field(default=10.0, gt=0)
    """After this long without a heartbeat, a worker counts as dead and its partitions are assigned to the others."""

    heartbeat_interval_s: float = Field(default=3.0, gt=0)
    """Time between heartbeats; at most a third of the session timeout."""

    instance: str = ""
    """Stable name of this worker in its group (static membership): a restart within the session timeout keeps its
    partitions. Empty: a new member at each start. Each worker needs its own name: of two with the same one, the first
    ends with `transactional`; with Faust both continue, and write each output twice."""

    accept_gaps: bool = False
    """Continue if the log deleted records before this worker had read them; the loss is logged and counted. Otherwise
    the worker exits and names the missing records."""

    buffer_records: int = Field(default=1000, ge=1)
    """Faust: most records that wait in memory to be decided, over all partitions; reading pauses while there are more.
    The transactional runner reads ahead up to `kafka.read_ahead_bytes`."""

    stall_timeout_s: float = Field(default=60.0, ge=0)
    """The worker exits with an error if records wait and none was processed for this long, so that its supervisor
    starts a new one. 0: never."""

    data_dir: str = "data/streams"
    """Scratch directory of Faust. It contains nothing that a later start needs."""

    log_level: str = Field(default="WARNING", pattern=r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL)$")
    """Level of Faust's own log messages."""

    @model_validator(mode="after")
    def _heartbeats_fit(self) -> Self:
        if self.heartbeat_interval_s * 3 > self.session_timeout_s:
            raise ValueError(
                f"heartbeat_interval_s {self.heartbeat_interval_s:g} must be at most a third of session_timeout_s "
                f"{self.session_timeout_s:g}"
            )
        return self

    @model_validator(mode="after")
    def _transactions_end_in_time(self) -> Self:
        longest_s = self.transaction_s + self.commit_interval_s
        if self.runner is RunnerName.TRANSACTIONAL and longest_s > LONGEST_TRANSACTION_S:
            raise ValueError(
                f"transaction_s {self.transaction_s:g} and commit_interval_s {self.commit_interval_s:g} must be at "
                f"most {LONGEST_TRANSACTION_S:g} together: the brokers abort a longer transaction"
            )
        return self


class BatchSettings(Section):
    """Settings of online batches: rewarded interactions of one serving version each. All times are event time."""

    application: Application = "online-batches"
    """Name of the online batcher; the branch is added to it."""

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
