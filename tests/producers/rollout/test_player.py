"""One rollout of the player: its record, and the reasons for which it fails."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from aiohttp import web

from tests.producers.rollout.test_worker import settings_for, task
from tests.waiting import until
from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments.base import Environment, EnvironmentFailed, Score
from tidemill.producers.environments.ledger import LedgerEnvironment, LedgerOptions
from tidemill.producers.environments.open import EnvironmentSet, open_environment
from tidemill.producers.environments.process import ProcessLost
from tidemill.producers.rollout.endpoint import AgentEndpoint
from tidemill.producers.rollout.player import EXPIRED, Player
from tidemill.producers.sampling.replicas import open_replica_client
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import EnvironmentEntry
from tidemill.schemas.records import RewardComponent, Rollout, RolloutStatus

pytestmark = pytest.mark.anyio
LEDGER = LedgerEnvironment(LedgerOptions())
USER = {"role": "user", "content": "credit 3 credit 4"}
ODD = '{"entries":[3,9]}'


class Environments:
    """The environments that tasks may name."""

    def __init__(self, known: dict[str, Environment]) -> None:
        self.known = known

    async def get(self, a_task) -> Environment:
        if a_task.environment not in self.known:
            raise EnvironmentFailed(f"task: unknown environment {a_task.environment!r}")
        return self.known[a_task.environment]


class Another(LedgerEnvironment):
    """The ledger, except that a task with the payload `ODD` calls `odd`."""

    def __init__(self, odd) -> None:
        super().__init__(LedgerOptions())
        self.odd = odd

    async def play(self, a_task, policy) -> Score:
        if a_task.payload == ODD:
            return await self.odd(a_task, policy)
        return await super().play(a_task, policy)


def play(settings, chat, a_task, known=None, turns=None) -> Rollout:
    return play_all(settings, chat, [a_task], known, turns)[0]


def play_all(settings, chat, tasks, known=None, turns=None) -> list[Rollout]:
    async def main():
        async with open_replica_client(settings) as client, AgentEndpoint() as endpoint:
            environments = Environments(known or {"ledger": LEDGER})
            record = None if turns is None else turns.append
            player = Player(settings, "w", environments, chat, client, endpoint, record)
            return await asyncio.gather(*[player.play(a_task, 1) for a_task in tasks])

    return asyncio.run(main())


def failed(rollout: Rollout) -> str:
    assert rollout.status is RolloutStatus.FAILED
    assert (rollout.reward, rollout.success, rollout.segments, rollout.rewards) == (None, None, [], [])
    return rollout.failure


def test_a_rollout_records_its_replica_and_region(new_replica, chat):
    replica = new_replica("r9")
    replica.version = 4
    found = play(settings_for(replica), chat, task())
    assert found.success and (found.rollout_id, found.version_min, found.version_max) == ("run/train/0/1", 4, 4)
    assert (found.replica_id, found.region, found.worker_id, found.turns) == ("r9", "here", "w", 3)
    assert 0 < found.started_at <= found.finished_at


def test_a_rollout_that_spans_two_versions(new_replica, chat):
    replica = new_replica()

    async def answer(request, number):
        replica.version = number // 2
        return await replica.solve(request, number)

    replica.answer = answer
    found = play(settings_for(replica), chat, task())
    assert found.success and (found.version_min, found.version_max) == (0, 1)
    assert [span.version for span in found.segments[0].spans] == [0, 1, 1]


def test_a_late_task_fails_before_it_starts(new_replica, chat):
    replica = new_replica()
    assert failed(play(settings_for(replica), chat, task(deadline_in_us=-1))) == EXPIRED
    assert replica.requests == []


def test_an_episode_waits_for_a_replica_that_is_down(new_replica, chat):
    replica = new_replica()

    async def answer(request, number):
        return web.Response(status=503) if 2 <= number <= 6 else await replica.solve(request, number)

    replica.answer = answer
    assert play(settings_for(replica), chat, task()).success


def test_a_failed_generation_is_never_a_zero_reward(new_replica, chat):
    replica = new_replica()

    async def down(_request, _number):
        return web.Response(status=500, text="engine is dead")

    async def nonsense(_request, _number):
        return web.Response(text="{")

    replica.answer = down

    def reason() -> str:
        return failed(play(settings_for(replica, episode_timeout_s=1), chat, task()))

    assert reason().startswith("timeout: no result within 1.0 s")
    until(lambda: "engine is dead" in reason(), "a request that was answered within the second")
    replica.answer = nonsense
    assert "bad response" in failed(play(settings_for(replica), chat, task()))


def test_an_environment_that_raises_fails_only_its_own_rollout(new_replica, chat):
    async def fail(_task, _policy):
        raise TimeoutError("the sandbox is gone")

    settings = settings_for(new_replica())
    found = play_all(settings, chat, [task(0), task(1, payload=ODD)], {"ledger": Another(fail)})
    assert found[0].success and "raised TimeoutError('the sandbox is gone')" in failed(found[1])
    assert "unknown environment 'chess'" in failed(play(settings, chat, task(environment="chess")))


@pytest.mark.parametrize("error", [OSError("no process can be started"), ImportError("a defect of its package")])
def test_an_environment_that_cannot_be_opened_is_tried_again_by_the_next_task(new_replica, chat, monkeypatch, error):
    once = [error]

    async def opened(*given):
        if once:
            raise once.pop()
        return await open_environment(*given)

    monkeypatch.setattr("tidemill.producers.environments.open.open_environment", opened)
    settings = settings_for(new_replica())

    async def main():
        environments = EnvironmentSet([EnvironmentEntry(name="ledger")], settings)
        async with open_replica_client(settings) as client, AgentEndpoint() as endpoint:
            player = Player(settings, "w", environments, chat, client, endpoint)
            return [await player.play(task(number), 1) for number in range(2)]

    first, second = asyncio.run(main())
    assert str(error) in failed(first)
    assert second.success


async def test_an_environment_is_opened_once_for_many_tasks_and_closed_once(monkeypatch):
    class Counted(LedgerEnvironment):
        async def close(self):
            closed.append(self)

    async def opened(*_given):
        opens.append(1)
        if len(opens) == 1:
            raise OSError("no process can be started")
        await ready.wait()
        return Counted(LedgerOptions(largest=9))

    async def persistent():
        with pytest.raises(EnvironmentFailed):
            await environments.get(a_task)
        return await environments.get(a_task)

    monkeypatch.setattr("tidemill.producers.environments.open.open_environment", opened)
    opens, closed, ready = [], [], asyncio.Event()
    environments = EnvironmentSet([EnvironmentEntry(name="ledger")], RolloutSettings())
    a_task = task(options='{ "largest": 9 }')  # not in the form of task records
    first, second = asyncio.create_task(persistent()), asyncio.create_task(environments.get(a_task))
    with pytest.raises(EnvironmentFailed):
        await second
    third = asyncio.create_task(environments.get(a_task))
    await asyncio.sleep(0)
    ready.set()
    assert await first is await third and len(opens) == 2
    await environments.close()
    assert len(closed) == 1


def test_an_environment_that_does_not_open_fails_the_rollout_at_its_deadline(new_replica, chat, monkeypatch):
    async def never(*_given):
        await asyncio.Event().wait()

    monkeypatch.setattr("tidemill.producers.environments.open.open_environment", never)
    settings = settings_for(new_replica(), episode_timeout_s=0.2)

    async def main():
        environments = EnvironmentSet([EnvironmentEntry(name="ledger")], settings)
        async with open_replica_client(settings) as client, AgentEndpoint() as endpoint:
            player = Player(settings, "w", environments, chat, client, endpoint)
            return await asyncio.wait_for(player.play(task(), 1), 60)

    assert failed(asyncio.run(main())).startswith("timeout: no result within 0.2 s")


def scored(*components, success=True, metrics=None):
    async def odd(_task, policy):
        await policy.chat([USER])
        return Score(tuple(RewardComponent(*each) for each in components), success, metrics or {})

    return odd


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (scored(("x", math.nan, 1.0)), "x.value is nan, which is no finite number"),
        (scored(("x", 1.0, math.inf)), "x.weight is inf"),
        (scored(("x", "1", 1.0)), "x.value is '1'"),
        (scored(("x", True, 1.0)), "x.value is True"),
        (scored(("x", 1e308, 1.0), ("y", 1e308, 1.0)), "the sum of the rewards is inf"),
        (scored(("x", 2e9, -1.0)), "the sum of the rewards is -2000000000.0, which is not within ±1e+09"),
        (scored(("x", 1.0, 1.0), success="yes"), "success is 'yes', expected True, False or None"),
        (scored(), "no reward component"),
        (scored(("x", 1.0, 1.0), ("x", 0.0, 1.0)), "two reward components have one name"),
        (scored(("x", 1.0, 1.0), metrics={"m": math.nan}), "m is nan"),
        (scored(("x", 1.0, 1.0), metrics={f"{n:036}": 1.0 for n in range(1100)}), "metrics need 66025 bytes"),
    ],
)
def test_a_reward_that_is_not_a_number_fails_the_rollout(new_replica, chat, odd, reason):
    assert reason in failed(play(settings_for(new_replica()), chat, task(payload=ODD), {"ledger": Another(odd)}))


def test_a_result_of_another_type_fails_the_rollout(new_replica, chat):
    def result(found):
        async def odd(_task, policy):
            await policy.chat([USER])
            return found

        return odd

    whole = RewardComponent("x", 1.0, 1.0)
    settings = settings_for(new_replica())
    for found, reason in (
        (1.0, "returned a float, not a Score"),
        (None, "returned a NoneType, not a Score"),
        (Score(whole, True), "raised TypeError"),
        (Score((("x", 1.0, 1.0),), True), "raised AttributeError"),
        (Score((whole,), True, None), "raised TypeError"),
        (Score((replace(whole, value=10**400),), True), "raised OverflowError"),
        (Score((replace(whole, name=5),), True), "is 5, expected text"),
        (Score((replace(whole, name="half of a pair: \ud800"),), True), "raised UnicodeEncodeError"),
    ):
        assert reason in failed(play(settings, chat, task(payload=ODD), {"ledger": Another(result(found))}))


def test_any_text_of_a_failure_can_be_recorded(new_replica, chat):
    async def odd(_task, _policy):
        raise EnvironmentFailed("half of a pair: \ud800" + " and more" * 10**6)

    found = play(settings_for(new_replica()), chat, task(payload=ODD), {"ledger": Another(odd)})
    assert failed(found).startswith("half of a pair: ? and more")
    assert len(Codec().encode(found)) < 10_000


def test_metrics_and_components_are_recorded(new_replica, chat):
    odd = scored(("x", 0.5, 2.0), ("y", 1.0, 1.0), success=None, metrics={"length": 3.0})
    found = play(settings_for(new_replica()), chat, task(payload=ODD), {"ledger": Another(odd)})
    assert (found.reward, found.success, found.metrics) == (2.0, None, {"length": 3.0})


def test_an_episode_without_a_call_of_the_policy_fails(new_replica, chat):
    async def odd(_task, _policy):
        return Score((RewardComponent("x", 1.0, 1.0),), True)

    found = play(settings_for(new_replica()), chat, task(payload=ODD), {"ledger": Another(odd)})
    assert failed(found) == "environment ledger: the policy was never called"


def test_a_failed_generation_fails_the_rollout_also_if_the_environment_ignores_it(new_replica, chat):
    replica = new_replica()

    async def answer(request, number):
        return web.Response(text="{") if number == 1 else await replica.solve(request, number)

    async def odd(_task, policy):
        try:
            await policy.chat([USER])
        except Exception:  # noqa: BLE001 - as careless as environments are
            return Score((RewardComponent("x", 1.0, 1.0),), True)
        raise AssertionError("the generation went well")

    replica.answer = answer
    found = play(settings_for(replica), chat, task(payload=ODD), {"ledger": Another(odd)})
    assert failed(found).startswith("bad response")


def test_a_full_context_is_scored_by_the_environment(new_replica, chat):
    async def odd(_task, policy):
        messages = [USER]
        while True:
            reply = await policy.chat(messages)
            messages = [*messages, reply.message, {"role": "user", "content": "more, please " * 20}]

    settings = settings_for(new_replica(), max_context_tokens=900)
    found = play(settings, chat, task(payload=ODD), {"ledger": Another(odd)})
    assert found.status is RolloutStatus.COMPLETED and found.success is False
    assert found.segments[0].n_tokens <= 900 and found.segments[0].mask()[-1] == 1


def test_an_episode_whose_process_was_lost_starts_again_and_keeps_its_turns(new_replica, chat):
    replica, lost, turns = new_replica(), [], []

    async def odd(_task, policy):
        first = await policy.chat([USER])
        if len(lost) < 2:
            lost.append(1)
            raise ProcessLost("killed")
        await policy.chat([USER, first.message, USER])
        return Score((RewardComponent("x", 1.0, 1.0),), True)

    found = play(settings_for(replica), chat, task(payload=ODD), {"ledger": Another(odd)}, turns)
    assert found.success and len(lost) == 2
    assert len(replica.requests) == 2 == len(turns), "the first turn was sampled and recorded once"
    assert found.turns == 2

    async def always(_task, _policy):
        raise ProcessLost("killed")

    found = play(settings_for(replica), chat, task(payload=ODD), {"ledger": Another(always)})
    assert failed(found) == "lost 3 times: killed"


def test_calls_after_the_end_of_an_episode_are_not_answered(new_replica, chat):
    settings, late = settings_for(new_replica()), []

    async def odd(_task, policy):
        await policy.chat([USER])

        async def later():
            with pytest.raises(Exception, match="the episode is over"):
                await policy.chat([USER])

        late.append(asyncio.ensure_future(later()))
        return Score((RewardComponent("x", 1.0, 1.0),), True)

    async def main():
        async with open_replica_client(settings) as client, AgentEndpoint() as endpoint:
            player = Player(settings, "w", Environments({"ledger": Another(odd)}), chat, client, endpoint)
            found = await player.play(task(payload=ODD), 1)
            await late[0]
            return found

    found = asyncio.run(main())
    assert found.success and found.turns == 1


def until_begun(reason: Callable[[], str], pattern: str) -> None:
    """Play until the reason of a failure matches the pattern. A slow machine may begin after the deadline."""
    said = until(lambda: found if (found := reason()) != EXPIRED else "", EXPIRED)
    assert re.match(pattern, said, re.DOTALL), said


def test_an_episode_that_never_ends_does_not_delay_others(new_replica, chat):
    async def odd(_task, policy):
        await policy.chat([USER])
        await asyncio.Event().wait()

    settings = settings_for(new_replica())

    def reason() -> str:
        tasks = [task(n) for n in range(8)]
        tasks[3] = task(3, payload=ODD, deadline_in_us=2_000_000)
        found = play_all(settings, chat, tasks, {"ledger": Another(odd)})
        assert all(rollout.success for n, rollout in enumerate(found) if n != 3)
        return failed(found[3])

    until_begun(reason, r"timeout: no result within [0-2]\b")


def test_a_request_that_a_replica_never_answers_ends_at_the_deadline(new_replica, chat):
    replica = new_replica()

    async def never(_request, _number):
        await asyncio.sleep(60)
        return web.Response()

    replica.answer = never
    settings = settings_for(replica, request_timeout_s=0.1)
    until_begun(
        lambda: failed(play(settings, chat, task(deadline_in_us=1_500_000))),
        r"timeout: no result within [0-1]\b.*TimeoutError",
    )


def test_a_task_that_does_not_start_before_its_deadline_fails_by_then(new_replica, chat):
    replica = new_replica()

    async def late(request, number):
        await asyncio.sleep(0.5)
        return await replica.solve(request, number)

    replica.answer = late
    settings = settings_for(replica, max_concurrent_episodes=1)
    found = play_all(settings, chat, [task(0), task(1, deadline_in_us=300_000)])
    assert found[0].success and failed(found[1]) == EXPIRED
    assert found[1].finished_at < found[0].finished_at
