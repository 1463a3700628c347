"""The environment port: the interface between Tidemill and everything that poses tasks to a policy.

An environment yields tasks and plays them: `play` converses with the policy in chat messages and returns the reward
in named components. It sees no token; the completion layer behind `Policy` keeps those.

What holds: tasks are deterministic in the query; a task is held out or for training by a hash of its question, for
every environment alike (`split_of`), so that no environment can mix them up; a reward is a finite number.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tidemill.schemas.chat.messages import Message, Tool
from tidemill.schemas.config import HELD_OUT_ONE_IN
from tidemill.schemas.records import RewardComponent, Task

Messages = Sequence[Message]
Payload = TypeVar("Payload", bound=BaseModel)


class TaskError(ValueError):
    """Options or a payload that an environment cannot use; the text says what is wrong."""


class GenerationFailed(RuntimeError):
    """The machinery could not sample a turn. The rollout has failed, also where the environment catches this error."""


class ContextFull(RuntimeError):
    """The conversation fills the context: the policy's doing. Not caught, `Environment.cut_off` scores the rollout."""


class EnvironmentFailed(RuntimeError):
    """An environment that could not play a task; the text is the reason that the rollout records."""


class EnvironmentHung(EnvironmentFailed):
    """An environment that did not answer, or ended its process, in this episode: there is nothing to score."""


class Split(StrEnum):
    """The side of the train and held-out division. No question is on both."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the policy."""

    message: Message
    """The assistant's message, tool calls parsed; it goes back unchanged in the next request."""
    finish: Literal["stop", "length", "tool_calls"]
    malformed: tuple[str, ...] = ()
    """Texts that were meant as tool calls and cannot be read."""
    tokens: tuple[int, int] = (0, 0)
    """Of the prompt, and of the turn."""

    @property
    def content(self) -> str:
        """The text of the message, calls and thoughts aside."""
        return str(self.message["content"])


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One rollout's way to the model for a program: OpenAI's chat protocol."""

    base_url: str
    api_key: str


class Policy(Protocol):
    """One rollout's way to the model. Calls may run side by side."""

    async def chat(
        self, messages: Messages, *, tools: Sequence[Tool] = (), max_tokens: int | None = None, trained: bool = True
    ) -> Reply:
        """The policy's next turn after a conversation.

        With `trained` False the turn is part of no segment: the policy plays somebody else, such as a simulated user.
        Raises GenerationFailed, ContextFull; BadMessage for messages that no model can be shown.
        """
        ...

    @property
    def endpoint(self) -> Endpoint:
        """The same rollout over HTTP. Raises EnvironmentFailed where none is offered."""
        raise EnvironmentFailed("no HTTP endpoint is offered here")


class AttemptPolicy(ABC):
    """The `Policy` of one attempt at one rollout, which an agent program may play and post the result of."""

    failure: str
    """Why the rollout has failed; empty while it has not."""
    conversation: Messages
    """The messages of the last call that was answered, and its answer."""
    posted: Score | None
    """The result that an agent program posted."""

    @abstractmethod
    async def result(self) -> Score:
        """The result of an agent program, once it is posted."""


class EnvironmentOptions(BaseModel):
    """Options of an environment: a pydantic model with a docstring under each field. Unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class TaskQuery:
    """Which tasks to draw."""

    seed: int


@dataclass(frozen=True, slots=True)
class TaskDraft:
    """A task before it is issued."""

    payload: str
    """The environment's own JSON document."""
    asks: str
    """The question in full. Drafts that ask the same are the same task, and its hash decides the split."""
    max_turns: int = 64
    """Most calls of the policy in one rollout; one more fails it."""


@dataclass(frozen=True, slots=True)
class Score:
    """How an episode went."""

    rewards: tuple[RewardComponent, ...]
    success: bool | None
    """Whether the task was solved; None where the environment has no such notion."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The sum of value * weight."""
        return sum(part.value * part.weight for part in self.rewards)

    def fault(self) -> str:
        """Why this cannot be recorded; empty when it can."""
        if not self.rewards:
            return "it has no reward component"
        names = [part.name for part in self.rewards]
        if len(set(names)) < len(names):
            return f"two reward components have one name: {', '.join(names)}"
        numbers = {f"{part.name}.{kind}": getattr(part, kind) for part in self.rewards for kind in ("value", "weight")}
        for name, number in (*numbers.items(), *self.metrics.items()):
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                return f"{name} is {number!r:.60}, which is no finite number"
        return ""


class Environment(ABC):
    """Poses tasks and scores what the policy makes of them.

    A subclass is found by its entry point in the group `tidemill.environments`, or as `package.module:object`.
    """

    options_model: ClassVar[type[EnvironmentOptions]] = EnvironmentOptions
    """The type of its options."""
    version: ClassVar[str] = "1"
    """Changes when the same conversation may score otherwise."""
    isolation: ClassVar[Literal["loop", "process"]] = "process"
    """"loop": it runs in the worker's event loop, for code that never blocks. "process": in a process of its own,
    without credentials and with a memory limit, which is killed when it hangs."""
    network: ClassVar[bool] = False
    """Whether its process may open sockets."""
    needs_tools: ClassVar[bool] = False
    """Whether it offers tools to the policy."""

    def __init__(self, options: Any) -> None:  # noqa: ANN401 - an instance of the subclass's options_model
        self.options = options

    @abstractmethod
    def tasks(self, query: TaskQuery) -> Iterator[TaskDraft]:
        """Yield drafts without end, or as many as there are, the same ones for the same query.

        Drafts of both splits come mixed, and may repeat. Raises TaskError.
        """

    @abstractmethod
    async def play(self, task: Task, policy: Policy) -> Score:
        """Play one episode. Raises TaskError for a payload that is not this environment's."""

    async def cut_off(self, task: Task, messages: Messages) -> Score:
        """Score a rollout whose context is full; `messages` is the conversation that filled it.

        By default like `rescore`, and no success where that cannot score it.
        """
        found = await self.rescore(task, messages)
        return found or Score((RewardComponent("finished", 0.0, 1.0),), success=False)

    async def rescore(self, task: Task, messages: Messages) -> Score | None:
        """Score a conversation that was held before, by a program or in the log; None where that is not possible."""
        return None

    def option_rows(self) -> list[dict[str, Any]]:
        """Name, type, value and meaning of each option, for people."""
        values = self.options.model_dump(mode="json")
        return [
            {
                "name": name,
                "type": getattr(field.annotation, "__name__", str(field.annotation)),
                "value": values[name],
                "meaning": (field.description or "").replace("\n", " "),
            }
            for name, field in type(self.options).model_fields.items()
        ]

    async def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Give back connections and processes."""


def read_payload(model: type[Payload], payload: str, name: str) -> Payload:
    """The task that a payload holds; `name` says in an error that it holds none. Raises TaskError."""
    try:
        return model.model_validate_json(payload)
    except ValidationError as error:
        raise TaskError(f"the payload is no {name}: {faults(error)}") from error


def faults(error: ValidationError, root: str = "payload", most: int = 1) -> str:
    """The first `most` places at fault, each with its message; `root` names the document itself."""
    return "; ".join(f"{'.'.join(map(str, each['loc'])) or root}: {each['msg']}" for each in error.errors()[:most])


def split_of(asks: str, held_out_one_in: int = HELD_OUT_ONE_IN) -> Split:
    """The side that a question falls on: one in `held_out_one_in` is held out, by BLAKE2b of its text."""
    digest = hashlib.blake2b(asks.encode(), digest_size=8).digest()
    return Split.EVAL if int.from_bytes(digest, "little") % held_out_one_in == 0 else Split.TRAIN
