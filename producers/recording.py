"""Samples the turns of one rollout: first those that the log has, as they were, then live ones, handed on to be logged.

What holds: a recorded turn is used only after exactly the tokens that it was sampled after, whoever recorded it: an
environment that answers otherwise than it did, or turns of two workers that mingle, cost the recording and nothing
else. Its tokens keep their ids, logprobs, versions and incarnation. Once a turn was sampled live, all are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tidemill.producers.completion import BadResponse, Completion, Sampling, checked_completion
from tidemill.producers.replica_client import ReplicaIdentity, ReplicaSession
from tidemill.producers.rollout import rollout_id
from tidemill.schemas.claim import digest
from tidemill.schemas.clock import now_us
from tidemill.schemas.records import Task, Turn

LOG = logging.getLogger(__name__)
Record = Callable[[int, str, Completion], None]
"""Takes the number, the context's digest and the completion of a turn."""


class OtherIncarnation(RuntimeError):
    """The replica serves another incarnation than the recorded turns are of: the episode has to begin anew."""


class RecordingSampler:
    """The sampler of one attempt at one rollout."""

    def __init__(self, session: ReplicaSession, recorded: Iterable[Turn], record: Record | None) -> None:
        """`record` is called with each turn that is sampled live. Of recorded turns that contend, the first counts."""
        self._session = session
        self._record = record
        self._recorded = {(turn.turn, turn.context): turn for turn in reversed(list(recorded))}
        self._last: Turn | None = None
        self._number = 0
        self.resumed = 0
        """Recorded turns that were used."""

    @property
    def identity(self) -> ReplicaIdentity:
        """Who sampled last, or was asked to; empty names before the first turn."""
        asked = self._session.identity
        if not asked.replica_id and self._last is not None:
            return ReplicaIdentity(self._last.replica_id, self._last.region)
        return asked

    async def complete(self, prompt: list[int], sampling: Sampling) -> Completion:
        """The next turn. Raises BadResponse, OtherIncarnation."""
        context = context_digest(prompt) if self._recorded or self._record is not None else ""
        completion = self._look_up(context, sampling)
        if completion is None:
            completion = await self._sample(prompt, sampling, context)
        self._number += 1
        return completion

    def _look_up(self, context: str, sampling: Sampling) -> Completion | None:
        turn = self._recorded.get((self._number, context))
        if turn is None or (self._last is not None and turn.incarnation != self._last.incarnation):
            return None
        try:
            completion = recorded_completion(turn, sampling)
        except BadResponse as error:
            LOG.warning("recorded turn %d of rollout %s is not used: %s", turn.turn, turn.rollout_id, error)
            return None
        self._last = turn
        self.resumed += 1
        return completion

    async def _sample(self, prompt: list[int], sampling: Sampling, context: str) -> Completion:
        self._recorded = {}
        completion = await self._session.complete(prompt, sampling)
        if self._last is not None and completion.incarnation != self._last.incarnation:
            raise OtherIncarnation(f"{self._last.incarnation!r} is recorded, {completion.incarnation!r} is served")
        if self._record is not None:
            self._record(self._number, context, completion)
        return completion


def context_digest(token_ids: Sequence[int]) -> str:
    """What a turn's `context` names: xxh3-128 of the token ids as u4, hexadecimal."""
    return digest(np.asarray(token_ids, dtype="<u4").tobytes())


def recorded_turn(
    task: Task, index: int, worker_id: str, sampled_by: ReplicaIdentity, number: int, context: str, made: Completion
) -> Turn:
    """The record of a turn that was sampled now."""
    return Turn(
        rollout_id=rollout_id(task, index),
        group_id=task.group_id,
        task_id=task.task_id,
        run_id=task.run_id,
        worker_id=worker_id,
        replica_id=sampled_by.replica_id,
        region=sampled_by.region,
        incarnation=made.incarnation,
        turn=number,
        n_tokens=len(made.token_ids),
        token_ids=np.asarray(made.token_ids, dtype="<u4").tobytes(),
        logprobs=np.asarray(made.logprobs, dtype="<f4").tobytes(),
        spans=list(made.spans),
        finish_reason=made.finish_reason,
        at=now_us(),
        context=context,
    )


def recorded_completion(turn: Turn, sampling: Sampling) -> Completion:
    """The completion that a turn records. Raises BadResponse when it is none that `sampling` can have given."""
    try:
        ids, logprobs = np.frombuffer(turn.token_ids, dtype="<u4"), np.frombuffer(turn.logprobs, dtype="<f4")
    except ValueError as error:
        raise BadResponse(f"its arrays are cut short: {error}") from error
    if len(ids) != turn.n_tokens:
        raise BadResponse(f"it says {turn.n_tokens} tokens and holds {len(ids)}")
    choice = {
        "token_ids": ids.tolist(),
        "logprobs": {"token_logprobs": logprobs.tolist()},
        "weight_versions": [[span.version, span.start, span.end] for span in turn.spans],
        "finish_reason": turn.finish_reason,
        "weight_incarnation": turn.incarnation,
    }
    return checked_completion(choice, sampling)
