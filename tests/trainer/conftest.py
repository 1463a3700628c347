"""Synthetic rollouts and groups, and a tiny model that trains on them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.records import build, member_of, tensor_infos
from tidemill.kernels.weights.bits import total_fingerprint
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import RunSettings
from tidemill.schemas.expert_ids import ExpertIds
from tidemill.schemas.records import (
    CloseReason,
    Group,
    GroupMember,
    Interaction,
    Mode,
    OnlineBatch,
    OnlineMember,
    RewardComponent,
    Rollout,
    Segment,
    StepInput,
    VersionSpan,
)
from tidemill.trainer.batch import pack, routed_tokens
from tidemill.trainer.batch_builder import BatchBuilder
from tidemill.trainer.config import KlSettings, OnlineSettings, OptimizerSettings, TrainerSettings
from tidemill.trainer.online_queue import OnlineQueue, WeightLine
from tidemill.trainer.policy import frozen_logprobs
from tidemill.trainer.serving_view import ServingView
from tidemill.trainer.trainable import TopicProgress, TrainableBatch, TrainableGroup

VOCAB = 64


def tiny_model(seed: int = 0, *, tied: bool = True) -> PreTrainedModel:
    """Make a random Qwen3 of two layers; `tied`: one weight is both its embedding and its head."""
    torch.manual_seed(seed)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            tie_word_embeddings=tied,
            max_position_embeddings=256,
            **shape,
        )
    )


def make_segment(seed: int, n_tokens: int = 24, version: int = 0, later: int | None = None) -> Segment:
    """Make a prompt, a sampled turn, tool output, a second turn (of version `later`, if given), more tool output."""
    rng = np.random.default_rng(seed)
    mask = np.zeros(n_tokens, np.uint8)
    first, second = (6, n_tokens // 2), (n_tokens // 2 + 4, n_tokens - 2)
    mask[slice(*first)] = mask[slice(*second)] = 1
    logprobs = np.where(mask, -np.log(VOCAB) + rng.normal(0, 0.1, n_tokens), 0).astype("<f4")
    return Segment(
        n_tokens=n_tokens,
        token_ids=rng.integers(0, VOCAB, n_tokens).astype("<u4").tobytes(),
        loss_mask=mask.tobytes(),
        logprobs=logprobs.tobytes(),
        spans=[VersionSpan(version, *first), VersionSpan(version if later is None else later, *second)],
    )


def make_rollout(
    group_id: str, index: int, reward: float, size: int = 4, version: int = 0, **changes: object
) -> Rollout:
    """Make a completed rollout whose tokens depend only on its name."""
    seed = sum(map(ord, group_id)) * 100 + index
    made = make_segment(seed, 20 + seed % 13, version)
    sampled = int(made.mask().sum())
    made_rollout = build(Rollout, rollout_id=f"{group_id}-{index}", group_id=group_id, environment="test", index=index,
                         group_size=size, segments=[made], rewards=[RewardComponent("correct", reward, 1.0)],
                         reward=reward, success=reward > 0.5, turns=2, prompt_tokens=6, sampled_tokens=sampled,
                         version_min=version, version_max=version, replica_id=f"replica-{index % 2}",
                         worker_id="worker")  # fmt: skip
    return replace(made_rollout, **changes)


def make_group(group_id: str, members: list[GroupMember], **changes: object) -> Group:
    """Make a group that was closed by size."""
    rewards = [member.reward for member in members if member.reward is not None]
    made = build(Group, group_id=group_id, environment="test", members=members,
                 mean_reward=sum(rewards) / len(rewards) if rewards else None)  # fmt: skip
    return replace(made, **changes)


def bare_group(name: str, kind: str = "good", version: int = 0, closed_at: int = 0) -> Group:
    """Make a group of two rollouts that are not stored; `kind` is good, eval, late, no_signal or foreign."""
    members = [
        build(
            GroupMember,
            rollout_id=f"{name}-{i}",
            topic="rollouts",
            offset=i,
            reward=1.0 if kind == "no_signal" else 1.0 - i,
            advantage=0.0,
            success=True,
            sampled_tokens=1,
            version_min=version,
            version_max=version,
        )
        for i in range(2)
    ]
    return build(Group, group_id=name, run_id="other" if kind == "foreign" else "run", environment="test",
                 mode=Mode.EVAL if kind == "eval" else Mode.TRAIN, expected_size=2, members=members, mean_reward=0.5,
                 closed_by=CloseReason.LATE if kind == "late" else CloseReason.SIZE, closed_at=closed_at)  # fmt: skip


def make_trainable(group_id: str, rewards: tuple[float, ...] = (1.0, 0.0, 1.0, 0.0), **changes: object):
    """Make a group that can be trained on."""
    size = len(rewards)
    rollouts = [make_rollout(group_id, index, reward, size, **changes) for index, reward in enumerate(rewards)]
    members = [member_of(record, 0, index) for index, record in enumerate(rollouts)]
    place = StepInput(group_id, Topic.GROUPS.value, 0, sum(map(ord, group_id)))
    return TrainableGroup(place, make_group(group_id, members), tuple(rollouts))


def drawn_experts(group: TrainableGroup, experts: Sequence[int], layers: int, seed: int = 0) -> tuple[ExpertIds, ...]:
    """Draw u1[tokens, layers, 2] for each rollout of a group: for a token and layer two of `experts`, in any order."""
    random = np.random.default_rng(seed)
    sizes = [sum(map(routed_tokens, rollout.segments)) for rollout in group.rollouts]
    drawn = [random.permuted(np.tile(np.array(experts), (size, layers, 1)), axis=-1) for size in sizes]
    return tuple(ids[..., :2].astype(np.uint8) for ids in drawn)


def make_interaction(name: str, version: int = 0, **changes: object) -> Interaction:
    """Make an answer served to the user `user-<name>`; its tokens depend only on its name."""
    seed = sum(map(ord, name)) * 7
    made = make_segment(seed, 20 + seed % 13, version)
    served = build(Interaction, interaction_id=name, user_id=f"user-{name}", propensity=0.9, segments=[made],
                   prompt_tokens=6, sampled_tokens=int(made.mask().sum()), version_min=version, version_max=version,
                   replica_id=f"replica-{seed % 2}", first_token_ms=1.0, latency_ms=2.0, served_at=1000)  # fmt: skip
    return replace(served, **changes)


def make_online_member(record: Interaction, reward: float, offset: int = 0, partition: int = 0, **changes: object):
    """Make an online batch's reference to an interaction."""
    same = ("interaction_id", "user_id", "sampled_tokens", "version_min", "version_max", "arm")
    place = {"topic": Topic.INTERACTIONS.value, "partition": partition, "offset": offset}
    of_record = {name: getattr(record, name) for name in same}
    return build(OnlineMember, **{"reward": reward, **place, **of_record, **changes})


def make_online_batch(batch_id: str, members: list[OnlineMember], version: int = 0, **changes: object) -> OnlineBatch:
    """Make a batch that was closed by its number of tokens."""
    made = build(OnlineBatch, batch_id=batch_id, version=version, members=members,
                 tokens=sum(member.sampled_tokens for member in members), map_version="map")  # fmt: skip
    return replace(made, **changes)


def make_trainable_batch(batch_id: str, rewards: tuple[float, ...], **changes: object) -> TrainableBatch:
    """Make an online batch that can be trained on; keyword arguments change its interactions."""
    served = [make_interaction(f"{batch_id}-{index}", **changes) for index in range(len(rewards))]
    members = [
        make_online_member(record, reward, i) for i, (record, reward) in enumerate(zip(served, rewards, strict=True))
    ]
    place = StepInput(batch_id, Topic.ONLINE_BATCHES.value, 0, sum(map(ord, batch_id)))
    return TrainableBatch(place, make_online_batch(batch_id, members), tuple(members), tuple(served))


def settings_of(**changes: object) -> TrainerSettings:
    """Return settings with which the tiny model's weights change at every step, without a reference model."""
    kl, optimizer = KlSettings(coefficient=0.0), OptimizerSettings(learning_rate=1e-3)
    return TrainerSettings(**{"kl": kl, "optimizer": optimizer, "row_tokens": 128, **changes})


def resampled(model: torch.nn.Module, played: Rollout) -> Rollout:
    """Return a one-segment rollout with the logprobs that a trainer's model computes for its tokens."""
    (made,) = played.segments
    logprobs = np.zeros(made.n_tokens, "<f4")
    logprobs[made.mask() == 1] = frozen_logprobs(model, pack([played], 1000, VOCAB)[0]).numpy()
    return replace(played, segments=[replace(made, logprobs=logprobs.tobytes())])


def builder_of(progress: TopicProgress | None = None, incarnation: str | None = None, **changes: object):
    """Make a batch builder for steps of two groups; keyword arguments change settings of the run and the trainer."""
    run = {"run_id": "run", "groups_per_step": 2, "max_policy_lag": 2, "min_completed": 2}
    return BatchBuilder(*_sections({**run, "remembered_groups": 100, **changes}), progress, incarnation)


def queue_of(
    line: WeightLine, progress: TopicProgress | None = None, incarnation: str | None = None, **changes: object
) -> OnlineQueue:
    """Make a queue of online batches; keyword arguments change settings of run, trainer and `trainer.online`."""
    of_online = {name: changes.pop(name) for name in [*changes] if name in OnlineSettings.model_fields}
    online = OnlineSettings(**{"require_admission": False, **of_online})
    run, trainer = _sections({"run_id": "run", "max_policy_lag": 2, "remembered_groups": 100, **changes})
    return OnlineQueue(run, trainer.model_copy(update={"online": online}), line, progress, incarnation)


def _sections(values: dict[str, object]) -> tuple[RunSettings, TrainerSettings]:
    of_run = {name: value for name, value in values.items() if name in RunSettings.model_fields}
    others = {name: value for name, value in values.items() if name not in of_run}
    return RunSettings(**of_run), TrainerSettings(**others)


def fingerprint_of(view: ServingView) -> str:
    """Compute the fingerprint of all weights of a view, hexadecimal, as `train.steps` and the manifests record it."""
    return total_fingerprint(tensor_infos(view)).hex()


@pytest.fixture
def run_id() -> str:
    """The name of a run that only this test uses, so that tests can share topics."""
    return uuid.uuid4().hex


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the tiny model in bf16, which no test may change."""
    directory = tmp_path_factory.mktemp("tiny")
    tiny_model().to(torch.bfloat16).save_pretrained(directory)
    return str(directory)
