"""The environment port: the interface between Tidemill and all programs that give tasks to a policy.

An environment yields tasks and plays them: `play` converses with the policy in chat messages and returns the reward
in named components. It sees no tokens; the completion layer behind `Policy` keeps them.

Invariants: tasks are deterministic in the query; a hash of its question decides whether a task is held out, in the same
way for every environment (`split_of`), so that no environment can mix the two splits; a reward is a finite number, at
most `MOST_REWARD` in size.
"""

from __future__ import annotations

import asyncio
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
from tidemill.schemas.record_class import record
from tidemill.schemas.records import MOST_REWARD, RewardComponent, Task

Messages = Sequence[Message]
Payload = TypeVar("Payload", bound=BaseModel)


class TaskError(ValueError):
    """Error of options or a payload that an environment cannot use; the text describes the fault."""


class GenerationFailed(RuntimeError):
    """Error when no turn could be sampled. The rollout has failed, also if the environment catches this error."""


class ContextFull(RuntimeError):
    """Error of a full context, caused by the policy. If not caught, `Environment.cut_off` scores the rollout."""


class EnvironmentFailed(RuntimeError):
    """Error of an environment that could not play a task; the rollout records the text as its reason."""


class EnvironmentHung(EnvironmentFailed):
    """Error of an environment that did not answer, or ended its process, in this episode, which gets no score."""


class Split(StrEnum):
    """The split of a task: training or held out. No question is in both."""

    TRAIN = "train"
    EVAL = "eval"


@record(frozen=True)
class Reply:
    message: Message
    """The assistant's message with parsed tool calls; the next request contains it unchanged."""
    finish: Literal["stop", "length", "tool_calls"]
    malformed: tuple[str, ...] = ()
    """Texts intended as tool calls that cannot be parsed."""
    tokens: tuple[int, int] = (0, 0)
    """Number of tokens of the prompt, and of the turn."""

    @property
    def content(self) -> str:
        """The text of the message, without calls and thoughts."""
        return str(self.message["content"])


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One rollout's access to the model for a program: OpenAI's chat protocol."""

    base_url: str
    api_key: str


class Policy(Protocol):
    """One rollout's access to the model. Calls may run at the same time."""

    async def chat(
        self, messages: Messages, *, tools: Sequence[Tool] = (), max_tokens: int | None = None, trained: bool = True
    ) -> Reply:
        """Return the policy's next turn after a conversation.

        With `trained` False the turn is part of no segment: the policy plays another role, such as a simulated user.
        Raises GenerationFailed, ContextFull; BadMessage for messages that cannot be given to a model.
        """
        ...

    @property
    def endpoint(self) -> Endpoint:
        """The same rollout over HTTP. Raises EnvironmentFailed if no endpoint is offered."""
        raise EnvironmentFailed("no HTTP endpoint is offered here")


class AttemptPolicy:
    """The `Policy` of one attempt at one rollout. An agent program may play it and post its result."""

    failure: str
    """Reason why the rollout has failed; empty if it has not."""
    conversation: Messages
    """The messages of the last answered call, and its answer."""
    posted: Score | None
    """The result that an agent program posted; None before."""
    has_result: asyncio.Event
    """Set when a result is posted."""


class EnvironmentOptions(BaseModel):
    """Options of an environment: a pydantic model with a docstring under each field. Unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class TaskQuery:
    seed: int


@dataclass(frozen=True, slots=True)
class TaskDraft:
    """A task before it is issued."""

    payload: str
    """The environment's own JSON document."""
    asks: str
    """The full question. Drafts with equal questions are the same task; the hash of the question decides the split."""
    max_turns: int = 64
    """Most calls of the policy in one rollout; a further call fails the rollout."""


MOST_SCORE_BYTES = 65_536
"""Most bytes of the components and metrics of a rollout, so that they fit into its record beside its segments."""
NUMBERS_BYTES = 24
"""Upper bound for a component or metric without its name."""


@dataclass(frozen=True, slots=True)
class Score:
    rewards: tuple[RewardComponent, ...]
    success: bool | None
    """Whether the task was solved; None if the environment does not define this."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(part.value * part.weight for part in self.rewards)

    def fault(self) -> str:
        """Return the reason why this cannot be recorded; empty if it can. Parts of wrong types raise any error."""
        if not self.rewards:
            return "it has no reward component"
        names = [part.name for part in self.rewards]
        if len(set(names)) < len(names):
            return f"two reward components have one name: {', '.join(names)}"
        if not isinstance(self.success, bool | None):
            return f"success is {self.success!r:.60}, expected True, False or None: convert it by bool()"
        size = 0
        for name in (*names, *self.metrics):
            if not isinstance(name, str):
                return f"the name of a component or metric is {name!r:.60}, expected text"
            size += len(name.encode()) + NUMBERS_BYTES  # raises an error for half of a surrogate pair
        if size > MOST_SCORE_BYTES:
            return f"its components and metrics need {size} bytes, more than {MOST_SCORE_BYTES}: leave some out"
        numbers = {f"{part.name}.{kind}": getattr(part, kind) for part in self.rewards for kind in ("value", "weight")}
        for name, number in (*numbers.items(), *self.metrics.items()):
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                remedy = "" if isinstance(number, float) else ": convert it by float()"
                return f"{name} is {number!r:.60}, which is no finite number{remedy}"
        in_range = abs(self.total) <= MOST_REWARD
        return "" if in_range else f"the sum of the rewards is {self.total}, which is not within ±{MOST_REWARD:g}"


def checked_score(found: object) -> Score:
    """Return the result of an environment if it is a score that can be recorded. Raises EnvironmentFailed."""
    if not isinstance(found, Score):
        raise EnvironmentFailed(f"the environment returned a {type(found).__name__}, not a Score")
    try:
        fault = found.fault()
    except Exception as error:  # its parts may be of any type
        raise EnvironmentFailed(f"the environment returned no score: its check raised {error!r:.500}") from error
    if fault:
        raise EnvironmentFailed(f"the environment returned no score: {fault}")
    return found


class Environment(ABC):
    """Gives tasks to the policy and scores the episodes.

    A subclass is found by its entry point in the group `tidemill.environments`, or as `package.module:object`.
    """

    options_model: ClassVar[type[EnvironmentOptions]] = EnvironmentOptions
    """The type of its options."""
    version: ClassVar[str] = "1"
    """Change it if the same conversation may get another score."""
    isolation: ClassVar[Literal["loop", "process"]] = "process"
    """"loop": it runs in the worker's event loop, for code that never blocks. "process": in its own process, without
    credentials and with a memory limit; the process is killed if it hangs."""
    network: ClassVar[bool] = False
    """Whether its process may open sockets."""
    needs_tools: ClassVar[bool] = False
    """Whether it offers tools to the policy."""

    def __init__(self, options: Any) -> None:  # noqa: ANN401 - an instance of the subclass's options_model
        self.options = options

    @abstractmethod
    def tasks(self, query: TaskQuery) -> Iterator[TaskDraft]:
        """Yield drafts, a finite or endless number, the same drafts for the same query.

        Drafts of both splits are mixed, and may repeat. Raises TaskError.
        """

    @abstractmethod
    async def play(self, task: Task, policy: Policy) -> Score:
        """Play one episode. Raises TaskError for a payload that is not this environment's."""

    async def cut_off(self, task: Task, messages: Messages) -> Score:
        """Score a rollout whose context is full; `messages` is the conversation that filled it.

        By default the score of `rescore`; if that returns None, reward 0 without success.
        """
        found = await self.rescore(task, messages)
        return found or Score((RewardComponent("finished", 0.0, 1.0),), success=False)

    async def rescore(self, task: Task, messages: Messages) -> Score | None:
        """Score a conversation of an agent program, or one in the log; return None if that is not possible."""
        return None

    def option_rows(self) -> list[dict[str, Any]]:
        """Return name, type, value and meaning of each option, for display."""
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
        """Close connections and end processes."""


def read_payload(model: type[Payload], payload: str, name: str) -> Payload:
    """Return the task in a payload; `name` names its kind in an error. Raises TaskError."""
    try:
        return model.model_validate_json(payload)
    except ValidationError as error:
        raise TaskError(f"the payload is no {name}: {faults(error)}") from error


def faults(error: ValidationError, root: str = "payload", most: int = 1) -> str:
    """Return the first `most` faulty places, each with its message; `root` names the document itself."""
    return "; ".join(f"{'.'.join(map(str, each['loc'])) or root}: {each['msg']}" for each in error.errors()[:most])


def split_of(asks: str, held_out_one_in: int = HELD_OUT_ONE_IN) -> Split:
    """Return the split of a question: one in `held_out_one_in` is held out, by BLAKE2b of its text."""
    digest = hashlib.blake2b(asks.encode(), digest_size=8).digest()
    return Split.EVAL if int.from_bytes(digest, "little") % held_out_one_in == 0 else Split.TRAIN
