"""Settings of the stream processors."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from tidemill.schemas.config import Section

HOUR_S = 3600.0


class ProcessorName(StrEnum):
    """Which stream processor a worker runs."""

    ASSEMBLY = "assembly"
    JOIN = "join"
    BATCHES = "batches"


class RunnerName(StrEnum):
    """How a stream worker reads and writes the log."""

    FAUST = "faust"
    """At least once: after a kill some outputs are there twice, with the same bytes."""
    TRANSACTIONAL = "transactional"
    """Outputs, dead letters, state and offsets in one transaction: once, for readers of what is committed."""


class StreamSettings(Section):
    """How a stream worker runs, whichever its processor; and group assembly: when groups close, what is remembered.

    The partition count is the topic catalogue's (`kafka.partitions` overrides it), never set here.
    """

    runner: RunnerName = RunnerName.FAUST
    """The runner of all stream workers of a run; one that began with `transactional` stays with it."""

    application: str = Field(default="group-assembly", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of group assembly. With the topic prefix and the run it makes the consumer group and the name of the state
    topic: change it and the processor starts from an empty state at the beginning of the log."""

    done_ttl_s: float = Field(default=6 * HOUR_S, gt=0)
    """How long, in event time, a closed group is remembered, so that a rollout that comes again is not a new group.
    Longer than the longest time between two deliveries of one task, and than the longest replay into a live topic."""

    min_completed: int = Field(default=1, ge=1)
    """A group with fewer completed rollouts has no mean reward and no advantages."""

    shuffle_rewards: bool = False
    """Control run: permute the rewards of a group's completed rollouts, seeded by the group's id."""

    tick_interval_s: float = Field(default=1.0, gt=0)
    """How often to look for what fell due while a partition was idle. Each such partition gets one tick record, which
    advances its clock."""

    max_batch: int = Field(default=500, ge=1)
    """Faust: most records decided before what follows from them is written. A batch never waits for more to come."""

    transaction_records: int = Field(default=10_000, ge=1)
    """Transactional runner: most records of one transaction."""

    transaction_s: float = Field(default=0.05, gt=0)
    """Transactional runner: how long a transaction takes records in before it is committed. What it holds is seen by
    readers then; each costs the log some milliseconds of work."""

    fetch_wait_ms: int = Field(default=100, ge=0)
    """Longest time that a fetch waits for records. Faust has one fetch in flight a broker, so that a record of a
    partition outside that fetch waits this long."""

    commit_interval_s: float = Field(default=1.0, gt=0)
    """Faust: how often offsets are committed. They serve lag monitors; after a restart the state topic says where to
    go on. Transactional runner: how much longer a transaction takes records in while more wait to be read."""

    session_timeout_s: float = Field(default=10.0, gt=0)
    """After this long without a heartbeat the partitions of a dead worker go to the others."""

    heartbeat_interval_s: float = Field(default=3.0, gt=0)
    """Time between heartbeats; a third of the session at most."""

    instance: str = ""
    """Stable name of this worker among its peers (static membership): a restart within the session keeps its
    partitions. Empty: a new member at each start."""

    accept_gaps: bool = False
    """Read on where the log deleted records before this worker had read them; the loss is logged and counted. Else the
    worker ends and says what is missing."""

    buffer_records: int = Field(default=1000, ge=1)
    """Faust: records that wait in memory to be decided, of all partitions together; reading pauses while there are
    more. The transactional runner reads ahead as far as `kafka.read_ahead_bytes`."""

    stall_timeout_s: float = Field(default=60.0, ge=0)
    """The worker exits with an error when records wait and none was processed for this long, so that its supervisor
    starts a fresh one. 0: never."""

    data_dir: str = "data/streams"
    """Scratch directory of Faust. It holds nothing that is needed again."""

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
