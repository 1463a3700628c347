"""Play every offered member of an installed family where it normally runs: in the loop, or in its own process.

    python tests/bench/sweep_environments.py reasoning_gym [--tasks 20] [--only chain_sum] [--answer-s 10]

One JSON line per member: its isolation; milliseconds to draw a task, and to play one with an instant policy that gives
hostile answers; the rewards; the failed episodes, with their reasons; and whether a later episode still ends in a
score. A last line counts the members that draw, play and continue.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from itertools import islice
from typing import Any

from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments.base import EnvironmentFailed, Score, TaskError, TaskQuery
from tidemill.producers.environments.check import ScriptedPolicy, task_of
from tidemill.producers.environments.find import environment_type, listed
from tidemill.producers.environments.open import open_environment
from tidemill.producers.environments.process import ProcessLost
from tidemill.schemas.config import EnvironmentEntry

LENGTH = 8_000
HOSTILE = (
    "",
    "7",
    "xyzzy " * 1_000,
    "9" * LENGTH,
    "(" * (LENGTH // 2) + ")" * (LENGTH // 2),
    "[" * LENGTH,
    '{"a":' * (LENGTH // 5),
    "1\n" * (LENGTH // 2),
    "1e999999999",
    "\\frac{1e99999999}{1}",
    "R " * (LENGTH // 2),
    "\x00\u0663\u00b2",
    "[1 " + "9" * LENGTH + "]",
    "[1 1]",
    "[up]",
    "9**9**9**9",
    "[1]*10**12",
    "__import__('os')._exit(1)",
    "__import__('time').sleep(3600)",
)
"""Answers of the policy, bare and between answer tags."""


async def played(environment: Any, task: Any, text: str, limit_s: float) -> Score | str:
    policy = ScriptedPolicy([text], task.max_turns)
    try:
        async with asyncio.timeout(limit_s):
            return await environment.play(task, policy)
    except (EnvironmentFailed, ProcessLost, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"[:120]


async def sweep(name: str, tasks: int, settings: RolloutSettings) -> dict[str, Any]:
    opened = await open_environment(EnvironmentEntry(name=name), {}, settings)
    try:
        began = time.perf_counter()
        drafts = list(islice(opened.tasks(TaskQuery(0)), tasks))
        draw_ms = (time.perf_counter() - began) / tasks * 1e3
        issued = [task_of(opened, name, draft) for draft in drafts]
        rewards, failures, slowest = Counter[float](), Counter[str](), 0.0
        for place, text in enumerate([*HOSTILE, *(f"<answer>{text}</answer>" for text in HOSTILE)]):
            began = time.perf_counter()
            outcome = await played(opened, issued[place % tasks], text, 4 * settings.environment_timeout_s)
            slowest = max(slowest, time.perf_counter() - began)
            if isinstance(outcome, Score) and not outcome.fault():
                rewards[round(outcome.total, 2)] += 1
            else:
                failures[outcome if isinstance(outcome, str) else outcome.fault()] += 1
        after = [await played(opened, task, "7", 4 * settings.environment_timeout_s) for task in issued]
        return {
            "environment": name,
            "isolation": environment_type(name).isolation,
            "draw_ms": round(draw_ms, 2),
            "slowest_ms": round(slowest * 1e3, 1),
            "questions": len({draft.asks for draft in drafts}),
            "rewards": dict(sorted(rewards.items())),
            "failures": dict(failures),
            "goes_on": all(isinstance(outcome, Score) for outcome in after),
        }
    finally:
        await opened.close()


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("family")
    arguments.add_argument("--tasks", type=int, default=4)
    arguments.add_argument("--only", default="")
    arguments.add_argument("--answer-s", type=float, default=10.0)
    told = arguments.parse_args()
    settings, ok, names = RolloutSettings(environment_timeout_s=told.answer_s), 0, []
    for member in listed(told.family):
        if member.problem or told.only not in member.name:
            continue
        names.append(member.name)
        try:
            found = asyncio.run(sweep(member.name, told.tasks, settings))
            ok += found["goes_on"]
        except (TaskError, EnvironmentFailed) as error:
            found = {"environment": member.name, "failed": str(error)}
        print(json.dumps(found), flush=True)
    print(json.dumps({"family": told.family, "members": len(names), "draw_play_and_go_on": ok}))


if __name__ == "__main__":
    main()
