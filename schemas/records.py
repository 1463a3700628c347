"""The records of the log, as frozen dataclasses.

One dataclass per record of `avro/`. Field names, order and meaning are those of its newest schema. Invariants:

- times are integers, microseconds since the Unix epoch, UTC (`*_at`);
- token arrays are packed little-endian bytes (`u4` ids, `f4` logprobs, `u1` masks), never lists;
- identifiers are strings; equal identifiers refer to the same object in all records.
"""

from __future__ import annotations

from dataclasses import field, fields
from enum import StrEnum
from typing import TYPE_CHECKING

from tidemill.schemas.record_class import record

if TYPE_CHECKING:  # numpy takes longer to import than all else that the process of an environment imports
    import numpy as np
    import numpy.typing as npt


class Mode(StrEnum):
    """The purpose of a task, rollout or group. Only `train` is used in an optimizer step."""

    TRAIN = "train"
    EVAL = "eval"


class RolloutStatus(StrEnum):
    """The final status of a rollout. A failed rollout has a reason and no reward; it does not count as reward zero."""

    COMPLETED = "completed"
    FAILED = "failed"


class CloseReason(StrEnum):
    """The reason why a group was closed: complete, deadline passed, or a late rollout of a group already closed."""

    SIZE = "size"
    DEADLINE = "deadline"
    LATE = "late"


class AckStatus(StrEnum):
    """The status of a version on a replica: proved from the live tensors, refused, or loaded again from an anchor."""

    PROVED = "proved"
    REFUSED = "refused"
    ANCHORED = "anchored"


class GateVerdict(StrEnum):
    """The decision about the version that a branch serves."""

    PROMOTE = "promote"
    """Serve this version to everyone."""
    HOLD = "hold"
    """Serve no later version than this one."""
    REJECT = "reject"
    """Never serve this version."""
    ROLL_BACK = "roll_back"
    """Go back to this older version, and serve no later one."""
    RELEASE = "release"
    """Follow the newest version again: ends a hold or a roll-back."""
    CANARY = "canary"
    """Serve this version only in the canary pool, during its trial."""
    ADMIT = "admit"
    """Let this version and its descendants learn from users: it passed the floor. Serving does not change."""


class Arm(StrEnum):
    """An arm of the experiment: a pool of replicas, or `fallback` for interactions that belong to no arm."""

    STABLE = "stable"
    """Served the version that was last promoted or rolled back to."""
    CANARY = "canary"
    """Served the version on trial."""
    FALLBACK = "fallback"
    """The canary arm was chosen, but the stable pool answered because no canary replica did: it counts for neither arm.
    If it counted for the stable arm, its user would be lost to the canary arm for the whole comparison."""


class SignalKind(StrEnum):
    """A user's action, or a product's measurement, about one interaction. Defines the meaning of `Feedback.value`."""

    THUMB = "thumb"
    """A vote: 1 up, -1 down."""
    EDIT_KEPT_SOON = "edit_kept_soon"
    """Share of the change that is kept after the short delay, 0 to 1."""
    EDIT_KEPT_LATER = "edit_kept_later"
    """Share of the change that is kept after the long delay, 0 to 1."""
    RETRY = "retry"
    """1: the user asked the same thing again."""
    UNDO = "undo"
    """1: the user undid the change."""
    ABANDONMENT = "abandonment"
    """1: the user left without using the answer."""
    SENTIMENT = "sentiment"
    """Mood of the next message, -1 to 1, as rated by the observer named in `source`."""
    LATENCY = "latency"
    """Seconds from request to last token, measured on the user's side; above 0."""
    TOOL_ERROR = "tool_error"
    """1: the answer called a tool in a way that could not be executed."""
    EDIT_MADE = "edit_made"
    """1: the answer did something, for instance changed a file or gave the solution. 0: it did not."""
    QUESTION_ASKED = "question_asked"
    """1: the answer asked the user a question instead. 0: it did not."""


class UserWish(StrEnum):
    """The request of a user about their data."""

    OPT_OUT = "opt_out"
    """Do not learn from interactions that are served to this user from now on."""
    OPT_IN = "opt_in"
    """Learn from this user again."""
    ERASE = "erase"
    """Delete the user's data, and do not train on it."""


class OutcomeExclusion(StrEnum):
    """The reason why an interaction is excluded from training (`Outcome.exclusion`)."""

    NO_CONSENT = "no_consent"
    OPTED_OUT = "opted_out"
    ERASED = "erased"
    BOT = "bot"
    TOO_LATE = "too_late"
    NO_SIGNAL = "no_signal"
    NO_TOKENS = "no_tokens"


class Exclusion(StrEnum):
    """The reason why a group, an online batch or one of its interactions is not trained (`StepExclusion.reason`)."""

    EVAL = "eval"
    LATE = "late"
    DUPLICATE = "duplicate"
    TOO_FEW = "too_few"
    NO_SIGNAL = "no_signal"
    STALE = "stale"
    MISSING_ROLLOUT = "missing_rollout"
    INVALID_ROLLOUT = "invalid_rollout"
    INVALID_ROUTING = "invalid_routing"
    """A rollout has no expert ids, or its ids cannot be used to route this model."""
    BELOW_FLOOR = "below_floor"
    """Sampled under a version that may not learn from users."""
    MISSING_INTERACTION = "missing_interaction"
    INVALID_INTERACTION = "invalid_interaction"
    ERASED = "erased"
    """Its user requested that their data be deleted."""
    REJECTED_VERSION = "rejected_version"
    """Sampled under a version that the gate rejected or rolled back from, or under one of its descendants."""
    UNDEFINED_LAG = "undefined_lag"
    """Sampled under a version of another incarnation, or under a version that this trainer has not made."""
    OTHER_SAMPLING = "other_sampling"
    """Sampled from another distribution than the model's own. The recorded logprobs are those of the model's own
    distribution, so it cannot be trained exactly."""
    REPLAYED = "replayed"
    """Written by a replay whose id is not in `trainer.accept_replays`."""


SECOND_RECORDS = frozenset({Exclusion.LATE, Exclusion.DUPLICATE, Exclusion.REPLAYED})
"""Reasons that concern only the record: the same content is in another record, or will be."""


class BatchClose(StrEnum):
    """The reason why an online batch was closed."""

    TOKENS = "tokens"
    TIME = "time"


@record(frozen=True, slots=True)
class Task:
    """A task that is played `group_size` times. Topic `tasks`, key `task_id`."""

    task_id: str
    group_id: str
    run_id: str
    environment: str
    payload: str
    """The environment's own JSON document, with all that it needs to pose the task and to check the answer."""
    mode: Mode
    group_size: int
    max_turns: int
    """Maximum number of policy calls in one rollout; one call more fails the rollout."""
    seed: int
    issued_at: int
    deadline_at: int
    """Event time after which the group closes with the rollouts that have arrived."""
    issued_version: int
    """Newest weight version known when the task was issued."""
    options: str = "{}"
    """Options of the environment, as canonical JSON."""


@record(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a segment were sampled under weight version `version`."""

    version: int
    start: int
    end: int


MOST_LOGPROB = 1e-4
"""Largest logprob of a record: a sampler that computes in float32 may round that of a certain token to above 0."""


@record(frozen=True, slots=True)
class Segment:
    """One context of a rollout: prompt, sampled turns and tool output, in order."""

    n_tokens: int
    token_ids: bytes
    """u4[n_tokens], little-endian."""
    loss_mask: bytes
    """u1[n_tokens]: 1 for tokens that the policy sampled, 0 for prompt and tool output."""
    logprobs: bytes
    """f4[n_tokens], little-endian: the sampler's logprob of each sampled token, 0 elsewhere."""
    spans: list[VersionSpan] = field(default_factory=list)
    """Cover exactly the tokens whose mask is 1, in order, without overlap."""

    def ids(self) -> npt.NDArray[np.uint32]:
        """Return the token ids as u4[n_tokens]."""
        import numpy as np

        return np.frombuffer(self.token_ids, dtype="<u4")

    def mask(self) -> npt.NDArray[np.uint8]:
        """Return the loss mask as u1[n_tokens]."""
        import numpy as np

        return np.frombuffer(self.loss_mask, dtype="u1")

    def sampled_logprobs(self) -> npt.NDArray[np.float32]:
        """Return the logprobs as f4[n_tokens]."""
        import numpy as np

        return np.frombuffer(self.logprobs, dtype="<f4")


MOST_REWARD = 1e9
"""Greatest size of a reward. Gradients of a much greater one are not finite in float32, and the sums of a group with it
lose every smaller reward."""


@record(frozen=True, slots=True)
class RewardComponent:
    """One named part of a reward; the total is the sum of value * weight."""

    name: str
    value: float
    weight: float


@record(frozen=True, slots=True)
class Claim:
    """Claim check: location and checksum of a payload above the size limit."""

    uri: str
    n_bytes: int
    digest: str
    """xxh3-128 of the bytes, hexadecimal."""


@record(frozen=True, slots=True)
class SamplingParameters:
    """Parameters for sampling tokens from the model's prediction; by default, from the model's own distribution.

    The recorded logprobs are always those of the model's own distribution, for any parameters.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: the whole vocabulary."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    others: str = ""
    """Names of other request parameters that change the distribution, separated by commas."""

    def changes(self) -> str:
        """Return the parameters that change the model's own distribution; an empty string if there are none."""
        own = SamplingParameters()
        found = [f"{f.name} {getattr(self, f.name):g}" for f in fields(self) if f.name != "others"
                 and getattr(self, f.name) != getattr(own, f.name)]  # fmt: skip
        return ", ".join([*found, *filter(None, self.others.split(","))])


@record(frozen=True, slots=True)
class Rollout:
    """One finished attempt at a task. Topic `rollouts`, key `group_id`."""

    rollout_id: str
    group_id: str
    task_id: str
    run_id: str
    environment: str
    mode: Mode
    index: int
    """Index in its group, 0 <= index < group_size."""
    group_size: int
    deadline_at: int
    status: RolloutStatus
    failure: str
    """Reason of the failure; empty when completed."""
    segments: list[Segment]
    claim: Claim | None
    """Location of the segments if they exceed the claim-check limit; `segments` is then empty."""
    rewards: list[RewardComponent]
    reward: float | None
    """Total reward; None for a failed rollout."""
    reward_version: str
    success: bool | None
    turns: int
    prompt_tokens: int
    sampled_tokens: int
    version_min: int
    """Oldest weight version among the sampled tokens; -1 when none was sampled."""
    version_max: int
    replica_id: str
    region: str
    worker_id: str
    started_at: int
    finished_at: int
    incarnation: str = ""
    """Incarnation of the versions in `version_min`, `version_max` and the spans; empty if the replica did not report
    it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers of the environment, by name. A resumed rollout adds the number of its recorded turns that were used
    again (`resumed_turns`) and the number that were not (`unused_turns`)."""
    sampling: SamplingParameters | None = None
    """Parameters of all its turns; None if the worker did not report them."""
    expert_ids: Claim | None = None
    """Location of the expert ids of its segments (`schemas.expert_ids`); None if they were not requested."""


@record(frozen=True, slots=True)
class Dispatch:
    """A worker's record that it plays certain rollouts of a task. Topic `rollouts.progress`, key `task_id`."""

    task_id: str
    group_id: str
    run_id: str
    worker_id: str
    indexes: list[int]
    """Indexes in the group that it plays, without those whose rollouts were already in the log."""
    resumed_turns: list[int]
    """For each entry of `indexes`: the number of recorded turns that it continues from; 0 starts again."""
    lease_until: int
    """Time by which the rollouts have ended, with a result or failed with a reason."""
    at: int


@record(frozen=True, slots=True)
class Turn:
    """One sampled turn of an unfinished rollout, so that another worker can continue the rollout from it.

    Topic `rollouts.progress`, key `task_id`.
    """

    rollout_id: str
    group_id: str
    task_id: str
    run_id: str
    worker_id: str
    replica_id: str
    region: str
    incarnation: str
    turn: int
    """Number of the turn in the rollout, from 0."""
    n_tokens: int
    token_ids: bytes
    """u4[n_tokens], little-endian."""
    logprobs: bytes
    """f4[n_tokens], little-endian: the sampler's logprob of each token."""
    spans: list[VersionSpan]
    """Spans in token positions of this turn; they cover every token."""
    finish_reason: str
    at: int
    context: str = ""
    """xxh3-128, hexadecimal, of the u4 token ids before this turn, and of the temperature if it was not 1. The turn can
    be used again only after the same context."""
    expert_ids: bytes = b""
    """Expert ids (`schemas.expert_ids`) of the tokens before the last one, from the first token whose ids are in no
    earlier turn of its context. Empty if they were not requested."""


@record(frozen=True, slots=True)
class Tick:
    """A record that advances event time in an idle partition. Written to the topic whose event time it advances."""

    source: str
    at: int


@record(frozen=True, slots=True)
class GroupMember:
    """A reference to one rollout of a group, with the values that group assembly computed."""

    rollout_id: str
    topic: str
    partition: int
    offset: int
    status: RolloutStatus
    reward: float | None
    advantage: float | None
    """reward - mean(reward of the completed members); None for a failed member."""
    success: bool | None
    sampled_tokens: int
    version_min: int
    version_max: int


@record(frozen=True, slots=True)
class Group:
    """An assembled group: references to rollouts, not copies. Topic `groups`, key `group_id`."""

    group_id: str
    task_id: str
    run_id: str
    environment: str
    mode: Mode
    closed_by: CloseReason
    expected_size: int
    members: list[GroupMember]
    """Sorted by rollout_id, so that the record does not depend on arrival order."""
    mean_reward: float | None
    opened_at: int
    closed_at: int
    """Event time of the record that closed it."""
    rewards_shuffled: bool
    """True in the control run: rewards were permuted within the group before the advantages were computed."""


@record(frozen=True, slots=True)
class DeltaChunk:
    """One chunk (at most 1 MiB) of an encoded delta. Topic `weights.deltas`, key `shard`."""

    run_id: str
    branch: str
    version: int
    shard: int
    sequence: int
    total: int
    digest: str
    """xxh3-128 of `payload`, hexadecimal."""
    payload: bytes


@record(frozen=True, slots=True)
class ShardPosition:
    """Location in the log of the chunks of one shard of a version."""

    shard: int
    topic: str
    partition: int
    offsets: list[int]
    """One offset per chunk, in sequence order."""
    n_bytes: int
    digest: str
    """xxh3-128 of the concatenated payloads, hexadecimal."""
    uri: str | None = None
    """Object that contains the payloads instead of the log (claim check); `offsets` is then empty."""


@record(frozen=True, slots=True)
class TensorTable:
    """The tensor list of a version as an object in the store (claim check), if it is too long for one record."""

    uri: str
    n_tensors: int
    n_bytes: int
    digest: str
    """xxh3-128 of the object, hexadecimal."""


@record(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a version, with the name, dtype and shape that it has in the checkpoint."""

    name: str
    dtype: str
    shape: list[int]
    fingerprint: str
    """Linear fingerprint of the tensor, hexadecimal (`kernels.fingerprint`)."""


@record(frozen=True, slots=True)
class Anchor:
    """A whole version as a Hugging Face checkpoint directory, reachable through fsspec."""

    uri: str
    n_bytes: int


@record(frozen=True, slots=True)
class Manifest:
    """The commit record of a weight version. Topic `weights.manifests`, key `branch`."""

    run_id: str
    branch: str
    version: int
    parent: int | None
    """Version that the delta applies to; None for a version that exists only as an anchor."""
    step: int
    learning_rate: float
    n_elements: int
    n_changed: int
    delta_bytes: int
    shards: list[ShardPosition]
    tensors: list[TensorInfo]
    fingerprint: str
    """Fingerprint of the whole version: the sum of its tensors' fingerprints, hexadecimal."""
    anchor: Anchor | None
    trained_at: int
    """End of the optimizer step that made the version; step-to-served time is measured from here."""
    published_at: int
    tensor_table: TensorTable | None = None
    """Location of the tensor list if it is too long for one record; `tensors` is then empty."""
    incarnation: str = ""
    """Id created with version 0 and copied to every later version. Version numbers of different incarnations cannot be
    compared. Empty in records from before this field existed."""
    serving_format: str = ""
    """Format, such as mxfp8, that the values of the linear weights are rounded to. The delta contains these values in
    the dtypes of `tensors`, without codes. Empty if the values are only rounded to the dtype of the tensor."""
    serving_activations: str = ""
    """Format, such as mxfp8, to which the inputs of these linear layers are rounded, by rows. A version is sampled
    with it. Empty if they are not rounded."""


@record(frozen=True, slots=True)
class SkipDelta:
    """An additional delta to a version, from an older version than its parent, for replicas that are behind.

    Topic `weights.manifests`, key `branch`, after the manifest of `version`.
    """

    run_id: str
    branch: str
    version: int
    base: int
    """The version that the delta applies to."""
    n_changed: int
    n_bytes: int
    shards: list[ShardPosition]
    published_at: int


CANARY_SHARE = "share"
"""Name, in the numbers of a CANARY decision, of the share of the users that the canary pool gets, 0 to 1."""


@record(frozen=True, slots=True)
class GateDecision:
    """A decision about the version that a branch serves. Topic `gate.decisions`, key `branch`. The newest applies."""

    run_id: str
    branch: str
    verdict: GateVerdict
    version: int | None
    """Version that the decision is about; None for a release."""
    reason: str
    decided_by: str
    """Author of the decision: a person's name, or the name of the gate."""
    numbers: dict[str, float]
    """Numbers that the decision is based on, by metric."""
    at: int


@record(frozen=True, slots=True)
class WeightAck:
    """A replica's acknowledgement of a version, proved or not. Topic `weights.acks`, key `replica_id`."""

    replica_id: str
    region: str
    run_id: str
    branch: str
    incarnation: str
    """Id of the replica's process; a new process has a new one."""
    pid: int
    version: int
    """Version that the acknowledgement is about."""
    serving_version: int
    """Version served after this record."""
    status: AckStatus
    reason: str
    fingerprint: str
    """Fingerprint computed from the live engine's tensors; empty if the version was refused before it was applied."""
    expected_fingerprint: str
    fetch_ms: float
    decode_ms: float
    pause_ms: float
    apply_ms: float
    proof_ms: float
    step_to_served_ms: float
    decode_step_ms: float
    """Median time between tokens over the last seconds, measured by the engine; 0 when idle."""
    requests_in_flight: int
    at: int


@record(frozen=True, slots=True)
class StepInput:
    """One group that a step trained on, by its position in the log."""

    group_id: str
    topic: str
    partition: int
    offset: int


@record(frozen=True, slots=True)
class StepExclusion:
    """One group that was read and not trained, with the reason. Each such group is recorded and counted once."""

    group_id: str
    topic: str
    partition: int
    offset: int
    reason: str
    rollouts: int


@record(frozen=True, slots=True)
class LagCount:
    """Number of trained tokens (`tokens`) with policy lag `lag` (trainer version minus token version)."""

    lag: int
    tokens: int


@record(frozen=True, slots=True)
class TrainStep:
    """One optimizer step, with everything needed to run it again. Topic `train.steps`, key `run_id`."""

    run_id: str
    step: int
    version: int
    """Version that this step made."""
    parent_version: int
    inputs: list[StepInput]
    exclusions: list[StepExclusion]
    seed: int
    config_hash: str
    objective: str
    learning_rate: float
    metrics: dict[str, float]
    lag: list[LagCount]
    rollouts: int
    tokens: int
    fingerprint: str
    parent_fingerprint: str
    started_at: int
    finished_at: int
    incarnation: str = ""
    """Incarnation of the version in `version`; empty in records from before this field existed."""


@record(frozen=True, slots=True)
class StepPlan:
    """The inputs of a step, written before the step is taken: a restarted trainer takes the step on the same inputs.
    Topic `train.steps`, key `run_id`."""

    run_id: str
    step: int
    parent_version: int
    inputs: list[StepInput]
    exclusions: list[StepExclusion]
    seed: int
    config_hash: str
    metrics: dict[str, float]
    """Numbers of the step's record that are known before the step is taken."""
    incarnation: str
    trainer: str
    """Id of the process that began the step; a restarted trainer has a new id."""
    at: int


@record(frozen=True, slots=True)
class Staleness:
    """Policy lag of one replica's tokens in one batch. Topic `staleness`, key `replica_id`."""

    run_id: str
    replica_id: str
    region: str
    stage: str
    """"train": lag of trained tokens. "serve": lag of the served version; `LagCount.tokens` then counts requests."""
    step: int
    version: int
    lag: list[LagCount]
    at: int


@record(frozen=True, slots=True)
class MismatchSlice:
    """Statistics of one part of the mismatch of a step, over the tokens with a common property.

    The numbers describe the difference d = log pi_trainer - log pi_sampler of each token, in nats.
    """

    part: str
    """Part of the mismatch: `all`; `engines`, between two engines with equal weights; `staleness`, from training since
    the token was sampled; `lagged`, both together, for tokens of older weights."""
    dimension: str
    """Common property of the tokens: "all" for no restriction, or environment, replica, lag, position, turn, place or
    probability."""
    value: str
    """Value of the property for these tokens."""
    tokens: int
    k1: float
    """Mean of -d."""
    k3: float
    """Mean of exp(d) - 1 - d, an estimate of the KL divergence that is never negative."""
    p50: float
    p99: float
    max: float
    """Quantiles and maximum of |d|."""
    beyond_2: float
    """Share of tokens whose ratio exp(d) is above 2 or below 0.5."""
    ess: float
    """Effective sample size, as a share of the tokens, if each token is weighted by exp(d)."""
    cut: int
    """Number of tokens whose weight the correction bounded or set to 0."""


@record(frozen=True, slots=True)
class WorstToken:
    """One of the tokens of a step with the largest difference between sampler and trainer, with its location."""

    record_id: str
    """Id of its rollout or interaction."""
    environment: str
    """Empty for an interaction."""
    replica_id: str
    version: int
    """Version that sampled it."""
    lag: int
    segment: int
    """Number of the segment in the record, from 0."""
    position: int
    """Position in the segment."""
    turn: int
    """Number of the turn in the record, from 0."""
    token_id: int | None
    """None for an interaction, so that no part of an erased user's answer remains in this record."""
    sampler_logprob: float
    trainer_logprob: float
    """Logprob at the weights that the step started from."""
    weight: float
    """Token weight from the correction."""
    sampler_experts: str = ""
    """Experts that the sampler used for the previous token, which predicted this one: one group for each layer with
    experts, separated by spaces, as in "0,3 2,7". Empty if they are not known."""
    trainer_experts: str = ""
    """Experts that the trainer's own routers chose for the same previous token."""


@record(frozen=True, slots=True)
class Mismatch:
    """The mismatch between sampler and trainer on the tokens of one step. Topic `train.mismatch`, key `run_id`.

    A repeated record of the same run and step has the same content: the first one counts.
    """

    run_id: str
    step: int
    version: int
    """Version that the step started from; the trainer's logprobs are computed with its weights."""
    tokens: int
    slices: list[MismatchSlice]
    worst: list[WorstToken]
    """Sorted by difference, largest first."""
    alarms: list[str]
    """`part/number` for each number beyond its bound, among the numbers over all tokens of a part."""
    tokens_routed_otherwise: float | None
    """Share of tokens for which the trainer chose other experts than the sampler in at least one layer; None if the
    sampler's experts are not known."""
    layers_routed_otherwise: float | None
    """The same share, over (token, layer) pairs."""
    seconds: float
    """Duration of the measurement."""
    at: int
    """End of the step."""
    incarnation: str = ""
    """Incarnation of the version in `version`."""


@record(frozen=True, slots=True)
class Document:
    """One document of the mid-training corpus. Topic `documents`, key `document_id`."""

    document_id: str
    source: str
    text: str


@record(frozen=True, slots=True)
class Interaction:
    """One answer served to a user: a rollout without a reward. Topic `interactions`, key `interaction_id`."""

    interaction_id: str
    run_id: str
    branch: str
    user_id: str
    """Pseudonym of the user: a keyed hash, never the product's own identifier. Empty if the product named no user."""
    session_id: str
    """Conversation that the answer belongs to; empty if the product gives none."""
    arm: str
    """An `Arm`: the pool of replicas that answered, or `fallback`."""
    propensity: float
    """Probability with which the arm was chosen, at the time of the choice."""
    consent: bool
    """Whether the user allows training on this interaction."""
    segments: list[Segment]
    """The prompt, then the answer."""
    claim: Claim | None
    """Location of the segments if they exceed the claim-check limit; `segments` is then empty."""
    prompt_tokens: int
    sampled_tokens: int
    version_min: int
    """Oldest weight version among the sampled tokens; -1 when none was sampled."""
    version_max: int
    replica_id: str
    region: str
    finish_reason: str
    """Reason from the engine, or "abandoned" if the client disconnected first."""
    first_token_ms: float
    latency_ms: float
    """Time from the request's arrival to the last token."""
    served_at: int
    """Time at which the answer was complete; the horizon of every signal starts here."""
    incarnation: str = ""
    """Incarnation of the versions in `version_min`, `version_max` and the spans; empty if the replica did not report
    it."""
    sampling: SamplingParameters | None = None
    """None if the router did not report them."""


@record(frozen=True, slots=True)
class Feedback:
    """One signal about one interaction. Topic `feedback`, partitioned by `interaction_id`, key `interaction/event`."""

    event_id: str
    """An event that is sent twice has the same id both times, and counts once."""
    interaction_id: str
    user_id: str
    """Pseudonym of the user who gave it."""
    kind: SignalKind
    value: float | None
    """Value, whose meaning depends on `kind`. None, with `corrects`: that event is withdrawn."""
    observed_at: int
    """Time of the event by the product's clock."""
    source: str
    """Reporter: the name of an SDK or an API key, or of the observer that rated the interaction."""
    corrects: str | None = None
    """`event_id` that this event replaces."""


@record(frozen=True, slots=True)
class UserRequest:
    """A user's request about their data. Topic `user.requests`, key `user_id`; copied into every partition of
    `interactions` and into `outcomes`, so that each reader reads it in order with the other records there."""

    request_id: str
    user_id: str
    wish: UserWish
    requested_by: str
    at: int


@record(frozen=True, slots=True)
class SignalUse:
    """One signal that contributed to a reward."""

    kind: SignalKind
    event_id: str
    value: float
    contribution: float
    """Amount that it added to the reward."""
    topic: str
    partition: int
    offset: int


@record(frozen=True, slots=True)
class Outcome:
    """The end of an interaction: one reward, or one exclusion with its reason. Topic `outcomes`, key `interaction_id`.

    A later record of the same interaction with a higher `revision` is a correction after the end.
    """

    interaction_id: str
    run_id: str
    branch: str
    user_id: str
    arm: str
    topic: str
    partition: int
    offset: int
    """With `topic` and `partition`: the position of the interaction in the log."""
    version_min: int
    version_max: int
    sampled_tokens: int
    latency_ms: float
    reward: float | None
    """None if excluded."""
    exclusion: str
    """Reason why it is not trained; empty if it has a reward."""
    signals: list[SignalUse]
    """Signals that contributed to the reward, in order of event id."""
    observed: dict[str, float]
    """All signals that were observed, by kind, also those without weight in the reward map: guardrails read them."""
    map_version: str
    """Name and hash of the reward map."""
    revision: int
    """0: the end. n: the n-th correction after it."""
    previous_reward: float | None
    """For a correction: the reward before it."""
    served_at: int
    feedback_at: int | None
    """Time at which the newest signal in `signals` was observed; feedback-to-served time is measured from here."""
    closed_at: int
    """Event time of the end."""


@record(frozen=True, slots=True)
class OnlineMember:
    """A reference to one rewarded interaction of an online batch."""

    interaction_id: str
    user_id: str
    topic: str
    partition: int
    offset: int
    reward: float
    """For a correction: the change of the reward."""
    correction: bool
    sampled_tokens: int
    version_min: int
    version_max: int
    arm: str
    feedback_at: int | None


@record(frozen=True, slots=True)
class OnlineBatch:
    """Rewarded interactions of one serving version: references, not copies. Topic `online-batches`, key `batch_id`."""

    batch_id: str
    run_id: str
    branch: str
    sequence: int
    """Number of the batch in its run and branch, from 0."""
    version: int
    """Version that all members were sampled under, except corrections if the settings admit them."""
    members: list[OnlineMember]
    """Sorted by interaction_id."""
    tokens: int
    """Number of sampled tokens of the members."""
    closed_by: BatchClose
    dropped: dict[str, int]
    """Number of outcomes read since the previous batch that are in no batch, by reason."""
    selection: dict[str, float]
    """Comparison of served and trained interactions: means and shares of both, named `served/...` and `trained/...`."""
    map_version: str
    opened_at: int
    closed_at: int
    """`opened_at` is the event time of its first outcome, `closed_at` that of the record that closed it."""


Record = (
    Task
    | Rollout
    | Dispatch
    | Turn
    | Tick
    | Group
    | DeltaChunk
    | Manifest
    | SkipDelta
    | WeightAck
    | TrainStep
    | StepPlan
    | Staleness
    | Mismatch
    | GateDecision
    | Document
    | Interaction
    | Feedback
    | UserRequest
    | Outcome
    | OnlineBatch
)


def rollout_id(group_id: str, index: int) -> str:
    """Return the id of the rollout at an index of a group. A repeated rollout has the id of the first one."""
    return f"{group_id}/{index}"


def rollout_index(rollout_id: str) -> int | None:
    """Return the index in its group that a rollout's id contains; None for an id in another format."""
    number = rollout_id.rpartition("/")[2]
    # A record may hold any text: an index has at most the 19 digits of 64 bits, and Python refuses very long ones.
    return int(number) if number.isdecimal() and len(number) <= 19 else None
