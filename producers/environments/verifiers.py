"""Tasksets of verifiers v1: `verifiers:TASKSET`, where TASKSET is the module that an installed taskset is.

verifiers' part is messages and rewards; every generation goes through the policy, which keeps the tokens.

- The turns of agents that the environment marks as trainable are trained. The other agents (a simulated user, a judge
  that is an agent) are answered by the endpoint `others_url`, or, where none is given, by the policy itself in contexts
  that are part of no segment. A judge that calls a model of its own needs `others_url`, or a `base_url` of its own.
- Several trained agents make one rollout: its reward is the mean of theirs, and all their segments share it.
- A rollout counts when every agent ended without an error and every call was answered. A full context ends the
  conversation, and what was said until then is scored. verifiers gets no deadlines and retries nothing.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from importlib.metadata import distributions, packages_distributions, version
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any

from pydantic import Field

from tidemill.producers.environments.base import (
    Environment,
    EnvironmentOptions,
    Policy,
    Score,
    TaskDraft,
    TaskError,
    TaskQuery,
)
from tidemill.producers.environments.find import EnvironmentType, Family, Listed, UnknownEnvironment
from tidemill.schemas.records import Task

if TYPE_CHECKING:  # importing verifiers takes five seconds
    from tidemill.producers.environments.verifiers_bridge import TasksetPlayer

MOST_CALLS = 4096
"""Calls of all agents in one rollout; one more fails it."""
WINDOW = 4096
"""Tasks of an endless taskset that are shuffled among each other."""
BUILT_IN = {
    "harbor": "its tasks run in containers",
    "nemo_gym": "its tasks run in containers",
    "openenv": "offered without verifiers: openenv",
    "textarena": "offered without verifiers: textarena:GAME",
}
"""Tasksets that come with verifiers, and why they are not offered."""


_REQUIRES = re.compile(r"verifiers\s*($|[^\w.-])")


class VerifiersOptions(EnvironmentOptions):
    """A taskset with who plays it."""

    taskset: dict[str, Any] = Field(default_factory=dict)
    """The taskset's own options."""

    env: dict[str, Any] = Field(default_factory=dict)
    """Further keys of verifiers' `[env]` block: `id` of another environment over the taskset, and its agents by name,
    each with `harness`, `runtime`, `max_turns`, `model` and `client`."""

    harness: str = ""
    """Id of the harness, the program of every agent that names none. Empty: the taskset's own, or a chat loop that
    calls the taskset's tools."""

    harness_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the harness."""

    max_turns: int = Field(default=32, ge=1)
    """Most turns of an agent that names no limit; its conversation is scored as it is then."""

    others_url: str = ""
    """Base URL of an OpenAI endpoint, without a key, that answers for judges and for agents that are not trained."""

    others_model: str = "default"
    """The model to ask there."""

    success_at: float = 1.0
    """Reward from which a rollout counts as solved."""


class Verifiers(Family):
    """Tasksets that are installed as modules."""

    def members(self) -> Iterator[Listed]:
        """Modules of installed distributions that require verifiers. Raises ImportError without verifiers."""
        _installed()
        for each in distributions():
            if each.name != "tidemill" and any(_REQUIRES.match(line) for line in each.requires or ()):
                roots = {file.parts[0].removesuffix(".py") for file in each.files or () if file.suffix == ".py"}
                for root in sorted(filter(str.isidentifier, roots)):
                    yield Listed(root, str(each.metadata.json.get("summary", "")))
        for name, problem in BUILT_IN.items():
            yield Listed(name, "comes with verifiers", problem)

    def member(self, name: str) -> EnvironmentType:
        """The taskset of a module, which is not imported yet. Raises UnknownEnvironment, ImportError."""
        _installed()
        module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()  # as verifiers reads ids
        if module in BUILT_IN:
            raise UnknownEnvironment(f"verifiers:{name} is not offered: {BUILT_IN[module]}")
        if not module.isidentifier() or importlib.util.find_spec(module) is None:
            raise UnknownEnvironment(f"verifiers:{name}: there is no module {module}; install the taskset's package")

        def make(options: VerifiersOptions) -> Environment:
            return VerifiersTaskset(module, options)

        about = f"the taskset {module} of verifiers"
        return EnvironmentType(f"verifiers:{name}", about, VerifiersOptions, "process", True, make)


class VerifiersTaskset(Environment):
    """One taskset."""

    options_model = VerifiersOptions
    isolation = "process"
    network = True
    options: VerifiersOptions

    def __init__(self, name: str, options: VerifiersOptions) -> None:
        """Import a taskset's module and load it. Raises TaskError."""
        super().__init__(options)
        from tidemill.producers.environments import verifiers_bridge as bridge

        self._name, self._bridge = name, bridge
        self._env = bridge.load(name, options)
        self._player: TasksetPlayer | None = None
        packages = [f"{each}-{version(each)}" for each in packages_distributions().get(name, ())]
        self.version = "+".join([f"verifiers-{version('verifiers')}", *packages])  # type: ignore[misc]  # of the instance
        self.needs_tools = bridge.offers_tools(self._env)  # type: ignore[misc]

    def tasks(self, query: TaskQuery) -> Iterator[TaskDraft]:
        """The taskset's tasks, shuffled. Raises TaskError when the taskset cannot load them."""
        shuffle, tasks = Random(f"verifiers {query.seed}").shuffle, iter(self._env.taskset)
        try:
            while window := list(islice(tasks, WINDOW) if self._env.taskset.INFINITE else tasks):
                shuffle(window)
                for task in window:
                    payload = task.data.model_dump_json(exclude_defaults=True)
                    yield TaskDraft(payload, self._bridge.asks(task.data), MOST_CALLS)
        except Exception as error:  # a taskset is foreign code, and raises anything
            raise TaskError(f"verifiers:{self._name} cannot load its tasks: {error!r}") from error

    async def play(self, task: Task, policy: Policy) -> Score:
        """Have the taskset's agents play. Raises what the policy raises, EnvironmentFailed, TaskError."""
        try:
            given = self._bridge.task_of(self._env, json.loads(task.payload))
        except (ValueError, RecursionError) as error:
            raise TaskError(f"the payload is no task of {self._name}: {error}") from error
        if self._player is None or self._player.failed:
            self._player = self._bridge.TasksetPlayer(self._env, self.options)
        return await self._player.play(given, policy)

    async def close(self) -> None:
        """Stop the tool servers."""
        if self._player is not None:
            await self._player.close()


def _installed() -> None:
    if importlib.util.find_spec("verifiers") is None:
        raise ImportError("verifiers is not installed")
