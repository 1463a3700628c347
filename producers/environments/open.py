"""The environments of one run, each opened once with its options, in the event loop or in its own process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence

from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments.base import Environment, EnvironmentFailed, TaskError
from tidemill.producers.environments.find import UnknownEnvironment, environment_type, is_foreign, options_json
from tidemill.producers.environments.process import HostedEnvironment
from tidemill.producers.environments.program import Program
from tidemill.producers.environments.toolbox import json_object
from tidemill.schemas.chat.format import ChatFormat
from tidemill.schemas.config import EnvironmentEntry
from tidemill.schemas.records import Task


async def open_environment(
    entry: EnvironmentEntry, options: Mapping[str, object], settings: RolloutSettings
) -> Environment:
    """Open the environment of a configured entry. Raises UnknownEnvironment, TaskError, EnvironmentFailed."""
    if is_foreign(entry.name):
        # Foreign code is first imported in a process, which reports whether it may run in the event loop.
        opened: Environment = await HostedEnvironment(entry.name, options, settings, entry.network).start()
        if (entry.isolation or opened.isolation) == "loop":
            await opened.close()
            opened = environment_type(entry.name).open(options)
    else:
        kind = environment_type(entry.name)
        checked = kind.options(options)
        hosted = (entry.isolation or kind.isolation) == "process"
        network = kind.network if entry.network is None else entry.network
        process = HostedEnvironment(entry.name, options, settings, network)
        opened = await process.start() if hosted else kind.make(checked)
    return Program(opened, entry.agent) if entry.agent else opened


class EnvironmentSet:
    """The environments that tasks may name."""

    def __init__(self, entries: Sequence[EnvironmentEntry], settings: RolloutSettings) -> None:
        self._entries = {entry.title: entry for entry in entries}
        self._settings = settings
        self._opened: dict[tuple[str, str], asyncio.Task[Environment]] = {}

    async def check(self, chat: ChatFormat) -> None:
        """Open every environment with its configured options, so that a wrong setting fails at the start.

        Raises UnknownEnvironment, TaskError, EnvironmentFailed; TemplateRefused if the chat format does not support the
        tools that an environment needs.
        """
        for entry in self._entries.values():
            opened = await self._cached(entry, json.dumps(entry.options, sort_keys=True, separators=(",", ":")))
            if opened.needs_tools:
                _ = chat.template.call_grammar

    async def get(self, task: Task) -> Environment:
        """Return the environment of a task. Raises EnvironmentFailed if it is unknown or cannot be opened."""
        entry = self._entries.get(task.environment)
        if entry is None:
            known = ", ".join(sorted(self._entries))
            raise EnvironmentFailed(f"task: unknown environment {task.environment!r}; run.environments has {known}")
        try:
            return await self._cached(entry, task.options)
        except (UnknownEnvironment, TaskError, OSError) as error:
            raise EnvironmentFailed(f"environment {task.environment}: {error}") from error

    async def close(self) -> None:
        openings = {*self._opened.values()}  # one may have several keys
        for opening in openings:
            opening.cancel()
        for opened in await asyncio.gather(*openings, return_exceptions=True):
            if isinstance(opened, Environment):
                await opened.close()

    async def _cached(self, entry: EnvironmentEntry, options: str) -> Environment:
        key = (entry.title, options)
        if key not in self._opened:
            given = json_object(options)
            if given is None:
                raise TaskError("the task's options are no JSON object")
            self._opened[key] = asyncio.create_task(open_environment(entry, given, self._settings))
        opening = self._opened[key]
        try:
            opened = await asyncio.shield(opening)
        except Exception:  # of any type, such as OSError if no process can be started
            if self._opened.get(key) is opening:  # otherwise another task has tried again
                del self._opened[key]
            raise
        self._opened.setdefault((entry.title, options_json(opened.options)), opening)  # in the form of task records
        return opened
