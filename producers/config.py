"""Settings of the task feeder, the rollout worker, the router and the feedback gateway."""

from __future__ import annotations

import hmac
import re
from enum import StrEnum
from typing import ClassVar, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from tidemill.producers.product.settings import KeysMissing, key_hash
from tidemill.schemas.config import CLAIM_CHECK_BYTES, HttpSettings, Section


class FeedSettings(Section):
    """Settings of the task feeder: the tasks that it issues, and how far ahead of the trainer it may run."""

    sync: bool = False
    """Issue one step's groups, then wait until that step's version is served: admission with a policy lag of 0."""

    group_size: int = Field(default=16, ge=1, le=1024)
    """Rollouts in a training group, where the environment's entry says nothing else."""

    epochs: int = Field(default=1, ge=0)
    """How often a training question may be asked in a run. 0: without limit."""

    solved_one_in: int = Field(default=1, ge=1)
    """Ask a training question that every rollout of its last group solved in one of this many epochs; 1: in each. After
    n such groups in a row it is one of `solved_one_in` to the power of n, at most 16. A group with equal rewards
    teaches nothing, and its rollouts cost as much as others. Needs `epochs` 0 or above 1."""

    deadline_s: float = Field(default=120.0, gt=0)
    """Seconds of event time from a training task's issue until its group closes with what has arrived."""

    overdue_s: float = Field(default=60.0, ge=0)
    """Seconds past its deadline after which a group that never closed stops holding capacity; also the time without a
    step, with every outstanding group closed, after which one step's worth of further tasks may be issued."""

    replicas: int = Field(default=1, ge=1)
    """Replicas that must serve a version before the first task is issued."""

    replica_ids: list[str] = Field(default=[])
    """Names of the replicas that tasks are played on, and whose versions therefore count. Empty: all. Replicas of the
    stable pool serve users, and would be waited for until a version is promoted."""

    replica_silence_s: float = Field(default=60.0, gt=0)
    """A replica whose last ack is this much older than the newest ack of any replica is no longer waited for."""

    eval_before: bool = True
    """Evaluate on held-out tasks before the first training task."""

    eval_after: bool = True
    """Evaluate on held-out tasks when the last version is served."""

    eval_tasks: int = Field(default=64, ge=1)
    """Held-out tasks of the evaluations before and after."""

    eval_every: int = Field(default=0, ge=0)
    """Versions between two evaluations during training. 0: none."""

    eval_during_tasks: int = Field(default=16, ge=1)
    """Held-out tasks of each evaluation during training: the first ones of the full set."""

    eval_group_size: int = Field(default=4, ge=1, le=1024)
    """Rollouts for each held-out task."""

    eval_deadline_s: float = Field(default=300.0, gt=0)
    """Seconds of event time from a held-out task's issue until its group closes with what has arrived."""

    stall_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a sign of progress after which the feeder says which topic is silent."""


class ReplicaRequests(Section):
    """How requests to replicas are made and tried again."""

    connect_timeout_s: float = Field(default=5.0, gt=0)
    """Longest time to connect to a replica."""

    backoff_s: float = Field(default=0.1, gt=0)
    """How long a replica is left alone after its first failure; doubles with each further one."""

    backoff_limit_s: float = Field(default=5.0, gt=0)
    """Longest time that a failing replica is left alone."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.backoff_limit_s < self.backoff_s:
            raise ValueError(f"backoff_limit_s ({self.backoff_limit_s:g}) is below backoff_s ({self.backoff_s:g})")
        return self


class RolloutSettings(ReplicaRequests):
    """How a rollout worker plays its episodes."""

    replicas: list[str] = Field(default=["http://127.0.0.1:8000"], min_length=1)
    """Base addresses of the replicas, http://host:port."""

    model: str | None = None
    """Model name to send with each request. None: the one that the replica serves."""

    tokenizer: str | None = None
    """Directory or fsspec URL of a checkpoint with tokenizer and chat template. None: the run's first anchor."""

    worker_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$", max_length=200)
    """Name of this worker in its records, and its fixed place among the workers of the run: started again under the
    same name, it has its tasks back at once, without a rebalance. Two workers need two names: of two with one name the
    first ends with an error. None: host name and process id, and no fixed place, so that the tasks of a worker that was
    killed are waited for until its session has run out (10 s)."""

    max_concurrent_episodes: int = Field(default=64, ge=1)
    """Episodes played at the same time."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; it stands in each rollout. A replica reports logprobs at temperature 1, so rollouts at
    another one cannot be trained exactly: the trainer excludes them, unless `trainer.accept_other_sampling` is set."""

    max_context_tokens: int = Field(default=1024, ge=2)
    """Longest context in tokens, sampled ones included. An episode that reaches it ends and is scored as it stands."""

    max_turn_tokens: int = Field(default=512, ge=1)
    """Longest turn in tokens, where an agent asks for no shorter one."""

    max_group_size: int = Field(default=1024, ge=1)
    """A task that asks for a larger group is refused to the dead-letter topic."""

    episode_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time for one episode; past it, or past the task's deadline, the rollout fails."""

    request_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time for one completion request; past it the request is tried again."""

    expert_ids: bool = False
    """Ask the replicas which experts each token was sent to (replica.expert_ids), and keep that in the object store
    beside the rollout, for trainer.routing. It costs layers x experts a token, in bytes, for each token of a rollout,
    whose own arrays take 9 bytes a token."""

    claim_check_bytes: int = Field(default=CLAIM_CHECK_BYTES, ge=1)
    """A rollout record above this size leaves its segments in the object store."""

    record_turns: bool = True
    """Write each sampled turn to `rollouts.progress`, so that a worker that plays an interrupted task again goes on
    from its turns. It costs the bytes of every sampled token (8, and 200 a turn) once more on the log, kept for 7 days,
    and about a fifth of the worker's processor time; without it, an interrupted episode begins anew."""

    environment_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time that an environment in a process of its own may not answer; past it the process is killed, the
    rollout that hung fails, and others begin again."""

    environment_memory_mb: int = Field(default=4096, ge=256)
    """Memory that an environment's process may write to, in MiB."""

    environment_file_mb: int = Field(default=64, ge=1)
    """Largest file that an environment's process may write, in MiB."""

    grace_s: float = Field(default=10.0, ge=0)
    """Seconds that running episodes get to finish on shutdown; the rest is abandoned and redelivered."""


class EdgeSettings(Section):
    """Where a server of the product's side listens, and who may use it."""

    model_config = ConfigDict(hide_input_in_errors=True)
    section: ClassVar[str]

    host: str = "127.0.0.1"
    """Address to listen at. It speaks plain HTTP: beyond this machine, put it behind a proxy that speaks TLS."""

    http: HttpSettings = HttpSettings()
    """Limits on clients' connections."""

    api_keys: dict[str, str] = Field(default_factory=dict)
    """The clients that may use it: a name of each of the product's backends, and the SHA-256 of its key in hex. The
    gateway writes the name into each record as its source."""

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
        """Raise KeysMissing when there is no API key."""
        if not self.api_keys:
            raise KeysMissing(f"{self.section}.api_keys is empty, so no client could use it: {self._how_to_make()}")

    def client_of(self, key: str) -> str | None:
        """The name of an API key; None for one that is not known. Takes as long for every key."""
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
    """Answer 503, and end a stream with an error: nothing is served that is not recorded."""
    SERVE_UNRECORDED = "serve_unrecorded"
    """Serve it, count it, and give it no interaction: nobody can vote on it."""


class OtherSampling(StrEnum):
    """The treatment of a request if its sampling parameters are not those that the trainer assumes."""

    REFUSE = "refuse"
    """Answer 400 and name them."""
    SERVE_UNTRAINED = "serve_untrained"
    """Serve it; the recorded answer names the parameters and has no sampled token, since its logprobs would not be
    those that sampled it."""


class PoolAddresses(Section):
    """Base addresses of the replicas of each pool, http://host:port."""

    stable: list[str] = Field(default=["http://127.0.0.1:8000"], min_length=1)
    """Replicas with `replica.pool = "stable"`; also the way out where no canary replica answers."""

    canary: list[str] = Field(default=[])
    """Replicas with `replica.pool = "canary"`. None: nobody is in the canary arm."""


class RouterSettings(ReplicaRequests, EdgeSettings):
    """How product traffic is served and recorded."""

    section = "router"

    port: int = Field(default=8200, ge=0, le=65535)
    """TCP port of the HTTP server; 0 lets the system choose one, which the log line names."""

    pools: PoolAddresses = Field(default_factory=PoolAddresses)
    """Where the replicas are."""

    tokenizer: str | None = None
    """Directory or fsspec URL with the checkpoint's tokenizer and chat template. None: those of the run's first
    anchor."""

    remembered_turns: int = Field(default=4096, ge=1)
    """Answered turns whose token ids are remembered, so that a conversation goes on with the ids that were sampled; one
    that is forgotten is tokenised anew. A token takes about 40 bytes."""

    experiment_salt: str = "tidemill"
    """Decides, with the version under trial, who is in the canary arm. Routers of one product must agree on it."""

    consent_default: bool = False
    """Whether an answer may be trained on when the request does not say (header `x-tidemill-consent`)."""

    on_log_failure: LogFailure = LogFailure.REFUSE
    """The treatment of a request if the log does not acknowledge the interaction."""

    other_sampling: OtherSampling = OtherSampling.REFUSE
    """The treatment of a temperature other than 1, a top_p below 1, penalties and the like."""

    log_timeout_s: float = Field(default=10.0, gt=0)
    """Longest wait for the log's acknowledgement of one interaction."""

    log_rest_s: float = Field(default=1.0, gt=0)
    """How long requests are refused at once after the log has failed, before one of them tries it again."""

    request_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time for one answer, tries on other replicas included."""

    max_concurrent_requests: int = Field(default=256, ge=1)
    """Requests in hand; further ones are answered 429."""

    max_body_bytes: int = Field(default=2**20, ge=1)
    """Largest request body; a larger one is answered 413."""

    max_prompt_tokens: int = Field(default=32_768, ge=1)
    """Longest prompt; a longer one is answered 400."""

    claim_check_bytes: int = Field(default=CLAIM_CHECK_BYTES, ge=1)
    """An interaction above this size leaves its segments in the object store."""

    grace_s: float = Field(default=20.0, ge=0)
    """Seconds that running answers get to finish on shutdown."""


class GatewaySettings(EdgeSettings):
    """Where the gateway listens, who may use it, and how much."""

    section = "gateway"

    port: int = Field(default=8090, ge=0, le=65_535)
    """Port to listen at. 0: a free one."""

    key_rate: float = Field(default=500.0, gt=0)
    """Events a second that an API key may send for long."""

    key_burst: int = Field(default=2000, ge=1)
    """Events that an API key may send at once."""

    user_rate: float = Field(default=5.0, gt=0)
    """Events a second that may be sent in one user's name for long."""

    user_burst: int = Field(default=60, ge=1)
    """Events that may be sent in one user's name at once."""

    max_body_bytes: int = Field(default=262_144, ge=1024)
    """Bytes of a request's body; what is longer is refused while it is read."""

    max_batch: int = Field(default=200, ge=1)
    """Events of one batch."""

    acknowledge_timeout_s: float = Field(default=5.0, ge=0.5)
    """Seconds that the log may take to acknowledge; then the answer is 503, and the event may be sent again."""

    max_queued: int = Field(default=100_000, ge=1)
    """Events that wait for the log's acknowledgement at most."""

    linger_ms: float = Field(default=2.0, ge=0, le=100)
    """Milliseconds that an event waits for others, to be written with them as one batch."""

    @model_validator(mode="after")
    def _batches_pass(self) -> Self:
        if self.max_batch > self.key_burst:
            raise ValueError(f"max_batch {self.max_batch} is above key_burst {self.key_burst}: it could never be sent")
        return self
