"""Plays one episode: a world, a harness and a replica, token in and token out.

What holds:

- the context only grows by appending, so every token keeps the id, logprob and version it was sampled with;
- an episode that reaches the context limit after at least one turn is complete and scored as it stands, since the
  policy, not the machinery, made it long;
- everything that goes wrong in the machinery is `EpisodeFailed`, never a score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tidemill.producers.completion import BadResponse, Completion, Sampling
from tidemill.producers.environment import Environment, Harness, Score, TaskError, World
from tidemill.producers.transcript import TranscriptBuilder
from tidemill.schemas.records import Segment, Task, VersionSpan


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


class Episode:
    """One attempt at a task."""

    def __init__(self, task: Task, environment: Environment, harness: Harness, limits: EpisodeLimits) -> None:
        """Raises EpisodeFailed for a task that the environment cannot open."""
        self._task = task
        self._reward = environment.reward
        self._harness = harness
        self._limits = limits
        self._built = TranscriptBuilder()
        self._world = _open_world(environment, task)

    async def play(self, sampler: Sampler) -> EpisodeResult:
        """Play to the end. Raises EpisodeFailed; cancelled from outside at its deadline."""
        self._built.append_prompt(self._harness.open(self._world.prompt()))
        if self._room() <= 0:
            raise EpisodeFailed(
                f"context: the prompt has {len(self._built.ids)} tokens, max_context_tokens is "
                f"{self._limits.max_context_tokens}"
            )
        while await self._turn(sampler):
            pass
        return self._result()

    async def _turn(self, sampler: Sampler) -> bool:
        """One turn; whether there is room and reason for another."""
        try:
            completion = await sampler.complete(self._built.ids, self._sampling())
        except BadResponse as error:
            raise EpisodeFailed(f"bad response: {error}") from error
        self._built.append_sampled(completion)
        observation = self._world.step(self._harness.read(completion.token_ids))
        if observation.done:
            return False
        shown = self._harness.observe(observation)
        if len(shown) >= self._room():
            return False
        self._built.append_tool(shown)
        return True

    def _room(self) -> int:
        return self._limits.max_context_tokens - len(self._built.ids)

    def _sampling(self) -> Sampling:
        return Sampling(
            max_tokens=min(self._harness.max_turn_tokens, self._room()),
            temperature=self._limits.temperature,
            stop_token_ids=tuple(self._harness.stop_token_ids),
            stop=tuple(self._harness.stop),
        )

    def _result(self) -> EpisodeResult:
        transcript = self._world.transcript
        return EpisodeResult(
            segment=self._built.segment(),
            spans=self._built.spans,
            turns=len(transcript),
            sampled_tokens=self._built.sampled_tokens,
            score=self._reward.score(self._task, transcript),
        )


def _open_world(environment: Environment, task: Task) -> World:
    try:
        return environment.world.open(task)
    except TaskError as error:
        raise EpisodeFailed(f"task: {error}") from error
