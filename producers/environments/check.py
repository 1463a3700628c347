"""The contract of an environment, tried: determinism, hostile turns, deadlines, held-out apart from training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tidemill.producers.environments.base import (
    Environment,
    EnvironmentFailed,
    GenerationFailed,
    Policy,
    Reply,
    Score,
    Split,
    TaskDraft,
    TaskError,
    TaskQuery,
    split_of,
)
from tidemill.producers.environments.find import options_json
from tidemill.schemas.chat.messages import Message, Tool, checked_messages, checked_tools, identity
from tidemill.schemas.records import Mode, Task

DRAFTS = 200
SIDE_BY_SIDE = 32
LONG_TURN = 20_000
"""Characters of a hostile turn."""


@dataclass(frozen=True, slots=True)
class ContractCheck:
    """One clause of the contract."""

    name: str
    ok: bool
    detail: str


def task_of(environment: Environment, name: str, draft: TaskDraft, seed: int = 0) -> Task:
    """A task that is played outside a run."""
    options = options_json(environment.options)
    return Task(
        "try", "try", "try", name, draft.payload, Mode.EVAL, 1, draft.max_turns, seed, 0, 2**62, 0, options=options
    )


class ScriptedPolicy(Policy):
    """A policy that says the same texts in turn, the last one again and again, or calls the first tool it is shown."""

    def __init__(self, texts: Sequence[str], most: int, arguments: str | None = None) -> None:
        """`most` bounds the calls, as a rollout's policy does; with `arguments`, the first tool is called, if any."""
        self._texts, self._most, self._arguments = texts, most, arguments
        self.requests: list[tuple[list[Message], tuple[Tool, ...]]] = []
        self.conversation: list[Message] = []

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        trained: bool = True,
    ) -> Reply:
        """The next text. Raises GenerationFailed after too many calls, BadMessage."""
        told, shown = checked_messages(messages), checked_tools(tools)
        if len(self.requests) >= self._most:
            raise GenerationFailed(f"more than {self._most} calls of the policy (max_turns)")
        text = self._texts[min(len(self.requests), len(self._texts) - 1)]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._arguments is not None and shown:
            function = {"name": shown[0]["function"]["name"], "arguments": self._arguments}
            number = f"call{len(self.requests):05d}"
            message = {**message, "tool_calls": [{"id": number, "type": "function", "function": function}]}
        self.requests.append((told, tuple(shown)))
        self.conversation = [*told, message]
        return Reply(message, "tool_calls" if "tool_calls" in message else "stop")


HOSTILE: Mapping[str, tuple[str, str | None]] = {
    "an empty turn": ("", None),
    "a long turn": ("7 " * (LONG_TURN // 2), None),
    "special tokens": ("<|im_end|><|im_start|>system\n</s>[INST]<tool_call>", None),
    "control characters": ("\x00\x1b[2J\ufffd\u202e", None),
    "an endless power": ("<answer>9**9**9**9</answer>\n9**9**9**9", None),
    "a nested text": ("(" * 5_000, None),
    "not a number": ("<answer>NaN</answer>\nnan", None),
    "code": ("<answer>__import__('os')._exit(1)</answer>", None),
    "a broken tool call": ('<tool_call>{"name": "x", "arg', None),
    "wrong arguments": ("", '{"no_such_argument": [null]}'),
    "arguments that are no JSON": ("", "{"),
}
"""Turns that a policy can make, by what is wrong with them: the text, and arguments for the first tool."""


async def check_environment(
    environment: Environment, name: str, seed: int, limit_s: float
) -> AsyncIterator[ContractCheck]:
    """Yield the clauses as they are tried; later ones are left out when there is no task to try them on.

    Args:
        limit_s: longest time for one episode of an instant policy.
    """
    try:
        drafts = list(islice(environment.tasks(TaskQuery(seed)), DRAFTS))
        again = list(islice(environment.tasks(TaskQuery(seed)), DRAFTS))
        other = list(islice(environment.tasks(TaskQuery(seed + 1)), DRAFTS))
    except (TaskError, EnvironmentFailed) as error:
        yield ContractCheck("tasks", False, str(error))
        return
    distinct = len({draft.asks for draft in drafts})
    yield ContractCheck("tasks", bool(drafts), f"{len(drafts)} drawn, {distinct} questions")
    if not drafts:
        return
    same = drafts == again
    yield ContractCheck(
        "tasks are deterministic", same, "the same seed gives the same tasks" if same else "they differ"
    )
    shared = {draft.asks for draft in drafts} & {draft.asks for draft in other}
    yield ContractCheck("another seed asks something else", drafts != other, f"{len(shared)} questions in common")
    yield _apart(drafts)
    drafts = drafts[:SIDE_BY_SIDE]
    tasks = [task_of(environment, name, draft, seed) for draft in drafts]
    async for check in _played(environment, tasks, [split_of(draft.asks) for draft in drafts], limit_s):
        yield check
    for fault, (text, arguments) in HOSTILE.items():
        policy = ScriptedPolicy([text], tasks[0].max_turns, arguments)
        yield await _hostile(environment, tasks[0], fault, policy, limit_s)
    yield await _cancelled(environment, tasks[0], limit_s)


def _apart(drafts: Sequence[TaskDraft]) -> ContractCheck:
    by_payload: dict[str, set[Split]] = {}
    for draft in drafts:
        by_payload.setdefault(draft.payload, set()).add(split_of(draft.asks))
    both = sum(len(splits) > 1 for splits in by_payload.values())
    held_out = sum(split_of(draft.asks) is Split.EVAL for draft in drafts)
    ok = both == 0 and 0 < held_out < len(drafts)
    return ContractCheck(
        "no task in both splits", ok, f"{held_out} of {len(drafts)} held out, {both} payloads on both sides"
    )


async def _played(
    environment: Environment, tasks: Sequence[Task], splits: Sequence[Split], limit_s: float
) -> AsyncIterator[ContractCheck]:
    alone = [await _outcome(environment, task, ScriptedPolicy(["7"], task.max_turns), limit_s) for task in tasks[:4]]
    again = [await _outcome(environment, task, ScriptedPolicy(["7"], task.max_turns), limit_s) for task in tasks[:4]]
    scored = next((outcome for outcome in alone if isinstance(outcome[0], Score)), None)
    names = ", ".join(f"{part.name} × {part.weight:g}" for part in scored[0].rewards) if scored else ""  # type: ignore[union-attr]
    yield ContractCheck("an episode ends in a reward", scored is not None, names or str(alone[0][0]))
    yield ContractCheck(
        "episodes are deterministic", alone == again, "the same turns give the same conversation and reward"
    )
    beside = await asyncio.gather(
        *(_outcome(environment, task, ScriptedPolicy(["7"], task.max_turns), limit_s) for task in tasks)
    )
    equal = list(beside[:4]) == alone
    yield ContractCheck(
        "episodes side by side", equal, f"{len(beside)} at once, as alone" if equal else "they are not as alone"
    )
    openings: dict[tuple[object, ...], set[Split]] = {}
    for (_, conversation), split in zip(beside, splits, strict=True):
        turn = next((place for place, each in enumerate(conversation) if each["role"] == "assistant"), 0)
        openings.setdefault(tuple(map(identity, conversation[:turn])), set()).add(split)
    both = sum(len(found) > 1 for found in openings.values())
    said = f"{len(openings)} different ones of {len(beside)}, {both} of them in both splits"
    yield ContractCheck("no prompt in both splits", both == 0 and () not in openings, said)


async def _outcome(
    environment: Environment, task: Task, policy: ScriptedPolicy, limit_s: float
) -> tuple[Score | str, list[Message]]:
    """The score, or the failure, and the conversation."""
    try:
        async with asyncio.timeout(limit_s):
            score = await environment.play(task, policy)
    except TimeoutError:
        return f"no result within {limit_s:g} s", policy.conversation
    except Exception as error:  # noqa: BLE001 - any error of the environment's is a failed rollout
        return f"{type(error).__name__}: {error}"[:300], policy.conversation
    fault = score.fault()
    return (fault or score), policy.conversation


async def _hostile(
    environment: Environment, task: Task, fault: str, policy: ScriptedPolicy, limit_s: float
) -> ContractCheck:
    outcome, _ = await _outcome(environment, task, policy, limit_s)
    calls = f"{len(policy.requests)} calls"
    if isinstance(outcome, Score):
        return ContractCheck(fault, not outcome.success, f"reward {outcome.total:g} after {calls}")
    expected = outcome.startswith(("GenerationFailed", "ContextFull"))
    return ContractCheck(fault, expected, f"{outcome} after {calls}")


async def _cancelled(environment: Environment, task: Task, limit_s: float) -> ContractCheck:
    class Silent(ScriptedPolicy):
        async def chat(self, *_arguments: Any, **_options: Any) -> Reply:  # noqa: ANN401 - never answers
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    asked, loop = asyncio.Event(), asyncio.get_running_loop()
    playing = asyncio.create_task(environment.play(task, Silent([""], 1)))
    await asyncio.wait(
        {playing, asyncio.create_task(asked.wait())}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
    )
    began = loop.time()
    playing.cancel()
    done, _ = await asyncio.wait({playing}, timeout=limit_s)
    return ContractCheck("it ends at its deadline", bool(done), f"{loop.time() - began:.2f} s after it was cancelled")


def as_json(checks: Sequence[ContractCheck]) -> str:
    """The checks for scripts."""
    return json.dumps([{"name": each.name, "ok": each.ok, "detail": each.detail} for each in checks], indent=2)
