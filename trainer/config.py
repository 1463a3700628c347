"""Settings of the trainer role.

The fields that affect the arithmetic are hashed, with the machine, into every `train.steps` record: two steps with the
same inputs, seed and hash give the same weights.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Self

from pydantic import Field, model_validator

from tidemill.kernels.weights.config import PublishSettings
from tidemill.schemas.config import Section
from tidemill.trainer.choices import (
    CORRECT_THEMSELVES,
    ONE_PROCESS,
    BaselineKind,
    Compute,
    CorrectionKind,
    Estimator,
    Experts,
    Forward,
    ObjectiveName,
    Routing,
    ServingActivations,
    ServingFormat,
    StepMachine,
    all_machines,
)


class OnlineSettings(Section):
    """Learning from users: one large step per online batch, by REINFORCE, with simulated groups mixed in.

    `enabled`, `baseline`, `simulated_weight` and `learning_rate_scale` affect the arithmetic of a step.
    """

    enabled: bool = False
    """Take a step for each online batch, and not whenever there are enough groups; follow `gate.decisions`."""

    baseline: BaselineKind = BaselineKind.LEAVE_ONE_OUT
    """The number that is subtracted from an interaction's reward: `leave_one_out`, the mean of the others' rewards;
    `arm`, the same among the interactions of its experiment arm; `mean`, the mean of the batch; `none`, which is
    right if the rewards are already balanced around a target rate (accepted 1 - rate, rejected -rate)."""

    simulated_groups_per_batch: int = Field(default=0, ge=0)
    """Maximum number of simulated groups that join each online batch; 0: none. Further groups become stale."""

    max_wait_seconds: float = Field(default=30.0, ge=0)
    """Maximum time that an online batch waits for its simulated groups; then it is trained with the available ones."""

    simulated_weight: float = Field(default=1.0, ge=0)
    """Weight of the loss of the simulated groups in a step; the online batch has weight 1."""

    learning_rate_scale: float = Field(default=1.0, gt=0)
    """Learning rate of a step with an online batch, as a multiple of the optimizer's."""

    max_policy_lag: int = Field(default=0, ge=0)
    """Maximum number of versions that an online batch may be behind the trainer, counted along the ancestors of the
    trainer's version. 0: strictly on-policy. Above 0, the batch is weighted by `correction`."""

    min_members: int = Field(default=2, ge=1)
    """A batch with fewer remaining interactions (corrections not counted) is not trained."""

    require_admission: bool = True
    """Learn only from versions that the gate admitted, which passed the floor, and from their descendants."""

    @model_validator(mode="after")
    def _baseline_has_others(self) -> Self:
        if self.min_members < 2 and self.baseline is not BaselineKind.NONE:
            raise ValueError(
                f"online.baseline {self.baseline} compares an interaction with others: set online.min_members to 2 or "
                "more, or online.baseline to none"
            )
        return self


ONLINE_ARITHMETIC_FIELDS = ("baseline", "simulated_weight", "learning_rate_scale")


class CorrectionSettings(Section):
    """Importance weights between the sampler and the trainer."""

    kind: CorrectionKind = CorrectionKind.TIS
    """Method that bounds the ratio of trainer to sampler probability."""

    low: float = Field(default=0.5, ge=0)
    """Lower bound of the ratio, for `mis` and `geometric`."""

    high: float = Field(default=2.0, gt=0)
    """Upper bound of the ratio."""

    @model_validator(mode="after")
    def _bounds_leave_a_ratio(self) -> Self:
        if self.kind in (CorrectionKind.MIS, CorrectionKind.GEOMETRIC) and self.low > self.high:
            raise ValueError(
                f"correction.low {self.low:g} is above correction.high {self.high:g}: that would mask every token"
            )
        return self


class KlSettings(Section):
    """KL penalty towards the reference, which is the checkpoint that the run started from."""

    coefficient: float = Field(default=0.001, ge=0)
    """Weight of the divergence; with 0, the reference's forward pass is not computed."""

    in_loss: bool = False
    """False: in the reward, without gradient, as Composer 2 does. True: a term of the loss, as GRPO does."""

    estimator: Estimator = Estimator.K1
    """In the reward k1; in the loss k2 or k3."""

    @model_validator(mode="after")
    def _place_fits_estimator(self) -> Self:
        if self.in_loss and self.estimator is Estimator.K1:
            raise ValueError(
                "kl.estimator k1 in the loss has a zero expected gradient, so it would do nothing: "
                "use kl.in_loss false (k1 in the reward) or kl.estimator k3"
            )
        if not self.in_loss and self.estimator is not Estimator.K1:
            raise ValueError(f"kl.estimator {self.estimator} applies to the loss only: set kl.in_loss true, or use k1")
        return self


class OptimizerSettings(Section):
    """AdamW over the fp32 master weights."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """Step size after the warm-up."""

    decay_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate falls linearly to its final share, then constant. 0: no decay."""

    final_learning_rate: float = Field(default=0.1, ge=0, le=1)
    """Learning rate after the decay, as a share of `learning_rate`."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moments."""

    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""


class TrainerSettings(Section):
    """The trainer: batches from the log, the objective, the step, versions and checkpoints."""

    model: str = "data/model"
    """Directory of the Hugging Face causal model that the run starts from; also the KL reference."""

    objective: ObjectiveName = ObjectiveName.COMPOSER2
    """The policy-gradient objective."""

    clip_low: float | None = Field(default=None, ge=0)
    """Lower clip range of the policy ratio; None: the objective's published value. Objectives that do not clip ignore
    both: composer2, rloo and reinforce."""

    clip_high: float | None = Field(default=None, ge=0)
    """Upper clip range of the policy ratio; None: the objective's published value."""

    length_divisor: float = Field(default=128.0, gt=0)
    """Constant by which composer2 and dr_grpo divide instead of a rollout's length, and every objective an answer's in
    an online batch."""

    behaviour_cap: float = Field(default=2.0, gt=0)
    """Bound of the behaviour weight of decoupled_ppo."""

    correction: CorrectionSettings = CorrectionSettings()
    """Importance weights between sampler and trainer."""

    kl: KlSettings = KlSettings()
    """KL penalty towards the reference."""

    optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates into which a batch is split; the policy changes after each of them."""

    row_tokens: int = Field(default=1024, ge=16)
    """Maximum tokens of one forward pass, shared ones counted once; a longer rollout has a row of its own. Even a short
    row takes a GPU the time to launch all its kernels: there, use 16384 or more, as far as the memory allows."""

    share_prefixes: bool = True
    """Compute the common first tokens of the segments of a forward pass once: the prompt of a group, turns that
    branches share. Off: each segment is computed by itself, with the same results except for rounding."""

    batch_invariant: bool = False
    """Give each rollout a row of its own (`row_tokens` is ignored), so that its logprobs do not depend, in any bit, on
    the other rollouts of the step. Prompts are shared within a rollout only. Also set by `numerics.batch_invariant`."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device that computes the steps: `cpu`; `cuda`, or `cuda:N` for the GPU with that number; `auto`, a GPU if there
    is one. Under torchrun each rank uses the GPU of its local rank. Results are reproducible on one kind of device."""

    compute: Compute = Compute.AUTO
    """Type of the computation: `float32`; `bfloat16`, with master weights and summed gradients in float32; `auto`,
    bfloat16 on a GPU and float32 on a CPU. Results are reproducible for one type."""

    checkpoint_activations: bool = False
    """Compute each layer a second time for its gradients, so that a row needs memory for the activations of one layer
    and not of all: about a third more work for the same results."""

    experts: Experts | None = None
    """Implementation of a mixture-of-experts model's experts; the last bits of the results depend on it. Not set: the
    one that transformers chooses. Set it for runs that will be repeated with a later version of transformers."""

    expert_parallel: int = Field(default=1, ge=1)
    """Number of consecutive ranks over which the experts of a mixture-of-experts model are divided. A rank computes
    only its own experts, also for the tokens of the other ranks, so that it never gathers all experts of a layer. This
    saves memory and traffic if the model has many experts, but a rank with popular experts has more work. The number of
    ranks and the number of experts must be multiples of it, and it should not exceed the ranks of one machine. All
    other weights are sharded over all ranks. The last bits of the results depend on it. 1: off."""

    routing: Routing = Routing.OFF
    """Routing of tokens to experts in a mixture of experts: `off`, by the trainer's routers only; `replayed`, to the
    experts that the sampler used, with the trainer's own scores of these; `shuffled`, as a control, to the experts that
    the sampler used for other tokens of the row; `own`, as `off`, and the share of tokens that the sampler routed
    differently is reported. All but `off` need rollouts with expert ids (rollout.expert_ids, replica.expert_ids); a
    rollout without them, or with ids that do not fit the model, is not trained but counted."""

    routing_plausible: float = Field(default=0.0, ge=0, lt=1)
    """With `replayed`: an expert of the sampler is replaced by the most probable other one if its probability is below
    this share of the smallest one that the router chose itself. 0: every token is routed as it was sampled."""

    serving_format: ServingFormat = ServingFormat.BF16
    """Format of the linear weights that replicas serve: `bf16`; `fp8_blocks`, E4M3 with a scale for 128 x 128; `mxfp8`,
    E4M3 with a scale for 32 of a row; `nvfp4`, E2M1 with E4M3 scales for 16 of a row and an outer scale for each row
    (`kernels/quantise.py`). The version contains the values of codes and scales, which bf16 represents exactly.
    Embeddings, the head, routers, norms and biases stay bf16, and so does the KV cache."""

    serving_activations: ServingActivations = ServingActivations.NONE
    """Format to which replicas and the trainer round the inputs of the layers whose weights have `serving_format`, each
    token by itself: `fp8_rows`, E4M3 with a scale for 128 of a row; `mxfp8` and `nvfp4`, as for weights. The products
    are computed with the values of codes and scales; gradients pass the rounding unchanged (straight-through). Replicas
    on a GPU refuse it. `none`: inputs are not rounded."""

    forward: Forward = Forward.MATCHED
    """Weights that the trainer computes with: `matched`, the served ones, in `serving_format`, with gradients that are
    applied to the master weights unchanged (straight-through); `masters`, to compare, the master weights in bf16: then
    trainer and sampler differ by the format's rounding error, and activations are not rounded in the trainer. The KL
    reference has the same format as the policy."""

    threads: int = Field(default=1, ge=1)
    """Threads of the tensor library; results are reproducible for a fixed number."""

    step_timeout_s: float = Field(default=3600.0, gt=0)
    """Timeout of one iteration of the trainer's loop, such as a step with its publication, after which the process
    counts as hung and ends (with `kafka.stall_timeout_s` 0: never)."""

    ranks_timeout_s: float = Field(default=600.0, gt=0)
    """Timeout of a rank that waits for the others, under torchrun; then it ends. It must be longer than the slowest
    rank's share of a row, of a publication and of a checkpoint, and than the difference of their start times."""

    min_step_seconds: float = Field(default=0.0, ge=0)
    """Minimum time between the starts of two steps, to slow the trainer down on purpose."""

    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints; one is also written on stopping."""

    keep_checkpoints: int = Field(default=3, ge=1)
    """Newest checkpoints kept in the store."""

    publish: PublishSettings = PublishSettings()
    """Publication of the weight versions."""

    publish_beside: bool = True
    """Publish a version in a thread of each rank, at the same time as the next step: only the record of that step, a
    checkpoint and going back to an older version wait for it. Weights and records are the same, bit for bit. The thread
    reads the copy of the weights that was made for their fingerprint, so it needs no other copy. The memory of the
    encoder (`kernels/encoder.py`: some blocks, and up to 64 MiB of output) is needed in addition to the activations.
    Off: the trainer waits for every publication, and the two are not in memory together."""

    read_ahead_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Bytes of rollouts in memory that were read before the groups that refer to them; older ones are fetched again."""

    max_waiting_batches: int = Field(default=16, ge=1)
    """Maximum groups that wait in memory to be trained, counted in batches; then `groups` is not read further."""

    remembered_groups: int = Field(default=20_000, ge=1)
    """Number of remembered ids of groups, and of online batches, so that a duplicate is not trained again."""

    in_order: bool = False
    """Train the groups strictly in log order, and decide each at the version that the batches before it give. The
    weights of every step then depend on `groups` and `rollouts` only, and not on timing or stops. Needs
    `groups` in one partition (kafka.partitions 1)."""

    accept_replays: tuple[str, ...] = ()
    """Ids of replays whose records are trained; records of other replays are excluded and counted as `replayed`."""

    score_older_every: int = Field(default=10, ge=0)
    """Interval, in steps, at which some tokens of older weights are also scored with those weights, to separate the
    mismatch between engines at equal weights from that of staleness (`tidemill query mismatch`). In such a step the
    first row of each rank is computed again, without gradients; a copy of the weights is kept for one step (2 bytes a
    parameter, sharded as they are). 0: never."""

    accept_other_sampling: bool = False
    """Train also tokens sampled at a temperature other than 1, or from a part of the distribution. Their recorded
    logprobs are from the model's own distribution, so their weights between sampler and trainer are wrong. Off: they
    are excluded and counted as `other_sampling`."""

    online: OnlineSettings = OnlineSettings()
    """Learning from users."""

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> Self:
        if self.objective in CORRECT_THEMSELVES and self.correction.kind is not CorrectionKind.NONE:
            raise ValueError(
                f"{self.objective} contains its own weight between sampler and trainer: set correction.kind to none"
            )
        if self.routing_plausible and self.routing is not Routing.REPLAYED:
            raise ValueError(
                "routing_plausible applies only to replayed experts: set routing to replayed, or routing_plausible to 0"
            )
        if self.routing is not Routing.OFF and self.online.enabled:
            raise ValueError(
                "answers to users are recorded without expert ids: set routing to off, or online.enabled to false"
            )
        if self.forward is Forward.MASTERS and self.serving_format is ServingFormat.BF16:
            raise ValueError("the weights served in bf16 are the master weights in bf16: set forward to matched")
        if self.serving_activations is not ServingActivations.NONE and self.serving_format is ServingFormat.BF16:
            raise ValueError(
                "serving_activations rounds the inputs of layers whose weights are quantised, and serving_format bf16 "
                "has none: set serving_format, or serving_activations to none"
            )
        if not self.online.enabled:
            return self
        if self.in_order:
            raise ValueError(
                "the groups that join an online batch depend on the time that it waited: set in_order to false, or "
                "online.enabled to false"
            )
        if self.minibatches > 1:
            raise ValueError(
                "an online batch is trained in one large step: set minibatches to 1, or online.enabled to false"
            )
        if self.online.max_policy_lag and self.correction.kind is CorrectionKind.NONE:
            raise ValueError(
                "online.max_policy_lag above 0 trains on answers of an older version, which need weights between "
                "sampler and trainer: set correction.kind, tis for instance, or online.max_policy_lag to 0"
            )
        return self

    def arithmetic_hash(self, machine: StepMachine = ONE_PROCESS) -> str:
        """Return the hash of everything that affects the arithmetic of a step on `machine`, 16 hexadecimal digits."""
        return _hash(self._arithmetic(), machine)

    def difference(self, recorded: str, machine: StepMachine) -> str:
        """Describe how a step with the hash `recorded` was trained, and how `machine` trains it with these settings."""
        fields = self._arithmetic()
        for other in all_machines():
            if _hash(fields, other) == recorded:
                return f"by {other}, now by {machine}"
        return f"with other settings (hash {recorded}, now {_hash(fields, machine)})"

    def _arithmetic(self) -> dict[str, Any]:
        fields = self.model_dump(mode="json", include=set(ARITHMETIC_FIELDS))
        # Left out if online mode is off, so that the steps of such runs keep their hash.
        if self.online.enabled:
            fields["online"] = self.online.model_dump(mode="json", include=set(ONLINE_ARITHMETIC_FIELDS))
        # Left out if prefixes are not shared, so that the steps of runs from before this setting keep their hash.
        if self.share_prefixes:
            fields["share_prefixes"] = True
        if self.batch_invariant:
            fields["batch_invariant"] = True
        if self.experts is not None:
            fields["experts"] = self.experts.value
        if self.expert_parallel > 1:
            fields["expert_parallel"] = self.expert_parallel
        # `own` only compares the routing; it changes no bit.
        if self.routing not in (Routing.OFF, Routing.OWN):
            fields["routing"] = [self.routing.value, self.routing_plausible]
        if self.serving_format is not ServingFormat.BF16:
            fields["serving_format"] = [self.serving_format.value, self.forward.value]
        if self.serving_activations is not ServingActivations.NONE:
            fields["serving_activations"] = self.serving_activations.value
        return fields


def _hash(fields: dict[str, Any], machine: StepMachine) -> str:
    shaping = {**fields, **({"machine": machine.arithmetic()} if machine.arithmetic() else {})}
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]


ARITHMETIC_FIELDS = (
    "objective",
    "clip_low",
    "clip_high",
    "length_divisor",
    "behaviour_cap",
    "correction",
    "kl",
    "optimizer",
    "minibatches",
    "row_tokens",
    "threads",
)
