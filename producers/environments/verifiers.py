"""Tasksets of verifiers v1: `verifiers:TASKSET`; TASKSET is the module of an installed taskset.

verifiers handles messages and rewards; the policy samples every turn and keeps the tokens.

- The turns of agents that the environment marks as trainable are trained. The other agents (a simulated user, a judge
  that is an agent) are answered by the endpoint `others_url`, or, if that is not set, by the policy itself in contexts
  that are part of no segment. A judge that calls its own model needs `others_url`, or its own `base_url`.
- Several trained agents make one rollout: its reward is the mean of theirs, and all their segments share it.
- A rollout is valid if every agent ended without an error and every call was answered. A full context ends the
  conversation, and the messages until then are scored. verifiers gets no deadlines and makes no retries.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from importlib.metadata import distributions
from typing import Any

from pydantic import Field

from tidemill.producers.environments import base, find

BUILT_IN = {
    "harbor": "its tasks run in containers",
    "nemo_gym": "its tasks run in containers",
    "openenv": "offered without verifiers: openenv",
    "textarena": "offered without verifiers: textarena:GAME",
}
"""Tasksets that are part of verifiers, with the reason why each is not offered."""
_REQUIRES = re.compile(r"verifiers\s*($|[^\w.-])")


class VerifiersOptions(base.EnvironmentOptions):
    """Options of a taskset and of the agents that play it."""

    taskset: dict[str, Any] = Field(default_factory=dict)
    """The taskset's own options."""
    env: dict[str, Any] = Field(default_factory=dict)
    """Further keys of verifiers' `[env]` block: `id` of another environment for the taskset, and its agents by name,
    each with `harness`, `runtime`, `max_turns`, `model` and `client`."""
    harness: str = ""
    """Id of the harness, the program of every agent that does not name one. Empty: the taskset's own, or a chat loop
    that calls the taskset's tools."""
    harness_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the harness."""
    max_turns: int = Field(default=32, ge=1)
    """Most turns of an agent without its own limit; after them its conversation is scored."""
    others_url: str = ""
    """Base URL of an OpenAI endpoint, without a key, for judges and for agents that are not trained."""
    others_model: str = "default"
    """The model name for `others_url`."""
    success_at: float = 1.0
    """Smallest reward of a solved rollout."""


class Verifiers(find.EnvironmentAdapter):
    """Adapter for tasksets that are installed as modules."""

    def members(self) -> Iterator[find.EnvironmentListing]:
        """Yield the modules of installed distributions that require verifiers. Raises ImportError without verifiers."""
        _installed()
        for each in distributions():
            if each.name != "tidemill" and any(_REQUIRES.match(line) for line in each.requires or ()):
                roots = {file.parts[0].removesuffix(".py") for file in each.files or () if file.suffix == ".py"}
                for root in sorted(filter(str.isidentifier, roots)):
                    yield find.EnvironmentListing(root, str(each.metadata.json.get("summary", "")))
        for name, problem in BUILT_IN.items():
            yield find.EnvironmentListing(name, "comes with verifiers", problem)

    def member(self, name: str) -> find.EnvironmentType:
        """Return the taskset of a module, which is not imported yet. Raises UnknownEnvironment, ImportError."""
        _installed()
        module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()  # as verifiers parses ids
        if module in BUILT_IN:
            raise find.UnknownEnvironment(f"verifiers:{name} is not offered: {BUILT_IN[module]}")
        if not module.isidentifier() or importlib.util.find_spec(module) is None:
            raise find.UnknownEnvironment(
                f"verifiers:{name}: there is no module {module}; install the taskset's package"
            )

        def make(options: VerifiersOptions) -> base.Environment:
            from tidemill.producers.environments.verifiers_bridge import VerifiersTaskset  # takes five seconds

            return VerifiersTaskset(module, options)

        about = f"the taskset {module} of verifiers"
        return find.EnvironmentType(f"verifiers:{name}", about, VerifiersOptions, "process", True, make)


def _installed() -> None:
    if importlib.util.find_spec("verifiers") is None:
        raise ImportError("verifiers is not installed")
