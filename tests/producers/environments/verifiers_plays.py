"""Tasksets of verifiers that a replica plays, for tests/consumers/test_replica_server.py, which has a replica.

Each rollout is played by vLLM and recorded as by a worker.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.producers.rollout.agents import task_of
from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments.base import TaskQuery
from tidemill.producers.environments.open import EnvironmentSet
from tidemill.producers.rollout.endpoint import AgentEndpoint
from tidemill.producers.rollout.player import Player
from tidemill.producers.sampling.replicas import open_replica_client
from tidemill.schemas.chat.format import ChatFormat
from tidemill.schemas.config import EnvironmentEntry
from tidemill.schemas.records import Rollout, RolloutStatus

ROLLOUTS = 4


def play(address: str, chat: ChatFormat, taskset: str, network: bool | None, **options: object) -> list[Rollout]:
    """Return rollouts of one taskset's tasks, played concurrently in the taskset's own process.

    Args:
        network: None if a first process is to learn whether the taskset uses the network, which takes seconds.
    """
    settings = RolloutSettings(
        replicas=[address], max_context_tokens=512, max_turn_tokens=12, environment_timeout_s=300, episode_timeout_s=600
    )
    entry = EnvironmentEntry(name=f"verifiers:{taskset}", options=options, network=network)

    async def main() -> list[Rollout]:
        environments = EnvironmentSet([entry], settings)
        async with open_replica_client(settings) as client, AgentEndpoint() as endpoint:
            player = Player(settings, "w", environments, chat, client, endpoint)
            try:
                await environments.check(chat)
                given = json.dumps(options)
                drafts = (await environments.get(task_of("", entry.name, options=given))).tasks(TaskQuery(3))
                tasks = [task_of(next(drafts).payload, entry.name, options=given) for _ in range(ROLLOUTS)]
                return await asyncio.gather(*(player.play(task, 0) for task in tasks))
            finally:
                await environments.close()

    return asyncio.run(main())


CASES: dict[str, tuple[str, dict[str, Any], set[str], set[str], int | None]] = {
    "one turn": ("vf_sums", {}, {"correct", "short"}, {"length"}, 1),
    "a simulated user": (
        "vf_sums", {"env": {"id": "user-sim"}, "max_turns": 3}, {"assistant.correct", "assistant.short"},
        {"assistant.user_turns", "user.truncated"}, None,
    ),
    "tools of a server": ("vf_tools", {"max_turns": 4}, {"correct"}, {"calls"}, None),
    "a judge that is the replica as well": (
        "vf_judged", {"others_url": "replica", "others_model": "tidemill"}, {"approved"}, {"truncated"}, 1
    ),
}  # fmt: skip
"""Taskset, options, names of the reward components, some metrics, and the number of turns if it is known."""


def check_case(name: str, address: str, chat: ChatFormat, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a case with the replica at an address, which serves a version, and check the rollouts."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("tasksets")))
    taskset, options, rewards, metrics, turns = CASES[name]
    if "others_url" in options:
        options = {**options, "others_url": f"{address}/v1"}
    for rollout in play(address, chat, taskset, None if name == "one turn" else True, **options):
        assert rollout.status is RolloutStatus.COMPLETED, rollout.failure
        assert {part.name for part in rollout.rewards} == rewards and metrics <= rollout.metrics.keys()
        assert rollout.reward is not None and rollout.reward_version.startswith("verifiers-")
        assert rollout.replica_id == "replica-t" and (rollout.version_min, rollout.version_max) == (version, version)
        assert turns is None or rollout.turns == turns
        (segment,) = rollout.segments
        sampled = segment.mask() == 1
        assert sampled.any() and np.isfinite(segment.sampled_logprobs()[sampled]).all()
        assert (segment.sampled_logprobs()[sampled] <= 0).all() and not segment.sampled_logprobs()[~sampled].any()
        assert sum(span.end - span.start for span in segment.spans) == sampled.sum() == rollout.sampled_tokens
