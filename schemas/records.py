"""The records of the log, as frozen dataclasses.

One dataclass per record of `avro/`; field names, order and meaning are those of its newest schema. Invariants:

- times are integers, microseconds since the Unix epoch, UTC (`*_at`);
- token arrays are packed little-endian bytes (`u4` ids, `f4` logprobs, `u1` masks), never lists;
- identifiers are strings, and equal identifiers mean the same thing wherever a record is read.
"""

from __future__ import annotations

from dataclasses import field, fields
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tidemill.schemas.record_class import record


class Mode(StrEnum):
    """The purpose of a task, rollout or group. Only `train` ever reaches an optimizer step."""

    TRAIN = "train"
    EVAL = "eval"


class RolloutStatus(StrEnum):
    """How a rollout ended. A failed rollout has a reason and no reward: it is never a zero reward."""

    COMPLETED = "completed"
    FAILED = "failed"


class CloseReason(StrEnum):
    """Why a group was closed: complete, out of time, or a straggler of a group that had closed before."""

    SIZE = "size"
    DEADLINE = "deadline"
    LATE = "late"


class AckStatus(StrEnum):
    """The state of a version on a replica: proved from its live tensors, refused, or loaded again from an anchor."""

    PROVED = "proved"
    REFUSED = "refused"
    ANCHORED = "anchored"


class GateVerdict(StrEnum):
    """The decision about the version that a branch serves."""

    PROMOTE = "promote"
    """Serve this version to everyone."""
    HOLD = "hold"
    """Go no further than this version."""
    REJECT = "reject"
    """Never serve this version."""
    ROLL_BACK = "roll_back"
    """Go back to this older version, and no further than it."""
    RELEASE = "release"
    """Follow the newest version again: ends a hold or a roll-back."""
    CANARY = "canary"
    """Serve this version in the canary pool alone, while it is tried."""
    ADMIT = "admit"
    """This version and its descendants may learn from users: it passed the floor. Changes nothing that is served."""


class Arm(StrEnum):
    """An arm of the experiment, which is a pool of replicas; and the users who are in none."""

    STABLE = "stable"
    """Served the version that was promoted or rolled back to last."""
    CANARY = "canary"
    """Served the version under trial."""
    FALLBACK = "fallback"
    """Drawn for the canary arm and answered by the stable pool, since no canary replica answered: no answer of either
    arm. Counted as the stable arm's, it would take its user from the canary arm for the whole of a comparison."""


class SignalKind(StrEnum):
    """An act of a user, or an observation of the product, about one interaction. `Feedback.value` is read by kind."""

    THUMB = "thumb"
    """A vote: 1 up, -1 down."""
    EDIT_KEPT_SOON = "edit_kept_soon"
    """Share of the change still there after the short delay, 0 to 1."""
    EDIT_KEPT_LATER = "edit_kept_later"
    """Share of the change still there after the long delay, 0 to 1."""
    RETRY = "retry"
    """1: the user asked the same again."""
    UNDO = "undo"
    """1: the user took the change back."""
    ABANDONMENT = "abandonment"
    """1: the user left without using the answer."""
    SENTIMENT = "sentiment"
    """Mood of the next message, -1 to 1, as judged by an observer that `source` names."""
    LATENCY = "latency"
    """Seconds from request to last token, as the user's side measured it; above 0."""
    TOOL_ERROR = "tool_error"
    """1: the answer called a tool in a way that could not be executed."""
    EDIT_MADE = "edit_made"
    """1: the answer did something: changed a file, gave the answer. 0: it did not."""
    QUESTION_ASKED = "question_asked"
    """1: the answer asked the user instead of doing. 0: it did not."""


class UserWish(StrEnum):
    """A demand of a user about their data."""

    OPT_OUT = "opt_out"
    """Do not learn from me from now on."""
    OPT_IN = "opt_in"
    """Learn from me again."""
    ERASE = "erase"
    """Delete what there is of me, and do not train on it."""


class OutcomeExclusion(StrEnum):
    """Why an interaction is left out of training (`Outcome.exclusion`)."""

    NO_CONSENT = "no_consent"
    OPTED_OUT = "opted_out"
    ERASED = "erased"
    BOT = "bot"
    TOO_LATE = "too_late"
    NO_SIGNAL = "no_signal"
    NO_TOKENS = "no_tokens"


class Exclusion(StrEnum):
    """Why a group, an online batch or an interaction of one is not trained (`StepExclusion.reason`)."""

    EVAL = "eval"
    LATE = "late"
    DUPLICATE = "duplicate"
    TOO_FEW = "too_few"
    NO_SIGNAL = "no_signal"
    STALE = "stale"
    MISSING_ROLLOUT = "missing_rollout"
    INVALID_ROLLOUT = "invalid_rollout"
    INVALID_ROUTING = "invalid_routing"
    """A rollout has no expert ids, or none that the model can be routed by."""
    BELOW_FLOOR = "below_floor"
    """Sampled under a version that may not learn from users."""
    MISSING_INTERACTION = "missing_interaction"
    INVALID_INTERACTION = "invalid_interaction"
    ERASED = "erased"
    """Its user demanded that their data be deleted."""
    REJECTED_VERSION = "rejected_version"
    """Sampled under a version that the gate rejected or rolled back from, or under its descendant."""
    UNDEFINED_LAG = "undefined_lag"
    """Sampled under another incarnation's versions, or under one that this trainer has not made."""
    OTHER_SAMPLING = "other_sampling"
    """Sampled from another distribution than the model's own, whose logprobs are recorded: it cannot be trained
    exactly."""
    REPLAYED = "replayed"
    """Written by a replay that the trainer was not told of."""


SECOND_RECORDS = frozenset({Exclusion.LATE, Exclusion.DUPLICATE, Exclusion.REPLAYED})
"""Reasons that say nothing of what a record is about: another one stands for it, or will."""


class BatchClose(StrEnum):
    """Why an online batch was closed."""

    TOKENS = "tokens"
    TIME = "time"


@record(frozen=True, slots=True)
class Task:
    """A task to roll out `group_size` times. Topic `tasks`, key `task_id`."""

    task_id: str
    group_id: str
    run_id: str
    environment: str
    payload: str
    """The environment's own JSON document: what it needs to pose the task and check the answer."""
    mode: Mode
    group_size: int
    max_turns: int
    """Most calls of the policy in one rollout; one more fails it."""
    seed: int
    issued_at: int
    deadline_at: int
    """Event time after which the group closes with what has arrived."""
    issued_version: int
    """Newest weight version known when the task was issued."""
    options: str = "{}"
    """Options of the environment, canonical JSON."""


@record(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a segment were sampled under weight version `version`."""

    version: int
    start: int
    end: int


@record(frozen=True, slots=True)
class Segment:
    """One context of a rollout: prompt, sampled turns and tool output, in order."""

    n_tokens: int
    token_ids: bytes
    """u4[n_tokens], little-endian."""
    loss_mask: bytes
    """u1[n_tokens]: 1 where the policy sampled the token, 0 for prompt and tool output."""
    logprobs: bytes
    """f4[n_tokens], little-endian: the sampler's logprob of each sampled token, 0 elsewhere."""
    spans: list[VersionSpan] = field(default_factory=list)
    """Cover exactly the tokens whose mask is 1, in order, without overlap."""

    def ids(self) -> npt.NDArray[np.uint32]:
        """u4[n_tokens]."""
        return np.frombuffer(self.token_ids, dtype="<u4")

    def mask(self) -> npt.NDArray[np.uint8]:
        """u1[n_tokens]."""
        return np.frombuffer(self.loss_mask, dtype="u1")

    def sampled_logprobs(self) -> npt.NDArray[np.float32]:
        """f4[n_tokens]."""
        return np.frombuffer(self.logprobs, dtype="<f4")


@record(frozen=True, slots=True)
class RewardComponent:
    """One named part of a reward; the total is the sum of value * weight."""

    name: str
    value: float
    weight: float


@record(frozen=True, slots=True)
class Claim:
    """Claim check: where the bytes of a payload above the limit lie, and how to check them."""

    uri: str
    n_bytes: int
    digest: str
    """xxh3-128 of the bytes, hexadecimal."""


@record(frozen=True, slots=True)
class SamplingParameters:
    """How tokens were chosen from what the model predicts; by default, from its own distribution.

    The logprobs of the log are those of the model's own distribution, for any parameters.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: of the whole vocabulary."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    others: str = ""
    """Names of further parameters of the request that change the distribution, with commas between."""

    def changes(self) -> str:
        """The parameters by which the tokens are of another distribution than the model's own; empty without any."""
        own = SamplingParameters()
        found = [f"{f.name} {getattr(self, f.name):g}" for f in fields(self) if f.name != "others"
                 and getattr(self, f.name) != getattr(own, f.name)]  # fmt: skip
        return ", ".join([*found, *filter(None, self.others.split(","))])


@record(frozen=True, slots=True)
class Rollout:
    """One finished trajectory. Topic `rollouts`, key `group_id`."""

    rollout_id: str
    group_id: str
    task_id: str
    run_id: str
    environment: str
    mode: Mode
    index: int
    """Place in its group, 0 <= index < group_size."""
    group_size: int
    deadline_at: int
    status: RolloutStatus
    failure: str
    """Why it failed; empty when completed."""
    segments: list[Segment]
    claim: Claim | None
    """Where `segments` lie when they are above the claim-check limit; then `segments` is empty."""
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
    """Which life of the run's version numbers `version_min`, `version_max` and the spans count in; empty where the
    replica did not say."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers of the environment, by name. A rollout that was begun before adds how many of its recorded turns were
    used again (`resumed_turns`), and how many were not (`unused_turns`)."""
    sampling: SamplingParameters | None = None
    """Of all its turns; None where the worker did not say."""
    expert_ids: Claim | None = None
    """Where the expert ids of its segments lie (`schemas.expert_ids`); None where they were not asked for."""


@record(frozen=True, slots=True)
class Dispatch:
    """A worker took a task: which of its rollouts it plays. Topic `rollouts.progress`, key `task_id`."""

    task_id: str
    group_id: str
    run_id: str
    worker_id: str
    indexes: list[int]
    """Places in the group that it plays; those that the log had already are left out."""
    resumed_turns: list[int]
    """By place in `indexes`: recorded turns that it goes on from; 0 begins anew."""
    lease_until: int
    """When the rollouts end at the latest: with a result, or failed with a reason."""
    at: int


@record(frozen=True, slots=True)
class Turn:
    """One sampled turn of a rollout under way, so that the worker that takes the task over goes on from there.

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
    """Counts the turns of the rollout from 0."""
    n_tokens: int
    token_ids: bytes
    """u4[n_tokens], little-endian."""
    logprobs: bytes
    """f4[n_tokens], little-endian: the sampler's logprob of each token."""
    spans: list[VersionSpan]
    """In turn coordinates; they cover every token."""
    finish_reason: str
    at: int
    context: str = ""
    """xxh3-128, hexadecimal, of the u4 token ids that it was sampled after, and of the temperature where it was not 1;
    after others it cannot be used again."""
    expert_ids: bytes = b""
    """Expert ids (`schemas.expert_ids`) of the tokens up to the last one, from the first whose ids no earlier turn of
    its context has. Empty where they were not asked for."""


@record(frozen=True, slots=True)
class Tick:
    """Event time moves on in an idle partition. Written to the topic whose clock it advances."""

    source: str
    at: int


@record(frozen=True, slots=True)
class GroupMember:
    """A reference to one rollout of a group, with group assembly's decision on it."""

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
    """An assembled GRPO group: references, not copies. Topic `groups`, key `group_id`."""

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
    """True in the control run: rewards were permuted within the group before the advantages were taken."""


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
    """Where the chunks of one shard of a version lie in the log."""

    shard: int
    topic: str
    partition: int
    offsets: list[int]
    """One offset a chunk, in sequence order."""
    n_bytes: int
    digest: str
    """xxh3-128 of the concatenated payloads, hexadecimal."""
    uri: str | None = None
    """The object that holds the payloads instead of the log (claim check); `offsets` is then empty."""


@record(frozen=True, slots=True)
class TensorTable:
    """The tensors of a version as an object beside the log (claim check), for a list too long for one record."""

    uri: str
    n_tensors: int
    n_bytes: int
    digest: str
    """xxh3-128 of the object, hexadecimal."""


@record(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a version in checkpoint coordinates."""

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
    """The version that the delta applies to; None for a version that exists only as an anchor."""
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
    """When the optimizer step that made the version ended; step-to-served time starts here."""
    published_at: int
    tensor_table: TensorTable | None = None
    """Where the tensors are listed when `tensors` is empty because the list is too long for one record."""
    incarnation: str = ""
    """Names this life of the run's version numbers: made anew with version 0, carried by every later version.
    Versions of different incarnations cannot be compared. Empty in records from before there was one."""
    serving_format: str = ""
    """Format whose codes and scales the linear weights' values stand for, such as mxfp8; the values travel as `tensors`
    says, so without codes. Empty where the values are rounded to the type of the tensor alone."""


@record(frozen=True, slots=True)
class SkipDelta:
    """A second way to a version: one delta from an older version than its parent, for replicas that fell behind.

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
"""Name, in a CANARY's numbers, of the canary pool's part of the users, 0 to 1."""


@record(frozen=True, slots=True)
class GateDecision:
    """Which version a branch may serve. Topic `gate.decisions`, key `branch`. The newest one of a branch holds."""

    run_id: str
    branch: str
    verdict: GateVerdict
    version: int | None
    """The version spoken of; None for a release."""
    reason: str
    decided_by: str
    """The author of the decision: a person's name, or the name of the gate."""
    numbers: dict[str, float]
    """The numbers that the decision rests on, by metric."""
    at: int


@record(frozen=True, slots=True)
class WeightAck:
    """The ledger: what a replica holds, proved or not. Topic `weights.acks`, key `replica_id`."""

    replica_id: str
    region: str
    run_id: str
    branch: str
    incarnation: str
    """Changes when the replica's process changes."""
    pid: int
    version: int
    """The version spoken of."""
    serving_version: int
    """The version served after this record."""
    status: AckStatus
    reason: str
    fingerprint: str
    """Fingerprint computed from the live engine's tensors; empty when refused before the apply."""
    expected_fingerprint: str
    fetch_ms: float
    decode_ms: float
    pause_ms: float
    apply_ms: float
    proof_ms: float
    step_to_served_ms: float
    decode_step_ms: float
    """The engine's own median time between tokens over the last seconds; 0 when idle."""
    requests_in_flight: int
    at: int


@record(frozen=True, slots=True)
class StepInput:
    """One group that a step trained on, by its place in the log."""

    group_id: str
    topic: str
    partition: int
    offset: int


@record(frozen=True, slots=True)
class StepExclusion:
    """One group that was read and not trained, with the reason: its one explicit, counted ending."""

    group_id: str
    topic: str
    partition: int
    offset: int
    reason: str
    rollouts: int


@record(frozen=True, slots=True)
class LagCount:
    """`tokens` trained tokens had policy lag `lag` (trainer version minus token version)."""

    lag: int
    tokens: int


@record(frozen=True, slots=True)
class TrainStep:
    """One optimizer step: everything needed to run it again. Topic `train.steps`, key `run_id`."""

    run_id: str
    step: int
    version: int
    """The version that this step made."""
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
    """Which life of the run's version numbers `version` counts in; empty in records from before there was one."""


@record(frozen=True, slots=True)
class StepPlan:
    """A step that is about to be taken, written before it is: a trainer that stops in between takes it on the same
    inputs. Topic `train.steps`, key `run_id`."""

    run_id: str
    step: int
    parent_version: int
    inputs: list[StepInput]
    exclusions: list[StepExclusion]
    seed: int
    config_hash: str
    metrics: dict[str, float]
    """The numbers of the step's record that are known before the step is taken."""
    incarnation: str
    trainer: str
    """The process that began it; another one when the trainer was started again."""
    at: int


@record(frozen=True, slots=True)
class Staleness:
    """Policy lag of the tokens of one replica in one batch. Topic `staleness`, key `replica_id`."""

    run_id: str
    replica_id: str
    region: str
    stage: str
    """"train": the lag of trained tokens. "serve": of what a replica serves; `LagCount.tokens` then counts requests."""
    step: int
    version: int
    lag: list[LagCount]
    at: int


@record(frozen=True, slots=True)
class MismatchSlice:
    """How far apart sampler and trainer are on some tokens of a step: one part of the difference, one set of tokens.

    The numbers are of the difference d = log pi_trainer - log pi_sampler, token by token, in nats.
    """

    part: str
    """Which part of the difference: `all` of it; `engines`, of equal weights; `staleness`, what the weights learnt
    since they sampled; `lagged`, all of it for tokens of older weights."""
    dimension: str
    """The common property of the tokens: "all" of them, or their environment, replica, lag, position, turn, place or
    probability."""
    value: str
    """Its value for these tokens."""
    tokens: int
    k1: float
    """Mean of -d."""
    k3: float
    """Mean of exp(d) - 1 - d, never negative: the estimate of the KL divergence."""
    p50: float
    p99: float
    max: float
    """Quantiles and maximum of |d|."""
    beyond_2: float
    """Share of tokens whose ratio exp(d) is above 2 or below a half."""
    ess: float
    """Effective sample size: the share of tokens that still counts when each is weighted by exp(d)."""
    cut: int
    """Tokens whose weight the correction bounded, or set to 0."""


@record(frozen=True, slots=True)
class WorstToken:
    """One of the tokens of a step on which sampler and trainer are farthest apart, and where it lies."""

    record_id: str
    """Of its rollout or interaction."""
    environment: str
    """Empty for an interaction."""
    replica_id: str
    version: int
    """The weights that sampled it."""
    lag: int
    segment: int
    """Counts the segments of the record from 0."""
    position: int
    """In the segment."""
    turn: int
    """Counts the turns of the record from 0."""
    token_id: int | None
    """None for an interaction, so that nothing of an erased user's answer is left here."""
    sampler_logprob: float
    trainer_logprob: float
    """At the weights that the step started from."""
    weight: float
    """That the correction gave it."""
    sampler_experts: str = ""
    """The experts that the sampler sent the token before it to, which predicted it: of each layer with experts, layers
    divided by spaces, as in "0,3 2,7". Empty where they are not known."""
    trainer_experts: str = ""
    """The experts that the trainer's own routers chose for the same token."""


@record(frozen=True, slots=True)
class Mismatch:
    """How far apart sampler and trainer were on the tokens of one step. Topic `train.mismatch`, key `run_id`.

    A repeated record of a run and step says the same: the first one counts.
    """

    run_id: str
    step: int
    version: int
    """The version that the step started from: the trainer's logprobs are of its weights."""
    tokens: int
    slices: list[MismatchSlice]
    worst: list[WorstToken]
    """Farthest apart first."""
    alarms: list[str]
    """`part/number` of each number of a whole part that is beyond its bound."""
    tokens_routed_otherwise: float | None
    """Share of tokens for which the trainer chose other experts than the sampler in at least one layer; None where the
    sampler's experts are not known."""
    layers_routed_otherwise: float | None
    """The same share of pairs of token and layer."""
    seconds: float
    """That the measuring took."""
    at: int
    """When the step ended."""
    incarnation: str = ""
    """Which life of the run's version numbers `version` counts in."""


@record(frozen=True, slots=True)
class Document:
    """One document of the mid-training corpus. Topic `documents`, key `document_id`."""

    document_id: str
    source: str
    text: str


@record(frozen=True, slots=True)
class Interaction:
    """One answer served to a user: a rollout without a reward yet. Topic `interactions`, key `interaction_id`."""

    interaction_id: str
    run_id: str
    branch: str
    user_id: str
    """Pseudonym of the user: a keyed hash, never the product's own identifier."""
    session_id: str
    """Conversation that the answer belongs to; empty when the product names none."""
    arm: str
    """An `Arm`: the pool of replicas that answered, or `fallback`."""
    propensity: float
    """Probability with which the arm was chosen, when it was."""
    consent: bool
    """Whether the user allows training on this interaction."""
    segments: list[Segment]
    """The prompt, then the answer."""
    claim: Claim | None
    """Where `segments` lie when they are above the claim-check limit; then `segments` is empty."""
    prompt_tokens: int
    sampled_tokens: int
    version_min: int
    """Oldest weight version among the sampled tokens; -1 when none was sampled."""
    version_max: int
    replica_id: str
    region: str
    finish_reason: str
    """As the engine says it, or "abandoned" when the client went away first."""
    first_token_ms: float
    latency_ms: float
    """From the request's arrival to the last token."""
    served_at: int
    """When the answer was complete; every signal's horizon is counted from here."""
    incarnation: str = ""
    """Which life of the run's version numbers `version_min`, `version_max` and the spans count in; empty where the
    replica did not say."""
    sampling: SamplingParameters | None = None
    """None where the router did not say."""


@record(frozen=True, slots=True)
class Feedback:
    """One signal about one interaction. Topic `feedback`, partitioned by `interaction_id`, key `interaction/event`."""

    event_id: str
    """The same event sent twice has the same id, and counts once."""
    interaction_id: str
    user_id: str
    """Pseudonym of the user who gave it."""
    kind: SignalKind
    value: float | None
    """Read by kind. None, with `corrects`: that event is withdrawn."""
    observed_at: int
    """When it happened, as the product's clock says."""
    source: str
    """The reporter: an SDK's or an API key's name, or the observer that judged."""
    corrects: str | None = None
    """The `event_id` that this one replaces."""


@record(frozen=True, slots=True)
class UserRequest:
    """A user's demand about their data. Topic `user.requests`, key `user_id`; copied into every partition of
    `interactions` and into `outcomes`, so that each reader finds it in its own order."""

    request_id: str
    user_id: str
    wish: UserWish
    requested_by: str
    at: int


@record(frozen=True, slots=True)
class SignalUse:
    """One signal that a reward was made of."""

    kind: SignalKind
    event_id: str
    value: float
    contribution: float
    """The amount that it added to the reward."""
    topic: str
    partition: int
    offset: int


@record(frozen=True, slots=True)
class Outcome:
    """How an interaction ended: one reward, or one exclusion with its reason. Topic `outcomes`, key `interaction_id`.

    A later record of the same interaction with a higher `revision` is a correction that came after the end.
    """

    interaction_id: str
    run_id: str
    branch: str
    user_id: str
    arm: str
    topic: str
    partition: int
    offset: int
    """With `topic` and `partition`: where the interaction lies."""
    version_min: int
    version_max: int
    sampled_tokens: int
    latency_ms: float
    reward: float | None
    """None when excluded."""
    exclusion: str
    """Why it is not trained; empty when it has a reward."""
    signals: list[SignalUse]
    """The signals that make up the reward, in order of event id."""
    observed: dict[str, float]
    """Every signal that was seen, by kind, whether the map gives it weight or not: guardrails read it."""
    map_version: str
    """Name and hash of the signal-to-reward map."""
    revision: int
    """0: the end. n: the n-th correction after it."""
    previous_reward: float | None
    """For a correction: the reward before it."""
    served_at: int
    feedback_at: int | None
    """When the newest signal in `signals` was observed: feedback-to-served time starts here."""
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
    """For a correction: what the reward changed by."""
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
    """Counts the batches of a run and branch from 0."""
    version: int
    """The one version that every member was sampled under; corrections aside, where the policy lets them in."""
    members: list[OnlineMember]
    """Sorted by interaction_id."""
    tokens: int
    """Sampled tokens of the members."""
    closed_by: BatchClose
    dropped: dict[str, int]
    """Outcomes read since the batch before that are in no batch, by reason."""
    selection: dict[str, float]
    """Served against trained: means and shares of both, named `served/...` and `trained/...`."""
    map_version: str
    opened_at: int
    closed_at: int
    """Event times of its first outcome and of the record that closed it."""


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
    """The id of the rollout at an index of a group: a repeated rollout has the id of the first one."""
    return f"{group_id}/{index}"


def rollout_index(rollout_id: str) -> int | None:
    """The index in its group that a rollout's id names; None for an id of another scheme."""
    number = rollout_id.rpartition("/")[2]
    return int(number) if number.isdecimal() else None
