"""Settings that every role shares: where the log is, where large bytes lie, and which run this is."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator

CLAIM_CHECK_BYTES = 900_000
"""Payloads above this go to the object store; Kafka's own default limit on a record batch is 1,048,588 bytes."""


class Section(BaseModel):
    """Base of every settings section: unknown keys are refused, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class KafkaSettings(Section):
    """How to reach the log."""

    bootstrap: str = ""
    """Addresses of Kafka brokers, host:port separated by commas. Empty: the local stack, where there is one."""

    topic_prefix: str = "tidemill."
    """Put before every topic name, so that a replay writes beside the live topics and never into them."""

    registry_url: str | None = None
    """Address of a Confluent-compatible schema registry. None: single-object encoding, schemas from the package."""

    replication_factor: int = Field(default=1, ge=1)
    """Replicas of each topic created by `tidemill topics`; 3 in production."""

    partitions: int | None = Field(default=None, ge=1)
    """Overrides the partition count of the keyed topics in the catalogue. Fixed for the life of a topic."""

    stall_timeout_s: float = Field(default=120.0, ge=0)
    """How long a role may stand still: a partition whose records are not delivered, a log that does not answer (told,
    and waited for), a main loop that does not come round (the process dumps its stacks and exits with status 70, for
    its supervisor to start it again). Waiting for what is not there yet never counts. 0: for ever."""

    read_ahead_bytes: int = Field(default=64 * 2**20, ge=2**21)
    """Bytes that one consumer holds ahead of their use, whatever waits in the log."""

    write_ahead_bytes: int = Field(default=64 * 2**20, ge=2**21)
    """Bytes that one producer holds until the log acknowledges them; whoever writes more waits."""

    client_options: dict[str, str] = Field(default_factory=dict)
    """Further librdkafka settings for every client, for instance `security.protocol` and `sasl.*`."""

    @field_validator("topic_prefix")
    @classmethod
    def _legal_prefix(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9._-]*", value):
            raise ValueError(f"topic_prefix {value!r}: Kafka allows only letters, digits, '.', '_' and '-'")
        return value

    def address(self) -> str:
        """The bootstrap address; ValueError when none is configured."""
        if not self.bootstrap:
            raise ValueError(
                "no Kafka address: give --bootstrap HOST:PORT, set TIDEMILL_KAFKA__BOOTSTRAP, or start the local "
                "stack with `tidemill stack up`"
            )
        return self.bootstrap


class StoreSettings(Section):
    """Where large bytes lie: anchors, checkpoints and claimed payloads."""

    root: str = "data/store"
    """A directory or any fsspec URL (s3://bucket/path, gs://bucket/path)."""


class RunSettings(Section):
    """Which training run this is."""

    run_id: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the run. Records of other runs in the same topics are left alone."""

    branch: str = Field(default="main", pattern=r"^[A-Za-z0-9._-]+$")
    """Branch of the weight chain."""

    seed: int = Field(default=0, ge=0)
    """Root of all randomness of the run."""

    groups_per_step: int = Field(default=8, ge=1)
    """Groups that one optimizer step trains on. The feeder's admission and the trainer's batches share it."""

    max_policy_lag: int = Field(default=4, ge=0)
    """Most versions that a trained token may be behind the trainer: admission keeps to it, and the trainer excludes
    what passes it all the same."""

    max_steps: int = Field(default=60, ge=0)
    """Optimizer steps of the run. 0: evaluation only."""

    min_completed: int = Field(default=2, ge=1)
    """A group with fewer completed rollouts is not trained."""

    skip_no_signal: bool = True
    """Leave out groups whose completed rollouts all have the same reward: they have no gradient."""
