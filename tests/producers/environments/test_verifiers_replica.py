"""Tasksets of verifiers with a real replica: vLLM plays each rollout, and it is recorded as by a worker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from tests.consumers.test_replica_server import Served
from tests.producers.rollout.agents import task_of
from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments.base import TaskQuery
from tidemill.producers.environments.open import EnvironmentSet
from tidemill.producers.rollout.endpoint import AgentEndpoint
from tidemill.producers.rollout.player import Player
from tidemill.producers.sampling.replicas import open_replica_client
from tidemill.schemas.config import EnvironmentEntry
from tidemill.schemas.records import Rollout, RolloutStatus

ROLLOUTS = 4


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory, vllm: None):
    served = Served(tmp_path_factory.mktemp("replica"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).with_name("tasksets")))
        yield served
    served.close()


def play(replica: Served, taskset: str, **options: object) -> list[Rollout]:
    """Return rollouts of one taskset's tasks, played concurrently in the taskset's own process."""
    settings = RolloutSettings(
        replicas=[str(replica.http.base_url)], max_context_tokens=512, max_turn_tokens=12, environment_timeout_s=120
    )
    entry = EnvironmentEntry(name=f"verifiers:{taskset}", options=options)

    async def main() -> list[Rollout]:
        environments = EnvironmentSet([entry], settings)
        async with open_replica_client(settings) as client, AgentEndpoint() as endpoint:
            player = Player(settings, "w", environments, replica.chat, client, endpoint)
            try:
                await environments.check(replica.chat)
                given = json.dumps(options)
                drafts = (await environments.get(task_of("", entry.name, options=given))).tasks(TaskQuery(3))
                tasks = [task_of(next(drafts).payload, entry.name, options=given) for _ in range(ROLLOUTS)]
                return await asyncio.gather(*(player.play(task, 0) for task in tasks))
            finally:
                await environments.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("taskset", "options", "rewards", "metrics", "segments", "turns"),
    [
        ("vf_sums", {}, {"correct", "short"}, {"length"}, 1, 1),
        ("vf_sums", {"env": {"id": "user-sim"}, "max_turns": 3}, {"assistant.correct", "assistant.short"},
         {"assistant.user_turns", "user.truncated"}, 1, None),
        ("vf_tools", {"max_turns": 4}, {"correct"}, {"calls"}, 1, None),
        ("vf_judged", {"others_url": "replica", "others_model": "tidemill"}, {"approved"}, {"truncated"}, 1, 1),
    ],
    ids=["one turn", "a simulated user", "tools of a server", "a judge that is the replica as well"],
)  # fmt: skip
def test_a_taskset_is_played_by_a_replica(replica, taskset, options, rewards, metrics, segments, turns) -> None:
    if "others_url" in options:
        options = {**options, "others_url": f"{str(replica.http.base_url).rstrip('/')}/v1"}
    for rollout in play(replica, taskset, **options):
        assert rollout.status is RolloutStatus.COMPLETED, rollout.failure
        assert {part.name for part in rollout.rewards} == rewards and metrics <= rollout.metrics.keys()
        assert rollout.reward is not None and rollout.reward_version.startswith("verifiers-")
        assert rollout.replica_id == "replica-t" and (rollout.version_min, rollout.version_max) == (0, 0)
        assert len(rollout.segments) == segments and (turns is None or rollout.turns == turns)
        for segment in rollout.segments:
            sampled = segment.mask() == 1
            assert sampled.any() and np.isfinite(segment.sampled_logprobs()[sampled]).all()
            assert (segment.sampled_logprobs()[sampled] <= 0).all() and not segment.sampled_logprobs()[~sampled].any()
            assert sum(span.end - span.start for span in segment.spans) == sampled.sum() == rollout.sampled_tokens
