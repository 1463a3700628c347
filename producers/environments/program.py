"""An agent program that plays an environment's tasks in place of the environment's own conversation.

The program calls the model at OPENAI_BASE_URL, with the key OPENAI_API_KEY, and reads its task from standard input:
{"messages": […], "tools": […], "task_id": "…"}, the first request of the environment's own conversation. It may make
any number of calls in any number of conversations, and exits. Its score is the result that it posted to
OPENAI_BASE_URL/outcome; otherwise the environment scores its last conversation.

Invariants: an episode ends when its program exits or posts its result; then all processes of the program are killed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from tidemill.producers.environments import base
from tidemill.producers.environments.base import Messages
from tidemill.producers.environments.spawning import child_variables, keeper_command
from tidemill.schemas.chat.messages import Message, Tool, checked_messages, checked_tools
from tidemill.schemas.records import Task

SHOWN = 1000
"""Number of last characters of the program's stderr that a failure shows."""
KEEPER_S = 5.0
"""Seconds that a keeper gets to kill the program, before the keeper is killed."""
GRACE_S = 2.0
"""Seconds that the environment's own conversation gets to end after its first request."""


class Program(base.Environment):
    """An environment whose tasks are played by an agent program."""

    isolation = "loop"

    def __init__(self, inner: base.Environment, command: Sequence[str]) -> None:
        """`inner` provides the tasks. It scores the program's last conversation if the program posts no result."""
        super().__init__(inner.options)
        self._inner, self._command = inner, list(command)
        digest = hashlib.blake2b(json.dumps(self._command).encode(), digest_size=6).hexdigest()
        self.version = f"{inner.version}+agent-{digest}"  # type: ignore[misc]  # of the instance, not of the class

    def tasks(self, query: base.TaskQuery) -> Iterator[base.TaskDraft]:
        return self._inner.tasks(query)

    async def play(self, task: Task, policy: base.Policy) -> base.Score:
        """Run the program. Raises EnvironmentFailed if it has no result, and the errors of the inner environment."""
        if not isinstance(policy, base.AttemptPolicy):
            raise base.EnvironmentFailed("an agent program needs the endpoint of a rollout worker")
        messages, tools = await self._first_request(task)
        document = json.dumps({"messages": messages, "tools": tools, "task_id": task.task_id})
        ended = asyncio.create_task(_run(self._command, policy.endpoint, document))
        posted = asyncio.create_task(policy.has_result.wait())
        both: set[asyncio.Future[Any]] = {posted, ended}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            code, stderr = await ended if ended.done() else (0, "")
        finally:
            posted.cancel()
            ended.cancel()
            await asyncio.wait({ended})
        if policy.failure:
            raise base.GenerationFailed(policy.failure)
        if policy.posted is not None:
            return policy.posted
        if code:
            errors = stderr.strip()[-SHOWN:] or "it wrote nothing to stderr"
            raise base.EnvironmentFailed(f"the agent program ended with status {code}: {errors}")
        if not policy.conversation:
            raise base.EnvironmentFailed("the agent program ended and had never called the policy")
        score = await self._inner.rescore(task, policy.conversation)
        if score is None:
            raise base.EnvironmentFailed(
                f"the agent program posted no result, and {task.environment} cannot score a conversation"
            )
        return score

    async def cut_off(self, task: Task, messages: Messages) -> base.Score:
        return await self._inner.cut_off(task, messages)

    async def rescore(self, task: Task, messages: Messages) -> base.Score | None:
        return await self._inner.rescore(task, messages)

    def option_rows(self) -> list[dict[str, Any]]:
        return self._inner.option_rows()

    async def close(self) -> None:
        await self._inner.close()

    async def _first_request(self, task: Task) -> tuple[list[Message], Sequence[Tool]]:
        """Return the messages and tools of the first request of the inner environment's conversation."""
        noting = _FirstRequest()
        playing = asyncio.create_task(self._inner.play(task, noting))
        both: set[asyncio.Future[Any]] = {playing, noting.first_call}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if noting.first_call.done():
                await asyncio.wait({playing}, timeout=GRACE_S)
                return noting.first_call.result()
            playing.result()
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
        raise base.EnvironmentFailed(f"{task.environment} never calls the policy, so that an agent program has no task")


class _FirstRequest:
    """A policy that stores the first request, and answers none."""

    def __init__(self) -> None:
        self.first_call: asyncio.Future[tuple[list[Message], Sequence[Tool]]] = (
            asyncio.get_running_loop().create_future()
        )

    async def chat(
        self, messages: Messages, *, tools: Sequence[Tool] = (), max_tokens: int | None = None, trained: bool = True
    ) -> base.Reply:
        call = checked_messages(messages), checked_tools(tools)
        if not trained:
            raise base.EnvironmentFailed("it begins with a simulated user, whom an agent program cannot talk to")
        if not self.first_call.done():
            self.first_call.set_result(call)
        raise base.GenerationFailed("an agent program plays this task")

    @property
    def endpoint(self) -> base.Endpoint:
        raise base.EnvironmentFailed("it runs its own program, which no other program can replace")


async def _run(command: Sequence[str], model: base.Endpoint, document: str) -> tuple[int, str]:
    """Run a program to its end; return its exit code, negative for a signal, and the end of its stderr.

    If this is cancelled, the program and all processes that it started are killed first.
    """
    variables = {**child_variables(os.environ), "OPENAI_BASE_URL": model.base_url, "OPENAI_API_KEY": model.api_key}
    with tempfile.TemporaryFile() as task:
        task.write(document.encode())
        task.seek(0)
        keeper = await asyncio.create_subprocess_exec(
            *keeper_command("program", task.fileno(), *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=variables,
            pass_fds=(task.fileno(),),
            start_new_session=True,
        )
    assert keeper.stdin is not None and keeper.stdout is not None
    last_words = asyncio.create_task(keeper.stdout.read())
    try:
        await asyncio.shield(last_words)
    finally:
        keeper.stdin.close()  # the keeper kills the remaining processes of the program, and exits
        await asyncio.wait({last_words}, timeout=KEEPER_S)
        if keeper.returncode is None and not last_words.done():
            keeper.kill()
        await keeper.wait()
    words = json.loads(await last_words or '{"code": -9, "stderr": "its keeper was killed"}')
    return words["code"], words["stderr"]
