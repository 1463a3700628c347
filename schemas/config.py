"""Settings that every role shares: where the log is, where large bytes lie, and which run this is."""

from __future__ import annotations

import datetime
import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

CLAIM_CHECK_BYTES = 900_000
"""Payloads above this go to the object store; Kafka's own default limit on a record batch is 1,048,588 bytes."""

HELD_OUT_ONE_IN = 8
"""Default of `run.held_out_one_in`."""


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
    """Bytes that one consumer holds ahead of their use, at most."""

    write_ahead_bytes: int = Field(default=64 * 2**20, ge=2**21)
    """Bytes that one producer holds until the log acknowledges them; a caller that writes more waits."""

    client_options: dict[str, str] = Field(default_factory=dict, repr=False)
    """Further librdkafka settings for every client, for instance `security.protocol`, `ssl.ca.location` and `sasl.*`.
    Stream workers follow those of TLS and SASL. A password is best given in the environment, which adds it to the rest:
    TIDEMILL_KAFKA__CLIENT_OPTIONS='{"sasl.password": "..."}'."""

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


class HttpSettings(Section):
    """Limits of an HTTP server on its clients' connections."""

    max_connections: int = Field(default=1024, ge=1)
    """Connections at a time; fewer where the process may not open so many files. For one more, the one that has waited
    longest for its client is closed; where none waits, the newcomer is answered 503."""

    max_client_connections: int = Field(default=512, ge=1)
    """Connections of one client address (IPv6: of one /64 network) at a time, in the same way. Behind a proxy every
    client has the proxy's address: let it be `max_connections` there."""

    header_timeout_s: float = Field(default=10.0, gt=0)
    """Longest time from the first byte of a request, and from the beginning of a connection, to the end of a header."""

    body_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time that the body of a request takes to arrive."""

    idle_timeout_s: int = Field(default=75, ge=1)
    """How long a connection is kept for a further request, in seconds."""

    unread_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time in which a client takes nothing of an answer that waits for it. A stream may be silent for longer:
    then nothing waits."""

    max_header_bytes: int = Field(default=65_536, ge=1024)
    """Bytes of a request beside its body, to within one read of the socket; a longer one is answered 431."""


class StoreSettings(Section):
    """Where large bytes lie: anchors, checkpoints and claimed payloads."""

    root: str = "data/store"
    """A directory or any fsspec URL (s3://bucket/path, gs://bucket/path)."""


class EnvironmentEntry(Section):
    """One environment of a run."""

    name: str
    """An installed environment (`tidemill env list`), or `package.module:object`."""

    label: str = ""
    """Name in the records of the run. Empty: `name`. Two entries of one environment need two labels."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the tasks, beside the weights of the other entries."""

    group_size: int | None = Field(default=None, ge=1, le=1024)
    """Rollouts in a training group. None: `feed.group_size`."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Options by name (`tidemill env show NAME`)."""

    isolation: Literal["", "loop", "process"] = ""
    """Where it runs: in the worker's event loop, or in a process of its own. Empty: as the environment declares."""

    network: bool | None = None
    """Whether its process may open sockets. None: as the environment declares."""

    agent: list[str] = Field(default=[])
    """Command of an agent program that plays the tasks in place of the environment's own conversation. It finds the
    model at OPENAI_BASE_URL with the key OPENAI_API_KEY, and its task on standard input."""

    evaluate: bool = True
    """Whether evaluations use its held-out questions. False: the entry is used only for training."""

    @property
    def title(self) -> str:
        """The name in records."""
        return self.label or self.name


class RunSettings(Section):
    """Which training run this is."""

    run_id: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the run. Records of other runs in the same topics are left alone."""

    branch: str = Field(default="main", pattern=r"^[A-Za-z0-9._-]+$")
    """Branch of the weight chain."""

    seed: int = Field(default=0, ge=0)
    """Root of all randomness of the run."""

    environments: list[EnvironmentEntry] = Field(default=[EnvironmentEntry(name="ledger")], min_length=1)
    """The environments that the policy practises. The feeder and the rollout workers need the same list."""

    held_out_one_in: int = Field(default=HELD_OUT_ONE_IN, ge=2)
    """Hold out one question in this many; a hash of its text decides which. With few questions, hold out a greater
    share (a smaller number), so that the evaluation represents all of them. Use one value for all runs of a model."""

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

    @model_validator(mode="after")
    def _one_label_each(self) -> Self:
        titles = [entry.title for entry in self.environments]
        twice = sorted({title for title in titles if titles.count(title) > 1})
        if twice:
            raise ValueError(f"two environments are named {twice[0]!r}: give each entry a different label")
        if not any(entry.evaluate for entry in self.environments):
            raise ValueError("no environment is evaluated: remove `evaluate = false` from at least one entry")
        return self


class ChatSettings(Section):
    """How conversations become tokens. Every role of a run needs the same."""

    template: str = ""
    """File (or fsspec URL) of a Jinja chat template to use in place of the checkpoint's own; "chatml" is built in.
    Empty: the checkpoint's."""

    date: datetime.date = datetime.date(2026, 1, 1)
    """The day that a template prints as today. Fixed for a run: rollouts of one group must read the same prompt."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the template, for instance `enable_thinking = false`."""

    tools_in_system: bool = False
    """Explain tools in the system message, also to a model whose template shows tools."""
