"""What an environment is: a harness, a world and a reward, three interfaces that know nothing of each other.

- The **world** holds the state of one episode and executes the model's turns. It deals in text only.
- The **harness** turns text into the token ids that the policy reads, and says when a sampled turn ends.
- The **reward** scores a finished transcript. It is a pure function of the task and the transcript, so that a stored
  rollout can be scored again from the log.

What holds: a world is deterministic in its task and the turns it is given; token ids that were sampled are never
tokenised again (a context only grows by appending); everything a model can write is answered, never raised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tokenizers import Tokenizer

from tidemill.schemas.records import RewardComponent, Task


class TaskError(ValueError):
    """The payload of a task is not one that its environment can open."""


class Split(StrEnum):
    """Which side of the train and held-out division a task payload falls on. No payload is on both."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True)
class Observation:
    """What the world answers to one turn."""

    text: str
    """Tool output to show the policy; shown only when `done` is false."""
    done: bool
    """True when the episode is over: an answer was given, or the turns are spent."""
    tool_error: bool
    """True when the turn could not be executed; `text` then says why."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy and what the world made of it."""

    text: str
    observation: Observation


Transcript = tuple[Turn, ...]


class World(ABC):
    """The state of one episode."""

    @classmethod
    @abstractmethod
    def open(cls, task: Task) -> World:
        """A fresh episode of `task`. Raises `TaskError` for a payload that is not this environment's."""

    @abstractmethod
    def prompt(self) -> str:
        """The text that poses the task."""

    @abstractmethod
    def step(self, text: str) -> Observation:
        """Execute one turn of the policy. Never raises for what `text` holds; raises `RuntimeError` after the end."""

    @property
    @abstractmethod
    def transcript(self) -> Transcript:
        """The turns so far, oldest first."""


class Harness(ABC):
    """Between text and token ids, for one checkpoint's tokenizer."""

    @property
    @abstractmethod
    def stop_token_ids(self) -> list[int]:
        """Sampling any of these ends a turn; the stop token is part of the turn. May be empty."""

    @property
    @abstractmethod
    def stop(self) -> list[str]:
        """Strings that end a turn, for a tokenizer without a single token for them. May be empty."""

    @property
    @abstractmethod
    def max_turn_tokens(self) -> int:
        """Most tokens to sample in one turn."""

    @abstractmethod
    def open(self, prompt: str) -> list[int]:
        """Token ids of the context that the first turn is sampled from."""

    @abstractmethod
    def read(self, token_ids: Sequence[int]) -> str:
        """The text of a sampled turn, without its end marker."""

    @abstractmethod
    def observe(self, observation: Observation) -> list[int]:
        """Token ids to append after a sampled turn, up to where the next turn is sampled."""


@dataclass(frozen=True, slots=True)
class Score:
    """A reward by its parts, and whether the task was solved."""

    components: tuple[RewardComponent, ...]
    success: bool

    @property
    def total(self) -> float:
        """The sum of value * weight."""
        return sum(part.value * part.weight for part in self.components)


class Reward(ABC):
    """Scores a finished episode."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Names the formula; changes whenever the same transcript may score otherwise."""

    @abstractmethod
    def score(self, task: Task, transcript: Transcript) -> Score:
        """The score of a finished transcript. Raises `TaskError` for a payload that is not this environment's."""


@dataclass(frozen=True, slots=True)
class TaskDraft:
    """A task before it is issued: what the environment decides of it."""

    payload: str
    """The environment's JSON document, canonical: equal tasks have equal payloads."""
    max_turns: int
    split: Split


@dataclass(frozen=True, slots=True)
class TaskQuery:
    """Which tasks to draw."""

    seed: int
    count: int
    split: Split
    options: Mapping[str, int] = field(default_factory=dict)
    """Difficulty by name; what names there are is the environment's."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A harness, a world, a reward and a source of tasks, under one name."""

    name: str
    world: type[World]
    harness: Callable[[Tokenizer], Harness]
    reward: Reward
    tasks: Callable[[TaskQuery], Iterator[TaskDraft]]
    """Yields `count` distinct drafts of the split, deterministic in the query. Raises `TaskError` for bad options."""
