"""Checks of the contract of an environment: determinism, hostile turns, deadlines, disjoint splits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tidemill.producers.environments import base
from tidemill.producers.environments.base import Messages
from tidemill.producers.environments.find import options_json
from tidemill.schemas.chat.messages import Message, Tool, checked_messages, checked_tools, identity
from tidemill.schemas.records import Mode, Task

DRAFTS = 200
SIDE_BY_SIDE = 32
LONG_TURN = 20_000
"""Characters of a hostile turn."""


@dataclass(frozen=True, slots=True)
class ContractCheck:
    name: str
    ok: bool
    detail: str


def task_of(environment: base.Environment, name: str, draft: base.TaskDraft, seed: int = 0) -> Task:
    """Return a task that is played outside a run."""
    given, turns = options_json(environment.options), draft.max_turns
    return Task("try", "try", "try", name, draft.payload, Mode.EVAL, 1, turns, seed, 0, 2**62, 0, options=given)


class ScriptedPolicy(base.Policy):
    """A policy that returns given texts in order and then repeats the last one, or calls the first tool offered."""

    def __init__(self, texts: Sequence[str], most: int, arguments: str | None = None) -> None:
        """`most` bounds the calls, as for a rollout's policy; with `arguments`, turns call the first tool, if any."""
        self._texts, self._most, self._arguments = texts, most, arguments
        self.requests: list[tuple[list[Message], tuple[Tool, ...]]] = []
        self.conversation: list[Message] = []

    async def chat(
        self, messages: Messages, *, tools: Sequence[Tool] = (), max_tokens: int | None = None, trained: bool = True
    ) -> base.Reply:
        conversation, offered = checked_messages(messages), checked_tools(tools)
        if len(self.requests) >= self._most:
            raise base.GenerationFailed(f"more than {self._most} calls of the policy (max_turns)")
        text = self._texts[min(len(self.requests), len(self._texts) - 1)]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._arguments is not None and offered:
            function = {"name": offered[0]["function"]["name"], "arguments": self._arguments}
            number = f"call{len(self.requests):05d}"
            message = {**message, "tool_calls": [{"id": number, "type": "function", "function": function}]}
        self.requests.append((conversation, tuple(offered)))
        self.conversation = [*conversation, message]
        return base.Reply(message, "tool_calls" if "tool_calls" in message else "stop")


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
"""Turns that a policy can make, by their fault: the text, and arguments for the first tool."""


async def check_environment(
    environment: base.Environment, name: str, seed: int, limit_s: float
) -> AsyncIterator[ContractCheck]:
    """Yield the clauses as they are checked; the later ones are left out if there is no task.

    `limit_s` is the longest time for one episode with a policy that answers at once.
    """
    try:
        drafts = list(islice(environment.tasks(base.TaskQuery(seed)), DRAFTS))
        again = list(islice(environment.tasks(base.TaskQuery(seed)), DRAFTS))
        other = list(islice(environment.tasks(base.TaskQuery(seed + 1)), DRAFTS))
    except (base.TaskError, base.EnvironmentFailed) as error:
        yield ContractCheck("tasks", False, str(error))
        return
    questions = {draft.asks for draft in drafts}
    yield ContractCheck("tasks", bool(drafts), f"{len(drafts)} drawn, {len(questions)} questions")
    if not drafts:
        return
    same = "the same seed gives the same tasks" if drafts == again else "they differ"
    yield ContractCheck("tasks are deterministic", drafts == again, same)
    shared = f"{len(questions & {draft.asks for draft in other})} questions in common"
    yield ContractCheck("another seed asks something else", drafts != other, shared)
    both = _on_both_sides((draft.payload, base.split_of(draft.asks)) for draft in drafts)
    held_out = sum(base.split_of(draft.asks) is base.Split.EVAL for draft in drafts)
    found = f"{held_out} of {len(drafts)} held out, {both} payloads on both sides"
    yield ContractCheck("no task in both splits", both == 0 and 0 < held_out < len(drafts), found)

    drafts = drafts[:SIDE_BY_SIDE]
    tasks = [task_of(environment, name, draft, seed) for draft in drafts]

    async def outcome(task: Task, policy: ScriptedPolicy | None = None) -> tuple[base.Score | str, list[Message]]:
        """Play a task; return the score or the text of the failure, and the conversation."""
        policy = policy or ScriptedPolicy(["7"], task.max_turns)
        try:
            async with asyncio.timeout(limit_s):
                return base.checked_score(await environment.play(task, policy)), policy.conversation
        except TimeoutError:
            return f"no result within {limit_s:g} s", policy.conversation
        except Exception as error:  # noqa: BLE001 - any error of the environment's is a failed rollout
            return f"{type(error).__name__}: {error}"[:300], policy.conversation

    alone = [await outcome(task) for task in tasks[:4]]
    once_more = [await outcome(task) for task in tasks[:4]]
    scores = [found for found, _ in alone if isinstance(found, base.Score)]
    names = ", ".join(f"{part.name} × {part.weight:g}" for part in scores[0].rewards) if scores else str(alone[0][0])
    yield ContractCheck("an episode ends in a reward", bool(scores), names)
    same = "the same turns give the same conversation and reward"
    yield ContractCheck("episodes are deterministic", alone == once_more, same)
    beside = await asyncio.gather(*map(outcome, tasks))
    equal = list(beside[:4]) == alone
    detail = f"{len(beside)} at once, as alone" if equal else "they are not as alone"
    yield ContractCheck("episodes side by side", equal, detail)
    openings = []
    for _, conversation in beside:
        turn = next((place for place, each in enumerate(conversation) if each["role"] == "assistant"), 0)
        openings.append(tuple(map(identity, conversation[:turn])))
    both = _on_both_sides(zip(openings, (base.split_of(draft.asks) for draft in drafts), strict=True))
    detail = f"{len(set(openings))} different ones of {len(beside)}, {both} of them in both splits"
    yield ContractCheck("no prompt in both splits", both == 0 and () not in openings, detail)

    for fault, (text, arguments) in HOSTILE.items():
        policy = ScriptedPolicy([text], tasks[0].max_turns, arguments)
        ended, _ = await outcome(tasks[0], policy)
        detail = f"reward {ended.total:g}" if isinstance(ended, base.Score) else ended
        failed = detail.startswith(("GenerationFailed", "ContextFull"))
        expected = not ended.success if isinstance(ended, base.Score) else failed
        detail += f" after {len(policy.requests)} calls"
        if isinstance(ended, base.Score) and ended.success:
            detail += "; such a turn must not be a success"
        yield ContractCheck(fault, expected, detail)
    yield await _cancelled(environment, tasks[0], limit_s)


def _on_both_sides(sides: Iterable[tuple[object, base.Split]]) -> int:
    """Return the number of things in both splits."""
    of: dict[object, set[base.Split]] = {}
    for thing, split in sides:
        of.setdefault(thing, set()).add(split)
    return sum(len(splits) > 1 for splits in of.values())


async def _cancelled(environment: base.Environment, task: Task, limit_s: float) -> ContractCheck:
    class Silent(ScriptedPolicy):
        async def chat(self, *_arguments: Any, **_options: Any) -> base.Reply:  # noqa: ANN401 - never answers
            called.set()
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    called, loop = asyncio.Event(), asyncio.get_running_loop()
    playing = asyncio.create_task(environment.play(task, Silent([""], 1)))
    first_call = asyncio.create_task(called.wait())
    await asyncio.wait({playing, first_call}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    began = loop.time()
    playing.cancel()
    done, _ = await asyncio.wait({playing}, timeout=limit_s)
    return ContractCheck("it ends at its deadline", bool(done), f"{loop.time() - began:.2f} s after it was cancelled")
