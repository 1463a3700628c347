"""Workers killed in the middle of their tasks: nothing is lost; the repeated work and its cost are measured."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.producers.rollout.test_worker import RUN, Bench, settings_for, task, whole
from tidemill.producers.config import RolloutSettings
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import ChatSettings, StoreSettings
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Dispatch, Rollout, Turn

SEED = 5
TASKS = 6
KILLS = 2
ENTRIES = '{"entries":[3,4,5,6,7,8]}'
TURN_S = 0.05
PROCESS = """
import json, sys
from tidemill.producers.config import RolloutSettings
from tidemill.producers.rollout import worker
from tidemill.schemas.config import ChatSettings, KafkaSettings, RunSettings, StoreSettings
sections = zip((KafkaSettings, RunSettings, StoreSettings, RolloutSettings, ChatSettings), json.loads(sys.argv[1]))
worker.run(*[section(**values) for section, values in sections])
"""


@pytest.fixture
def bench(kafka, tmp_path, tokenizer_dir) -> Bench:
    log = kafka.fresh()
    return Bench(log, StoreSettings(root=str(tmp_path / "store")), tokenizer_dir)


@contextmanager
def process(bench: Bench, settings: RolloutSettings) -> Iterator[subprocess.Popen]:
    """Run a worker in its own process; kill it at the end."""
    rollout = settings.model_copy(update={"tokenizer": bench.tokenizer})
    sections = [each.model_dump(mode="json") for each in (bench.log, RUN, bench.store, rollout, ChatSettings())]
    running = subprocess.Popen([sys.executable, "-c", PROCESS, json.dumps(sections)])
    try:
        yield running
    finally:
        running.kill()
        running.wait(60)


class Counted:
    """Slows a replica, and counts its sampled tokens."""

    def __init__(self, replica):
        self.replica, self.tokens = replica, 0
        self.solve, replica.answer = replica.answer, self.answer

    async def answer(self, request, number):
        await asyncio.sleep(TURN_S)
        response = await self.solve(request, number)
        self.tokens += len(json.loads(response.body)["choices"][0]["token_ids"])
        return response

    def wait_for(self, requests: int) -> None:
        deadline = time.monotonic() + 180
        while len(self.replica.requests) < requests:
            assert time.monotonic() < deadline, len(self.replica.requests)
            time.sleep(0.005)


def progress(bench: Bench) -> list[Dispatch | Turn]:
    with LogReader(bench.log, [Topic.PROGRESS]) as reader:
        return [located.record for located in reader.read_to_end()]


def spent_over_kills(bench: Bench, replica, record_turns: bool) -> tuple[list[Rollout], float]:
    """Return the rollouts of a run with a repeatedly killed worker, and the tokens sampled per token kept."""
    counted, rng = Counted(replica), random.Random(SEED)
    settings = settings_for(replica, max_concurrent_episodes=8, record_turns=record_turns)
    bench.issue(*[task(index, payload=ENTRIES, max_turns=9) for index in range(TASKS)])
    for _ in range(KILLS):
        begun = len(replica.requests)
        with process(bench, settings) as running:
            counted.wait_for(begun + rng.randrange(20, 45))
            running.send_signal(signal.SIGKILL)
            running.wait(60)
    with process(bench, settings):
        found = bench.rollouts(whole(TASKS), deadline_s=180)
    return found, counted.tokens / sum(rollout.sampled_tokens for rollout in found)


@pytest.mark.parametrize("record_turns", [True, False])
def test_the_rollouts_of_a_killed_worker_are_finished_once(bench, new_replica, record_turns):
    found, ratio = spent_over_kills(bench, new_replica(), record_turns)
    ids = Counter(rollout.rollout_id for rollout in found)
    assert set(ids) == {f"run/train/{i}/{j}" for i in range(TASKS) for j in range(4)}
    assert max(ids.values()) == 1, "a rollout that the log had was not played again"
    assert all(rollout.success and rollout.turns == 7 for rollout in found)
    records = progress(bench)
    dispatches = [record for record in records if isinstance(record, Dispatch)]
    resumed = sum(sum(dispatch.resumed_turns) for dispatch in dispatches)
    turns = sum(isinstance(record, Turn) for record in records)
    print(f"record_turns={record_turns} kills={KILLS} dispatches={len(dispatches)} resumed_turns={resumed} "
          f"repeated_work={ratio - 1:.3f}")  # fmt: skip
    if record_turns:
        assert resumed > 0 and turns >= 4 * 7 * TASKS
        assert ratio - 1 < 2.5 * 8 * KILLS / (4 * 7 * TASKS), "some two turns of each episode in hand at each kill"
    else:
        assert resumed == turns == 0
    assert all(dispatch.at < dispatch.lease_until for dispatch in dispatches)
