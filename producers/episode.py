"""Plays one episode: a world, a harness and a replica, token in and token out.

What holds:

- the context only grows by appending, so every token keeps the id, logprob and version it was sampled with;
- an episode that reaches the context limit after at least one turn is complete and scored as it stands, since the
  policy, not the machinery, made it long;
- all sampled tokens are of one incarnation of version numbers: across two, how stale a token is has no meaning;
- everything that goes wrong in the machinery is `EpisodeFailed`, never a score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tidemill.producers.completion import BadResponse, Completion, Sampling
from tidemill.producers.environment import Environment, Harness, Observation, Score, TaskError, World
from tidemill.producers.environment_threads import Calls, Stalled
from tidemill.producers.transcript import TranscriptBuilder
from tidemill.schemas.records import Segment, Task, VersionSpan

T = TypeVar("T")


class Sampler(Protocol):
    """Whatever samples turns; a `ReplicaSession` in the worker."""

    async def complete(self, prompt: list[int], sampling: Sampling) -> Completion:
        """Sample one turn. Raises BadResponse."""
        ...


class EpisodeFailed(RuntimeError):
    """The episode has no result; the message is the reason that the rollout records."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What bounds an episode, the world's own turns aside."""

    max_context_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """A finished episode."""

    segment: Segment
    spans: tuple[VersionSpan, ...]
    turns: int
    sampled_tokens: int
    score: Score
    incarnation: str
    """Which life of the run's version numbers the spans count in."""


class Episode:
    """One attempt at a task."""

    def __init__(
        self, task: Task, environment: Environment, harness: Harness, limits: EpisodeLimits, calls: Calls
    ) -> None:
        """`calls` runs the environment's code: nothing of it runs on the event loop."""
        self._task = task
        self._environment = environment
        self._harness = harness
        self._limits = limits
        self._calls = calls
        self._built = TranscriptBuilder()
        self._incarnation: str | None = None

    async def play(self, sampler: Sampler) -> EpisodeResult:
        """Play to the end. Raises EpisodeFailed; cancelled from outside at its deadline."""
        world, opening = await self._call(self._open)
        self._built.append_prompt(opening)
        if self._room() <= 0:
            raise EpisodeFailed(
                f"context: the prompt has {len(self._built.ids)} tokens, max_context_tokens is "
                f"{self._limits.max_context_tokens}"
            )
        while await self._turn(world, sampler):
            pass
        return await self._call(lambda: self._result(world))

    async def _turn(self, world: World, sampler: Sampler) -> bool:
        """One turn; whether there is room and reason for another."""
        try:
            completion = await sampler.complete(self._built.ids, self._sampling())
        except BadResponse as error:
            raise EpisodeFailed(f"bad response: {error}") from error
        self._check_incarnation(completion)
        self._built.append_sampled(completion)
        observation, shown = await self._call(lambda: self._step(world, completion.token_ids))
        if observation.done or len(shown) >= self._room():
            return False
        self._built.append_tool(shown)
        return True

    async def _call(self, function: Callable[[], T]) -> T:
        try:
            return await self._calls.call(function)
        except Stalled as error:
            raise EpisodeFailed(f"environment: {error}") from error

    def _open(self) -> tuple[World, list[int]]:
        try:
            world = self._environment.world.open(self._task)
        except TaskError as error:
            raise EpisodeFailed(f"task: {error}") from error
        return world, self._harness.open(world.prompt())

    def _step(self, world: World, token_ids: list[int]) -> tuple[Observation, list[int]]:
        """What the world answers to a turn, and the tokens that show it; none when there is no further turn."""
        observation = world.step(self._harness.read(token_ids))
        return observation, [] if observation.done else self._harness.observe(observation)

    def _check_incarnation(self, completion: Completion) -> None:
        if self._incarnation is None:
            self._incarnation = completion.incarnation
        elif self._incarnation != completion.incarnation:
            raise EpisodeFailed(
                f"incarnation: turns of {self._incarnation!r} and of {completion.incarnation!r}, whose versions cannot "
                "be compared"
            )

    def _room(self) -> int:
        return self._limits.max_context_tokens - len(self._built.ids)

    def _sampling(self) -> Sampling:
        return Sampling(
            max_tokens=min(self._harness.max_turn_tokens, self._room()),
            temperature=self._limits.temperature,
            stop_token_ids=tuple(self._harness.stop_token_ids),
            stop=tuple(self._harness.stop),
        )

    def _result(self, world: World) -> EpisodeResult:
        transcript = world.transcript
        return EpisodeResult(
            segment=self._built.segment(),
            spans=self._built.spans,
            turns=len(transcript),
            sampled_tokens=self._built.sampled_tokens,
            score=self._environment.reward.score(self._task, transcript),
            incarnation=self._incarnation or "",
        )
