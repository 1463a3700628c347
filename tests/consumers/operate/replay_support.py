"""Records for the tests of replay, and a log with trained groups."""

from __future__ import annotations

import numpy as np

from tests.records import build
from tidemill.schemas.records import (
    Group,
    GroupMember,
    Rollout,
    Segment,
    StepExclusion,
    StepInput,
    TrainStep,
    VersionSpan,
)

TOKENS = 3


def rollout(rollout_id, group_id, *, index=0, reward=1.0, finished_at=1_000_000):
    """Return a rollout of three tokens, of which the last two were sampled."""
    segment = Segment(
        n_tokens=TOKENS,
        token_ids=np.array([1, 2, 3], dtype="<u4").tobytes(),
        loss_mask=np.array([0, 1, 1], dtype="u1").tobytes(),
        logprobs=np.array([0, -0.5, -0.25], dtype="<f4").tobytes(),
        spans=[VersionSpan(0, 1, 3)],
    )
    return build(Rollout, rollout_id=rollout_id, group_id=group_id, index=index, group_size=2,
                 deadline_at=finished_at + 10**9, segments=[segment], reward=reward, success=True, turns=1,
                 prompt_tokens=1, sampled_tokens=2, finished_at=finished_at)  # fmt: skip


def group(group_id, places, *, ids=None):
    """Return a group of rollouts, each at a (topic, partition, offset)."""
    names = ids or [f"r{offset}" for _, _, offset in places]
    members = [
        build(GroupMember, rollout_id=name, topic=topic, partition=partition, offset=offset, reward=1.0,
              advantage=0.5 - n, success=True, sampled_tokens=2)
        for n, (name, (topic, partition, offset)) in enumerate(zip(names, places, strict=True))
    ]  # fmt: skip
    return build(Group, group_id=group_id, members=members, mean_reward=0.5)


def step(number, inputs, exclusions):
    """Return the record of a step that read groups at some positions."""
    read = [StepInput(f"g{place[2]}", *place) for place in inputs]
    left_out = [StepExclusion(f"g{place[2]}", *place, "stale", 2) for place in exclusions]
    return build(TrainStep, step=number, inputs=read, exclusions=left_out)
