"""Settings of the task feeder and the rollout worker."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from tidemill.schemas.config import CLAIM_CHECK_BYTES, Section


class FeedSettings(Section):
    """What the task feeder issues, and how far ahead of the trainer it may run."""

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
