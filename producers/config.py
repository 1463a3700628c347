"""Settings of the task feeder, the rollout worker, the router and the feedback gateway."""

from __future__ import annotations

import hmac
import re
from enum import StrEnum
from typing import Annotated, ClassVar, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from tidemill.producers.product.settings import KeysMissing, key_hash
from tidemill.schemas.config import CLAIM_CHECK_BYTES, HttpSettings, Section

ReplicaAddress = Annotated[str, Field(pattern=r"^https?://")]
"""Base address of a replica, with the protocol."""


class FeedSettings(Section):
    """Settings of the task feeder: the tasks that it issues, and how many it may issue ahead of the trainer."""

    sync: bool = False
    """Issue one step's groups, then wait until that step's version is served: admission with a policy lag of 0."""

    group_size: int = Field(default=16, ge=1, le=1024)
    """Rollouts in a training group, if the environment's entry does not set another size."""

    epochs: int = Field(default=1, ge=0)
    """How often a training question may be asked in a run. 0: without limit."""

    solved_one_in: int = Field(default=1, ge=1)
    """If every rollout of a question's last group solved it, ask the question in only one of this many epochs; 1: in
    each. After n such groups in a row: in one of min(`solved_one_in` to the power of n, 16) epochs. A group with equal
    rewards gives no training signal, and its rollouts cost as much as others. Needs `epochs` 0 or above 1."""

    deadline_s: float = Field(default=120.0, gt=0)
    """Seconds of event time from the issue of a training task until its group closes with the rollouts received."""

    overdue_s: float = Field(default=60.0, ge=0)
    """Seconds after its deadline at which a group that never closed stops using capacity. Also the time without a
    step, while every outstanding group is closed, after which further tasks for one step may be issued."""

    replicas: int = Field(default=1, ge=1)
    """Replicas that must serve a version before the first task is issued."""

    replica_ids: list[str] = Field(default=[])
    """Names of the replicas that tasks are played on; only their versions count. Empty: all. With all, the feeder also
    waits for replicas of the stable pool, which serve users and get a version only when it is promoted."""

    replica_silence_s: float = Field(default=60.0, gt=0)
    """The feeder stops waiting for a replica that is behind this long after another one served the newest version."""

    eval_before: bool = True
    """Evaluate on held-out tasks before the first training task."""

    eval_after: bool = True
    """Evaluate on held-out tasks after the last version is served."""

    eval_tasks: int = Field(default=64, ge=1)
    """Held-out tasks of the evaluations before and after."""

    eval_every: int = Field(default=0, ge=0)
    """Versions between two evaluations during training. 0: none."""

    eval_during_tasks: int = Field(default=16, ge=1)
    """Held-out tasks of each evaluation during training: the first ones of the full set."""

    eval_group_size: int = Field(default=4, ge=1, le=1024)
    """Rollouts for each held-out task."""

    eval_deadline_s: float = Field(default=300.0, gt=0)
    """Seconds of event time from the issue of a held-out task until its group closes with the rollouts received."""

    stall_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a new record after which the feeder logs a warning that names the silent topic."""


class ReplicaRequests(Section):
    """Timeout and backoff of requests to replicas."""

    connect_timeout_s: float = Field(default=5.0, gt=0)
    """Longest time to connect to a replica."""

    backoff_s: float = Field(default=0.1, gt=0)
    """Seconds without requests to a replica after its first failure; doubled with each further failure."""

    backoff_limit_s: float = Field(default=5.0, gt=0)
    """Largest backoff of a failing replica, in seconds."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.backoff_limit_s < self.backoff_s:
            raise ValueError(f"backoff_limit_s ({self.backoff_limit_s:g}) is below backoff_s ({self.backoff_s:g})")
        return self


class RolloutSettings(ReplicaRequests):
    """Settings of a rollout worker."""

    replicas: list[ReplicaAddress] = Field(default=["http://127.0.0.1:8000"], min_length=1)
    """Base addresses of the replicas, http://host:port."""

    model: str | None = None
    """Model name to send with each request. None: the model that the replica serves."""

    tokenizer: str | None = None
    """Directory or fsspec URL of a checkpoint with tokenizer and chat template. None: the run's first anchor."""

    worker_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$", max_length=200)
    """Name of this worker in its records, and its static membership among the workers of the run: restarted under the
    same name, it gets its tasks back at once, without a rebalance. Each worker needs its own name: if two have the same
    name, the first exits with an error. None: host name and process id, without static membership; the tasks of a
    killed worker are then assigned again only after its session timeout (10 s)."""

    max_concurrent_episodes: int = Field(default=64, ge=1)
    """Episodes played at the same time."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; each rollout records it. A replica reports logprobs at temperature 1, so rollouts at
    another temperature cannot be trained exactly: the trainer excludes them, unless `trainer.accept_other_sampling` is
    set."""

    max_context_tokens: int = Field(default=1024, ge=2)
    """Longest context in tokens, sampled tokens included. An episode that reaches it ends and is scored."""

    max_turn_tokens: int = Field(default=512, ge=1)
    """Longest turn in tokens, if an agent does not ask for a shorter one."""

    max_group_size: int = Field(default=1024, ge=1)
    """Largest group that a task may ask for; a task with a larger one becomes a dead letter."""

    episode_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time for one episode; after it, or after the task's deadline, the rollout fails."""

    request_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time for one completion request; after it the request is retried."""

    expert_ids: bool = False
    """Request the expert ids of each token from the replicas (replica.expert_ids), and store them in the object store
    as part of the rollout, for trainer.routing. Cost: (layers x experts per token) bytes for each token of a rollout,
    in addition to 9 bytes per token for the rollout's own arrays."""

    claim_check_bytes: int = Field(default=CLAIM_CHECK_BYTES, ge=1)
    """A rollout record above this size has its segments in the object store."""

    record_turns: bool = True
    """Write each sampled turn to `rollouts.progress`, so that a worker that plays an interrupted task again continues
    from its turns. It costs further bytes on the log (8 per sampled token and 200 per turn, kept for 7 days) and about
    a fifth of the worker's processor time; without it, an interrupted episode starts from the beginning."""

    environment_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time without an answer from an environment in its own process; after it the process is killed, the
    rollout that hung fails, and the others start again."""

    environment_memory_mb: int = Field(default=4096, ge=256)
    """Limit on the writable memory of an environment's process, in MiB."""

    environment_file_mb: int = Field(default=64, ge=1)
    """Largest file that an environment's process may write, in MiB."""

    grace_s: float = Field(default=10.0, ge=0)
    """Seconds that running episodes get to finish on shutdown; the others are cancelled and redelivered."""


class EdgeSettings(Section):
    """Address and allowed clients of an HTTP server of the product's side."""

    model_config = ConfigDict(hide_input_in_errors=True)
    section: ClassVar[str]

    host: str = "127.0.0.1"
    """Address to listen at. The server uses plain HTTP: for other machines, put a proxy with TLS in front of it."""

    http: HttpSettings = HttpSettings()
    """Limits on clients' connections."""

    api_keys: dict[str, str] = Field(default_factory=dict)
    """The allowed clients: the name of each of the product's backends, and the SHA-256 of its key in hex. The gateway
    writes the name into each record as its source."""

    @field_validator("api_keys")
    @classmethod
    def _names_and_hashes(cls, keys: dict[str, str]) -> dict[str, str]:
        for name, digest in keys.items():
            if not re.fullmatch(r"[A-Za-z0-9._:@-]{1,64}", name):
                raise ValueError(f"the name {name!r}: 1 to 64 letters, digits, '.', '_', ':', '@' or '-' are allowed")
            if not re.fullmatch(r"[0-9a-f]{64}", digest):
                raise ValueError(f"{name}: not a SHA-256 in hex; {cls._how_to_make()}")
        if len(set(keys.values())) < len(keys):
            raise ValueError("two names have the same API key, so their requests cannot be told apart")
        return keys

    def require_clients(self) -> None:
        """Raise KeysMissing if there is no API key."""
        if not self.api_keys:
            raise KeysMissing(f"{self.section}.api_keys is empty, so no client could use it: {self._how_to_make()}")

    def client_of(self, key: str) -> str | None:
        """Return the name of an API key, or None if the key is unknown. Takes the same time for every key."""
        digest = key_hash(key)
        found = [name for name, known in self.api_keys.items() if hmac.compare_digest(known, digest)]
        return found[0] if found else None

    @classmethod
    def _how_to_make(cls) -> str:
        return (
            "make one with `KEY=$(openssl rand -hex 32)`, give KEY to the backend, and put its hash, "
            f'`printf %s "$KEY" | sha256sum`, into the configuration: api_keys = {{ shop = "HASH" }} in the table '
            f'[{cls.section}], or TIDEMILL_{cls.section.upper()}__API_KEYS=\'{{"shop": "HASH"}}\''
        )


class LogFailure(StrEnum):
    """The treatment of a request if the log does not acknowledge its answer."""

    REFUSE = "refuse"
    """Answer 503, and end a stream with an error: every served answer is recorded."""
    SERVE_UNRECORDED = "serve_unrecorded"
    """Serve it, count it, and return no interaction token at its end. The header of a stream has the token already:
    feedback with it has no interaction in the log."""


class OtherSampling(StrEnum):
    """The treatment of a request if its sampling parameters are not those that the trainer assumes."""

    REFUSE = "refuse"
    """Answer 400 and name them."""
    SERVE_UNTRAINED = "serve_untrained"
    """Serve it; the recorded answer names the parameters and has no sampled token, since its logprobs would not be
    those of the distribution that it was sampled from."""


class PoolAddresses(Section):
    """Base addresses of the replicas of each pool, http://host:port."""

    stable: list[ReplicaAddress] = Field(default=["http://127.0.0.1:8000"], min_length=1)
    """Replicas with `replica.pool = "stable"`; also the fallback if no canary replica answers."""

    canary: list[ReplicaAddress] = Field(default=[])
    """Replicas with `replica.pool = "canary"`. Empty: no user is in the canary arm."""


class RouterSettings(ReplicaRequests, EdgeSettings):
    """Settings of the router, which serves and records the product's requests."""

    section = "router"

    port: int = Field(default=8200, ge=0, le=65535)
    """TCP port of the HTTP server; 0: the system chooses one, and the log line names it."""

    pools: PoolAddresses = Field(default_factory=PoolAddresses)
    """Addresses of the replicas."""

    tokenizer: str | None = None
    """Directory or fsspec URL of a checkpoint with tokenizer and chat template. None: the run's first anchor."""

    remembered_turns: int = Field(default=4096, ge=1)
    """Answered turns whose token ids are kept in memory, so that a conversation continues with the sampled ids; a turn
    that is no longer kept is tokenised again. A token takes about 40 bytes; of more than 2**23 tokens, the older turns
    are not kept either."""

    experiment_salt: str = "tidemill"
    """Decides, with the version on trial, which users are in the canary arm. Equal for all routers of one product."""

    consent_default: bool = False
    """Whether an answer may be trained on if the request does not say (header `x-tidemill-consent`)."""

    on_log_failure: LogFailure = LogFailure.REFUSE
    """The treatment of a request if the log does not acknowledge the interaction."""

    other_sampling: OtherSampling = OtherSampling.REFUSE
    """The treatment of a temperature other than 1, a top_p below 1, penalties and similar parameters."""

    log_timeout_s: float = Field(default=10.0, gt=0)
    """Longest wait for the log's acknowledgement of one interaction."""

    log_rest_s: float = Field(default=1.0, gt=0)
    """Seconds after a failure of the log in which requests are refused at once; then one tries the log again."""

    request_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time for one answer, retries on other replicas included."""

    max_concurrent_requests: int = Field(default=256, ge=1)
    """Most requests at the same time; further ones are answered 429."""

    max_body_bytes: int = Field(default=2**20, ge=1)
    """Largest request body; a larger one is answered 413."""

    max_prompt_tokens: int = Field(default=32_768, ge=1)
    """Longest prompt; a longer one is answered 400."""

    claim_check_bytes: int = Field(default=CLAIM_CHECK_BYTES, ge=1)
    """An interaction above this size has its segments in the object store."""

    grace_s: float = Field(default=20.0, ge=0)
    """Seconds that running answers get to finish on shutdown."""


class GatewaySettings(EdgeSettings):
    """Settings of the gateway: address, clients, and limits."""

    section = "gateway"

    port: int = Field(default=8090, ge=0, le=65_535)
    """Port to listen at. 0: a free port."""

    key_rate: float = Field(default=500.0, gt=0)
    """Events per second that an API key may send on average."""

    key_burst: int = Field(default=2000, ge=1)
    """Events that an API key may send in one burst."""

    user_rate: float = Field(default=5.0, gt=0)
    """Events per second that may be sent for one user on average."""

    user_burst: int = Field(default=60, ge=1)
    """Events that may be sent for one user in one burst."""

    max_body_bytes: int = Field(default=262_144, ge=1024)
    """Largest request body in bytes; a larger one is refused while it is read."""

    max_batch: int = Field(default=200, ge=1)
    """Most events in one batch."""

    acknowledge_timeout_s: float = Field(default=5.0, ge=0.5)
    """Longest wait for the log's acknowledgement in seconds; then the answer is 503, and the client may retry."""

    max_queued: int = Field(default=100_000, ge=1)
    """Most events that wait for the log's acknowledgement."""

    linger_ms: float = Field(default=2.0, ge=0, le=100)
    """Milliseconds that an event waits for others, to be written in one batch."""

    @model_validator(mode="after")
    def _batches_pass(self) -> Self:
        if self.max_batch > self.key_burst:
            raise ValueError(f"max_batch {self.max_batch} is above key_burst {self.key_burst}: it could never be sent")
        return self
