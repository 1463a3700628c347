"""Episodes with an instant model, one JSON line per figure: `python tests/bench/bench_episodes.py [--only NAME …]`.

`episodes_per_s` is per second of processor time of this process and its children, including the endpoint's client.

- `native`: 1, 4, 16 and 50 turns in process, and over the agents' endpoint, compared with a bare aiohttp server with
  the same client (`yardstick`);
- `reasoning_gym`: chain_sum in the loop, and countdown in its own process;
- `verifiers`: a taskset of 1 and of 3 turns;
- `at_once`: wall seconds of 1,000 episodes of two turns that all begin before the first one ends, and memory;
- `memory`: resident MiB of the worker and of the environment's process after 2,000 and after `--episodes`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiohttp import web
from measuring import say

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.producers.rollout.agents import CHAT, END, FakeSession, policy_of
from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments.base import Environment, TaskQuery
from tidemill.producers.environments.check import task_of as environment_task
from tidemill.producers.environments.find import environment_type
from tidemill.producers.environments.open import open_environment
from tidemill.producers.rollout.endpoint import AgentEndpoint
from tidemill.producers.rollout.policy import RolloutPolicy
from tidemill.producers.sampling.completion import Completion, Sampling
from tidemill.schemas.config import EnvironmentEntry
from tidemill.schemas.records import VersionSpan

IDS = CHAT.encode("ok then" + END)
SIDE_BY_SIDE = 32
ASK = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "question"}]
Episode = Callable[[], Awaitable[object]]


class InstantSession(FakeSession):
    """Samples the same turn at once."""

    async def complete(self, prompt: list[int], sampling: Sampling) -> Completion:
        return Completion(IDS, [-0.5] * len(IDS), (VersionSpan(0, 0, len(IDS)),), "stop")


def instant(offer: Any = None) -> RolloutPolicy:
    policy = policy_of(lambda _: "", offer)
    policy.session = InstantSession(lambda _: "", CHAT._tokenizer)  # type: ignore[assignment]
    return policy


def again(number: int) -> dict[str, str]:
    """Return the next question, so that no cached text answers for it."""
    return {"role": "user", "content": f"go on after {number} of {random.randrange(10**6)}"}


def used() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sum(sum(each.cpu_times()[:2]) for each in psutil.Process().children(recursive=True))
    return time.process_time() + children.ru_utime + children.ru_stime + living


async def rate(episode: Episode, count: int) -> float:
    """Measure the episodes per second of processor time."""

    async def worker(numbers: Iterator[int]) -> None:
        for _ in numbers:
            await episode()

    await worker(iter(range(3)))
    numbers, begun = iter(range(count)), used()
    await asyncio.gather(*(worker(numbers) for _ in range(SIDE_BY_SIDE)))
    return round(count / (used() - begun), 1)


async def native() -> None:
    for turns, count in ((1, 3000), (4, 1000), (16, 250), (50, 60)):

        async def in_process(turns: int = turns) -> None:
            policy, messages = instant(), list(ASK)
            for number in range(turns):
                messages += [(await policy.chat(messages)).message, again(number)]

        say("native", turns=turns, way="in process", episodes_per_s=await rate(in_process, count))
        if turns > 16:
            continue
        async with AgentEndpoint() as endpoint, aiohttp.ClientSession() as http:

            async def over_http(turns: int = turns, endpoint: Any = endpoint, http: Any = http) -> None:
                policy = instant(endpoint.open)
                at, messages = policy.endpoint, list(ASK)
                headers = {"authorization": f"Bearer {at.api_key}"}
                for number in range(turns):
                    body = json.dumps({"model": "m", "messages": messages}).encode()
                    async with http.post(f"{at.base_url}/chat/completions", data=body, headers=headers) as answer:
                        messages += [json.loads(await answer.read())["choices"][0]["message"], again(number)]
                policy.closed = True
                endpoint.close(policy)

            say("native", turns=turns, way="endpoint", episodes_per_s=await rate(over_http, count))
        say("native", turns=turns, way="yardstick", episodes_per_s=await yardstick(turns, count))


async def yardstick(turns: int, count: int) -> float:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application()
    app.router.add_post("/", echo)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as http:

        async def bare() -> None:
            for _ in range(turns):
                async with http.post(f"http://127.0.0.1:{runner.addresses[0][1]}/", data=b"x" * 300) as answer:
                    await answer.read()

        found = await rate(bare, count)
    await runner.cleanup()
    return found


async def playing(environment: Environment, name: str, count: int) -> float:
    task = environment_task(environment, name, next(environment.tasks(TaskQuery(0))))
    found = await rate(lambda: environment.play(task, instant()), count)
    await environment.close()
    return found


async def reasoning_gym() -> None:
    for name in ("reasoning_gym:chain_sum", "reasoning_gym:countdown"):
        environment = await open_environment(EnvironmentEntry(name=name), {}, RolloutSettings())
        say("reasoning_gym", name=name, isolation=environment_type(name).isolation, turns=1,
            episodes_per_s=await playing(environment, name, 2000))  # fmt: skip


async def verifiers() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "producers" / "environments" / "tasksets"))
    for harness, turns in (("", 1), ("vf_ask_thrice", 3)):
        environment = environment_type("verifiers:vf_sums").open({"harness": harness})
        say("verifiers", turns=turns, episodes_per_s=await playing(environment, "verifiers:vf_sums", 400 // turns))


async def hosted() -> tuple[Environment, Episode, psutil.Process]:
    """Start an environment of one turn in its own process; return it, an episode of it, and the process."""
    name = "reasoning_gym:countdown"
    environment = await open_environment(EnvironmentEntry(name=name), {}, RolloutSettings())
    task = environment_task(environment, name, next(environment.tasks(TaskQuery(0))))
    (process,) = (each for each in psutil.Process().children(recursive=True) if not each.children())
    return environment, lambda: environment.play(task, instant()), process


def resident(process: psutil.Process) -> float:
    return round(process.memory_info().rss / 2**20, 1)


async def at_once(count: int = 1000) -> None:
    environment, episode, process = await hosted()
    begun = time.monotonic()
    await asyncio.gather(*(episode() for _ in range(count)))
    seconds = round(time.monotonic() - begun, 2)
    say("at_once", episodes=count, wall_s=seconds, worker_mib=resident(psutil.Process()), process_mib=resident(process))
    await environment.close()


async def memory(episodes: int) -> None:
    environment, episode, process = await hosted()
    done = 0
    for upto in (2_000, episodes):
        while done < upto:
            await asyncio.gather(*(episode() for _ in range(500)))
            done += 500
        say("memory", episodes=done, worker_mib=resident(psutil.Process()), process_mib=resident(process))
    await environment.close()


def main() -> None:
    figures = {
        "native": native, "reasoning_gym": reasoning_gym, "verifiers": verifiers, "at_once": at_once, "memory": None,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(figures), default=list(figures))
    parser.add_argument("--episodes", type=int, default=100_000, help="episodes of the figure `memory`")
    asked = parser.parse_args()
    for name in asked.only:
        asyncio.run(memory(asked.episodes) if name == "memory" else figures[name]())


if __name__ == "__main__":
    main()
