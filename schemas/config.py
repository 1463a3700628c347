"""Settings that all roles share: the log, the object store, HTTP limits, the run and its chat template."""

from __future__ import annotations

import datetime
import re
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

CLAIM_CHECK_BYTES = 900_000
"""Payloads above this size go to the object store. Kafka's default limit of a record batch is 1,048,588 bytes."""

HELD_OUT_ONE_IN = 8
"""Default of `run.held_out_one_in`."""


class Section(BaseModel):
    """Base class of all settings sections: unknown keys, NaN, infinities and booleans for numbers are errors; values
    do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)}:
            raise ValueError("a number is expected, not true or false")
        return value


class KafkaSettings(Section):
    """The connection to the log."""

    bootstrap: str = ""
    """Addresses of Kafka brokers, host:port separated by commas. Empty: the local stack, if there is one."""

    topic_prefix: str = "tidemill."
    """First part of every topic name. A replay has its own prefix, so that it never writes to the live topics."""

    registry_url: str | None = None
    """Address of a Confluent-compatible schema registry. None: single-object encoding, schemas from the package."""

    replication_factor: int = Field(default=1, ge=1)
    """Replicas of each topic created by `tidemill topics`; 3 in production."""

    partitions: int | None = Field(default=None, ge=1)
    """Overrides the partition count of the keyed topics in the catalogue. Fixed once a topic exists."""

    stall_timeout_s: float = Field(default=120.0, ge=0)
    """How long a role may make no progress, in seconds: records of a partition are not delivered; the log does not
    answer (logged, and the role keeps waiting); the main loop hangs (the process dumps its stacks and exits with status
    70, so that its supervisor restarts it). Waiting for data that does not exist yet does not count. 0: no limit."""

    read_ahead_bytes: int = Field(default=64 * 2**20, ge=2**21)
    """Maximum number of bytes that one consumer buffers before they are used."""

    write_ahead_bytes: int = Field(default=64 * 2**20, ge=2**21)
    """Maximum number of bytes that one producer buffers until the log acknowledges them; a further write waits."""

    client_options: dict[str, str] = Field(default_factory=dict, repr=False)
    """Further librdkafka settings for every client, for instance `security.protocol`, `ssl.ca.location` and `sasl.*`.
    Stream workers use those for TLS and SASL. Give a password in the environment; it is added to the other options:
    TIDEMILL_KAFKA__CLIENT_OPTIONS='{"sasl.password": "..."}'."""

    @field_validator("topic_prefix")
    @classmethod
    def _legal_prefix(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9._-]*", value):
            raise ValueError(f"topic_prefix {value!r}: Kafka allows only letters, digits, '.', '_' and '-'")
        return value

    def address(self) -> str:
        """Return the bootstrap address. Raises ValueError if none is configured."""
        if not self.bootstrap:
            raise ValueError(
                "no Kafka address: give --bootstrap HOST:PORT, set TIDEMILL_KAFKA__BOOTSTRAP, or start the local "
                "stack with `tidemill stack up`"
            )
        return self.bootstrap


class HttpSettings(Section):
    """Limits of an HTTP server on its clients' connections."""

    max_connections: int = Field(default=1024, ge=1)
    """Maximum number of open connections; fewer if the process may not open so many files. A new connection beyond it
    closes the one that has waited longest for its client. If none waits, the new one gets status 503."""

    max_client_connections: int = Field(default=512, ge=1)
    """The same limit for each client address (IPv6: for each /64 network). Behind a proxy all clients have the proxy's
    address: set it to `max_connections` there."""

    header_timeout_s: float = Field(default=10.0, gt=0)
    """Maximum time from the first byte of a request, or from the start of a connection, to the end of the header."""

    body_timeout_s: float = Field(default=30.0, gt=0)
    """Maximum time in which the body of a request must arrive, in seconds."""

    idle_timeout_s: int = Field(default=75, ge=1)
    """How long a connection is kept open for another request, in seconds."""

    unread_timeout_s: float = Field(default=60.0, gt=0)
    """Maximum time in which a client reads nothing of an answer that is ready to be sent. It does not limit the pauses
    of a stream, in which nothing is ready."""

    max_header_bytes: int = Field(default=65_536, ge=1024)
    """Maximum size of a request without its body, up to one read of the socket more. A larger one gets status 431."""


class StoreSettings(Section):
    """The object store for large payloads: anchors, checkpoints and claims."""

    root: str = "data/store"
    """Directory or fsspec URL (s3://bucket/path, gs://bucket/path)."""


class EnvironmentEntry(Section):
    """One environment of a run."""

    name: str
    """An installed environment (`tidemill env list`), or `package.module:object`."""

    label: str = ""
    """Name in the records of the run. Empty: `name`. Two entries with the same environment need different labels."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the tasks, relative to the weights of the other entries."""

    group_size: int | None = Field(default=None, ge=1, le=1024)
    """Rollouts in a training group. None: `feed.group_size`."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Options by name (`tidemill env show NAME`)."""

    isolation: Literal["", "loop", "process"] = ""
    """Place where it runs: the worker's event loop, or a separate process. Empty: as the environment declares."""

    network: bool | None = None
    """Whether its process may open sockets. None: as the environment declares."""

    agent: list[str] = Field(default=[])
    """Command of an agent program that plays the tasks instead of the environment's own conversation. It calls the
    model at OPENAI_BASE_URL with the key OPENAI_API_KEY, and reads its task from standard input."""

    evaluate: bool = True
    """Whether evaluations use its held-out questions. False: the entry is used only for training."""

    @property
    def title(self) -> str:
        """Name in records."""
        return self.label or self.name


class RunSettings(Section):
    """The training run."""

    run_id: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the run. Records of other runs in the same topics are ignored."""

    branch: str = Field(default="main", pattern=r"^[A-Za-z0-9._-]+$")
    """Branch of the weight log."""

    seed: int = Field(default=0, ge=0)
    """Seed of the tasks, of mid-training and of each step. Replicas draw tokens without it, so that two runs with one
    seed differ."""

    environments: list[EnvironmentEntry] = Field(default=[EnvironmentEntry(name="ledger")], min_length=1)
    """Environments that the policy is trained on. The feeder and the rollout workers need the same list."""

    held_out_one_in: int = Field(default=HELD_OUT_ONE_IN, ge=2)
    """One question in this many is held out; a hash of its text decides which. With few questions, hold out a greater
    share (a smaller number), so that the evaluation represents all of them. Use one value for all runs of a model."""

    groups_per_step: int = Field(default=8, ge=1)
    """Number of groups in one optimizer step. The feeder's admission control and the trainer's batches use it."""

    max_policy_lag: int = Field(default=4, ge=0)
    """Bound on policy lag, in versions. Admission control limits unfinished groups by it, and the trainer excludes
    groups that exceed it nevertheless."""

    max_steps: int = Field(default=60, ge=0)
    """Optimizer steps of the run. 0: evaluation only."""

    min_completed: int = Field(default=2, ge=1)
    """A group with fewer completed rollouts is not trained."""

    skip_no_signal: bool = True
    """Leave out groups whose completed rollouts all have the same reward: they have no gradient from rewards, except
    with the objective `reinforce`, which needs false."""

    @model_validator(mode="after")
    def _one_label_each(self) -> Self:
        titles = [entry.title for entry in self.environments]
        twice = sorted({title for title in titles if titles.count(title) > 1})
        if twice:
            raise ValueError(f"two environments are named {twice[0]!r}: give each entry a different label")
        if not any(entry.evaluate for entry in self.environments):
            raise ValueError("no environment is evaluated: remove `evaluate = false` from at least one entry")
        return self


CHATML = "chatml"
CHATML_TOKENS = ("<|im_start|>", "<tool_call>", "</tool_call>", "<|im_end|>")
"""Tokens of the built-in template; the last one ends a turn."""


class ChatSettings(Section):
    """The conversion of conversations into tokens. All roles of a run need the same settings."""

    template: str = ""
    """File (or fsspec URL) of a Jinja chat template that replaces the checkpoint's own; "chatml" is built in.
    Empty: the checkpoint's template."""

    date: datetime.date = datetime.date(2026, 1, 1)
    """Date that a template prints as today. Fixed for a run: all rollouts of a group must have the same prompt."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the template, for instance `enable_thinking = false`."""

    tools_in_system: bool = False
    """Whether to explain tools in the system message even if the model's template has a place for tools."""
