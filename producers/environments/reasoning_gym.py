"""The tasks of reasoning-gym, as `reasoning_gym:TASK`: one question, one reply, graded by the library.

The library draws an item from its seed plus its index, so that the streams of two seeds share questions; therefore the
question alone decides the split, for any task and options. Its graders return 0 to 1, with partial credit for a reply
that only contains the answer; a reply with exactly 1 solves the task.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache, partial
from importlib.metadata import version
from random import Random
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field

from tidemill.producers.environments import base, find
from tidemill.schemas.chat.messages import Message
from tidemill.schemas.records import RewardComponent, Task

EXECUTES = frozenset({
    "binary_matrix", "codeio", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication",
    "puzzle24", "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip
"""Tasks whose grader evaluates the answer as Python, or that execute foreign code to make an item."""
SLOW = frozenset(("coin_flip", "propositional_logic", "rubiks_cube", "rush_hour"))
"""Tasks whose grader takes 0.1 s or more, or does not end, for an answer such as `1e999999999`."""
NOT_OFFERED: Mapping[str, str] = {
    "composite": "it mixes other tasks: give each of them an entry in run.environments, with its weight",
    "game_of_life_halting": "its grader gives any text full marks",
}
LONGEST_ANSWER = 8_000
"""Largest length in characters; a longer answer is not graded and scores 0."""
ITEMS = 500
"""Items drawn from one dataset of the library; the next dataset has this seed plus `ITEMS`."""
PATIENCE = 2 * ITEMS
"""Consecutive items that cannot be made after which drawing fails."""
_STREAM = ("seed", "size")
"""Settings of a dataset that choose the items, but do not change their questions."""
_ASK = {
    "tags": "Give the final answer between <answer> and </answer>.",
    "last_number": "",
    "last_line": "Give the final answer alone on the last line.",
}
_NUMBER = re.compile(r"(?:(?<![\w)\]])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_TUPLE = "__tuple__"


class ReasoningGymOptions(base.EnvironmentOptions):
    """Options for reading and rewarding a reply; a task adds its own options."""

    model_config = ConfigDict(allow_inf_nan=False)

    answer: Literal["tags", "last_number", "last_line"] = "tags"
    """The part of the reply that is the answer: the text between the last `<answer>` and `</answer>`, the last number,
    or the last line that is not empty."""
    prompt: str | None = None
    """Text after the question. None: a sentence that asks for the form that `answer` needs, tags or a last line."""
    score_weight: float = Field(default=1.0, ge=0)
    """Weight of the library's score, 0 to 1, with partial credit."""
    solved_weight: float = Field(default=0.0, ge=0)
    """Weight of a component that is 1 for a full score and 0 otherwise."""
    answered_weight: float = Field(default=0.0, ge=0)
    """Weight of a component that is 1 if the reply contains an answer and 0 otherwise."""


class GymItem(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    question: str
    answer: str | None
    """A right answer; None if the library has none."""
    metadata: dict[str, Any]


class ReasoningGymEnvironment(base.Environment):
    options: ReasoningGymOptions

    def __init__(self, options: ReasoningGymOptions, task: str) -> None:
        """Check the options. Raises TaskError, with the library's own message, for options out of range."""
        super().__init__(options)
        self._task = task
        self.version = f"reasoning-gym-{version('reasoning-gym')}"  # type: ignore[misc]  # of the instance
        self.isolation = "process" if task in EXECUTES | SLOW else "loop"  # type: ignore[misc]
        own = options.model_fields_set - ReasoningGymOptions.model_fields.keys()
        self._settings = {name: getattr(options, name) for name in own}
        self._grader = self._dataset(seed=0)

    def tasks(self, query: base.TaskQuery) -> Iterator[base.TaskDraft]:
        """Yield items without end. Raises TaskError if the library cannot make more."""
        failures = 0
        begin = Random(f"reasoning_gym {query.seed}").getrandbits(31)  # NumPy takes seeds of at most 32 bits
        for first in itertools.count(begin, ITEMS):
            dataset = self._dataset(first)
            for place in range(ITEMS):
                try:
                    draft = draft_of(item_of(dataset, place))
                except Exception as error:  # the library fails to make some of its items, with errors of any type
                    failures += 1
                    if failures == PATIENCE:
                        raise base.TaskError(f"reasoning_gym:{self._task} cannot make more items: {error!r}") from error
                else:
                    failures = 0
                    yield draft

    async def play(self, task: Task, policy: base.Policy) -> base.Score:
        """Ask the question and grade the reply."""
        item = parse_item(task.payload)
        instruction = _ASK[self.options.answer] if self.options.prompt is None else self.options.prompt
        question = f"{item.question}\n\n{instruction}" if instruction else item.question
        reply = await policy.chat([{"role": "user", "content": question}])
        return self._graded(item, reply.content)

    async def rescore(self, task: Task, messages: Sequence[Message]) -> base.Score:
        """Grade the last turn of the policy."""
        replies = [str(message["content"]) for message in messages if message["role"] == "assistant"]
        return self._graded(parse_item(task.payload), replies[-1] if replies else "")

    def _graded(self, item: GymItem, reply: str) -> base.Score:
        answer = READERS[self.options.answer](reply)
        score = 0.0
        if answer is not None and len(answer) <= LONGEST_ANSWER:
            try:
                with redirect_stdout(io.StringIO()):
                    score = float(self._grader.score_answer(answer, item.model_dump()))
            except Exception:  # noqa: BLE001 - a grader raises any error on a text that is no answer
                score = 0.0
        solved = score == 1.0
        rewards = (
            RewardComponent("score", min(1.0, max(0.0, score)), self.options.score_weight),
            RewardComponent("solved", float(solved), self.options.solved_weight),
            RewardComponent("answered", float(answer is not None), self.options.answered_weight),
        )
        return base.Score(rewards, success=solved)

    def _dataset(self, seed: int) -> Any:  # noqa: ANN401 - the library has no types
        from reasoning_gym.factory import create_dataset

        try:
            return create_dataset(self._task, seed=seed, size=ITEMS, **self._settings)
        except Exception as error:  # the checks of the library's options raise errors of any type
            reason = str(error) or repr(error)
            raise base.TaskError(f"reasoning_gym:{self._task}: {reason}") from error


class ReasoningGym(find.EnvironmentAdapter):
    """Adapter for the tasks of the installed reasoning-gym."""

    def members(self) -> Iterator[find.EnvironmentListing]:
        """Yield every task. Raises ImportError."""
        for name, (dataset, _) in sorted(_datasets().items()):
            yield find.EnvironmentListing(name, _about(dataset), NOT_OFFERED.get(name, ""))

    def member(self, name: str) -> find.EnvironmentType:
        """Return the task of a name. Raises UnknownEnvironment, ImportError."""
        datasets, make = _datasets(), partial(ReasoningGymEnvironment, task=name)
        find.check_member("reasoning_gym", "reasoning-gym has no task", name, datasets, NOT_OFFERED.get(name, ""))
        dataset, config = datasets[name]
        isolation: Literal["loop", "process"] = "process" if name in EXECUTES | SLOW else "loop"
        options = task_options(config)
        return find.EnvironmentType(f"reasoning_gym:{name}", _about(dataset), options, isolation, False, make)


def _datasets() -> Mapping[str, tuple[type, type]]:
    """Import the library; return the class and the settings of each task. Raises ImportError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # from compiling a dependency's source
        import reasoning_gym  # noqa: F401 - fills the registry
        from reasoning_gym.factory import DATASETS
    datasets: Mapping[str, tuple[type, type]] = DATASETS
    return datasets


def _about(dataset: type) -> str:
    return (dataset.__doc__ or "").strip().partition("\n")[0]


@cache
def task_options(config: type) -> type[ReasoningGymOptions]:
    """Return the options model of a task, made from the dataclass of its settings."""
    hints, settings = get_type_hints(config), {}
    for each in dataclasses.fields(config):
        if each.name not in _STREAM:
            made = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
            settings[each.name] = (hints[each.name], made)
    return find.options_model(config.__name__.replace("Config", "Options"), ReasoningGymOptions, settings)


def item_of(dataset: Any, place: int) -> Mapping[str, Any]:  # noqa: ANN401 - the library has no types
    """Return an item of a dataset, the same at every call. Raises the library's error if it cannot make the item."""
    with redirect_stdout(io.StringIO()), find.OwnRandomness(dataset.seed + place).applied():
        made: Mapping[str, Any] = dataset[place]
    return made


def draft_of(item: Mapping[str, Any]) -> base.TaskDraft:
    """Return the draft of an item."""
    payload = {"question": item["question"], "answer": item["answer"], "metadata": _with_tuples(item["metadata"])}
    return base.TaskDraft(json.dumps(payload, ensure_ascii=False), item["question"])


def parse_item(payload: str) -> GymItem:
    """Return the item in a task's payload. Raises TaskError."""
    item = base.read_payload(GymItem, payload, "item of reasoning-gym")
    return item.model_copy(update={"metadata": _without_tuples(item.metadata)})


def between_tags(reply: str) -> str | None:
    """Return the text of the last closed `<answer>`, or None."""
    for piece in reversed(reply.split("<answer>")[1:]):
        inside, closed, _ = piece.partition("</answer>")
        if closed:
            return inside.strip()
    return None


def last_number(reply: str) -> str | None:
    """Return the last decimal number, without commas between thousands, or None."""
    found = _NUMBER.findall(reply.replace("\N{MINUS SIGN}", "-"))
    return found[-1].replace(",", "") if found else None


def last_line(reply: str) -> str | None:
    """Return the last line that is not empty, or None."""
    return reply.strip().rpartition("\n")[2].strip() or None


READERS: Mapping[str, Callable[[str], str | None]] = {
    "tags": between_tags,
    "last_number": last_number,
    "last_line": last_line,
}


def _with_tuples(value: object) -> object:
    """Mark each tuple in a value, so that JSON keeps it: graders compare tuples."""
    if isinstance(value, dict):
        return {key: _with_tuples(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return {_TUPLE: [_with_tuples(each) for each in value]}
    return [_with_tuples(each) for each in value] if isinstance(value, list) else value


def _without_tuples(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(_without_tuples(each) for each in value[_TUPLE])
        return {key: _without_tuples(each) for key, each in value.items()}
    return [_without_tuples(each) for each in value] if isinstance(value, list) else value
