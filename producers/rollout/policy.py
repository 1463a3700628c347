"""The completion layer: sends one rollout's chat messages to a replica as token ids and decodes the answers.

Invariants:

- sampled ids are kept unchanged, and contexts only grow (`schemas.chat.contexts`);
- a recorded turn answers the request whose context has its digest, equal contexts in order of recording, if it has the
  requested expert ids; all sampled tokens of a rollout are of one incarnation, because policy lag between two
  incarnations has no meaning;
- a failed generation fails the rollout, even if the environment catches the error; a full context does not;
- no call is answered after the end of the episode.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments import base
from tidemill.producers.environments.base import ContextFull, GenerationFailed, Messages, Reply
from tidemill.producers.sampling.completion import BadResponse, Completion, Sampling, checked_completion, read_choice
from tidemill.producers.sampling.replicas import ReplicaIdentity, ReplicaSession
from tidemill.schemas.chat.contexts import Context, Contexts, Origin, PendingTurn
from tidemill.schemas.chat.format import ChatFormat
from tidemill.schemas.chat.messages import BadMessage, Message, Tool, Tools, checked_messages, checked_tools
from tidemill.schemas.chat.template import TemplateRefused
from tidemill.schemas.clock import now_us
from tidemill.schemas.expert_ids import unpacked_ids
from tidemill.schemas.record_class import record
from tidemill.schemas.records import Task, Turn, rollout_id
from tidemill.schemas.stored_object import digest

LOG = logging.getLogger(__name__)
OVER = "the episode is over"
CANCELLED = "a call was cancelled before it was answered"


@record(frozen=True)
class RecordedTurn:
    """A turn that was sampled earlier, and may answer a request with the same context."""

    context: str
    """Digest of the token ids before it."""
    completion: Completion
    sampled_by: ReplicaIdentity


def context_digest(token_ids: Sequence[int], temperature: float = 1.0) -> str:
    """Return the xxh3-128 of the token ids as u4, hexadecimal: the name of a context in `Turn.context`.

    A temperature other than 1 is appended as f8, so that a turn answers only requests for its own temperature.
    """
    sampled_at = b"" if temperature == 1.0 else np.float64(temperature).tobytes()
    return digest(array("I", token_ids).tobytes() + sampled_at)  # NumPy takes five times as long to read a list


def turn_record(task: Task, index: int, worker_id: str, number: int, made: RecordedTurn) -> Turn:
    """Return the record of a turn that was sampled live, number `number` of its rollout."""
    completion = made.completion
    return Turn(
        rollout_id=rollout_id(task.group_id, index),
        group_id=task.group_id,
        task_id=task.task_id,
        run_id=task.run_id,
        worker_id=worker_id,
        replica_id=made.sampled_by.replica_id,
        region=made.sampled_by.region,
        incarnation=completion.incarnation,
        turn=number,
        n_tokens=len(completion.token_ids),
        token_ids=np.asarray(completion.token_ids, dtype="<u4").tobytes(),
        logprobs=np.asarray(completion.logprobs, dtype="<f4").tobytes(),
        spans=list(completion.spans),
        finish_reason=completion.finish_reason,
        at=now_us(),
        context=made.context,
        expert_ids=completion.expert_ids,
    )


def recorded_turns(turns: Iterable[Turn]) -> list[RecordedTurn]:
    """Return the usable turns, in order. If two workers recorded the same turn, the first one counts."""
    found: dict[tuple[str, int], RecordedTurn] = {}
    for turn in turns:
        try:
            ids, logprobs = np.frombuffer(turn.token_ids, dtype="<u4"), np.frombuffer(turn.logprobs, dtype="<f4")
            if len(ids) != turn.n_tokens:
                raise BadResponse(f"it says {turn.n_tokens} tokens and holds {len(ids)}")
            choice = {
                "token_ids": ids.tolist(),
                "logprobs": {"token_logprobs": logprobs.tolist()},
                "weight_versions": [[span.version, span.start, span.end] for span in turn.spans],
                "finish_reason": turn.finish_reason,
                "weight_incarnation": turn.incarnation,
            }
            completion = checked_completion(read_choice(choice), Sampling(max_tokens=len(ids), temperature=1.0))
            if turn.expert_ids:
                unpacked_ids(turn.expert_ids)
                completion = replace(completion, expert_ids=turn.expert_ids)
        except ValueError as error:  # truncated arrays, or values that no replica can have sent
            LOG.warning("recorded turn %d of rollout %s is not used: %s", turn.turn, turn.rollout_id, error)
            continue
        by = ReplicaIdentity(turn.replica_id, turn.region)
        found.setdefault((turn.context, turn.turn), RecordedTurn(turn.context, completion, by))
    return list(found.values())


class RolloutPolicy(base.AttemptPolicy):
    """The `Policy` of one attempt at one rollout."""

    def __init__(
        self,
        chat: ChatFormat,
        session: ReplicaSession,
        settings: RolloutSettings,
        max_turns: int,
        recorded: Iterable[RecordedTurn] = (),
        on_turn: Callable[[int, RecordedTurn], None] | None = None,
        offer: Callable[[RolloutPolicy], base.Endpoint] | None = None,
    ) -> None:
        """Prepare an attempt that continues from its `recorded` turns.

        `on_turn` is called with the number and the record of each turn that is sampled live; `offer` opens an HTTP
        endpoint for this rollout.
        """
        self._chat, self.session, self._settings, self._max_turns = chat, session, settings, max_turns
        self._on_turn, self._offer = on_turn, offer
        self._recorded: dict[str, deque[RecordedTurn]] = defaultdict(deque)
        for turn in recorded:
            self._recorded[turn.context].append(turn)
        self._endpoint: base.Endpoint | None = None
        self._calls = 0
        self.closed = False
        """Whether all further calls are refused."""
        self.contexts: Contexts[Completion] = Contexts(chat)
        self.turns: list[RecordedTurn] = []
        """Turns of this attempt in order, recorded ones included."""
        self.resumed = 0
        """Recorded turns that were used."""
        self.failure = ""
        self.other_incarnation = False
        """It failed because the recorded turns are of an incarnation that the replicas do not serve: it can restart."""
        self.full: Messages = ()
        """The conversation that filled the context, if any."""
        self.conversation: Messages = []
        self.posted: base.Score | None = None
        self.has_result = asyncio.Event()

    @property
    def unused(self) -> list[RecordedTurn]:
        """Recorded turns that answered no request."""
        return [turn for waiting in self._recorded.values() for turn in waiting]

    @property
    def identity(self) -> ReplicaIdentity:
        """The replica that was asked last; empty names before the first turn."""
        newest = self.session.identity
        return newest if newest.replica_id or not self.turns else self.turns[-1].sampled_by

    @property
    def endpoint(self) -> base.Endpoint:
        """The HTTP endpoint of this rollout, opened at the first use."""
        if self._endpoint is None:
            if self._offer is None:
                raise GenerationFailed("no HTTP endpoint is offered here")
            self._endpoint = self._offer(self)
        return self._endpoint

    def post(self, score: base.Score) -> None:
        """Store the result of an agent program and refuse all further calls. Raises ValueError for a second one."""
        if self.posted is not None:
            raise ValueError("the result was posted already")
        self.posted, self.closed = score, True
        self.has_result.set()

    async def chat(
        self, messages: Messages, *, tools: Sequence[Tool] = (), max_tokens: int | None = None, trained: bool = True
    ) -> Reply:
        if self.closed or self.failure:
            raise GenerationFailed(OVER if self.closed else self.failure)
        conversation, offered = self._checked(messages), checked_tools(tools)
        self._calls += 1
        if self._calls > self._max_turns:
            raise self._failed(f"more than {self._max_turns} calls of the policy (the task's max_turns)")
        pending = self._ask(conversation, offered, trained)
        try:
            return await self._turn(pending, conversation, offered, max_tokens, trained)
        except asyncio.CancelledError:
            if not self.closed:
                self._failed(CANCELLED)
            raise
        except (GenerationFailed, ContextFull):
            raise
        except Exception as error:  # a defect of Tidemill: the caller could continue as if it were an answer
            self._failed(f"the completion layer raised {error!r:.300}")
            raise
        finally:
            self.contexts.release(pending)

    def _checked(self, messages: Messages) -> list[Message]:
        """Check messages, except those of the last conversation if they begin with it. Raises BadMessage."""
        known = len(self.conversation)
        if isinstance(messages, list) and len(messages) > known and messages[:known] == self.conversation:
            try:
                return [*self.conversation, *checked_messages(messages[known:])]
            except BadMessage:  # the text must name the place in all messages
                pass
        return checked_messages(messages)

    def _ask(self, messages: Messages, tools: Tools, trained: bool) -> PendingTurn[Completion]:
        most = self._settings.max_context_tokens * self._chat.longest_token
        if len(messages[-1]["content"]) > most:
            size = len(messages[-1]["content"])
            raise self._failed(f"the last message has {size} characters, more than any context can hold")
        if sum([len(message["content"]) for message in messages]) > most:
            raise self._no_room(messages, most, trained)
        try:
            if trained:
                return self.contexts.begin(messages, tools)
            ids, turns = self._chat.open(messages, tools), sum(each["role"] == "assistant" for each in messages)
            return PendingTurn(Context(tools, [], ids, count=turns), Origin.FRESH, ids, ())
        except TemplateRefused as error:
            raise self._failed(f"chat template: {error}") from error

    async def _turn(
        self, pending: PendingTurn[Completion], messages: Messages, tools: Tools, max_tokens: int | None, trained: bool
    ) -> Reply:
        settings = self._settings
        room = settings.max_context_tokens - len(pending.ids)
        if room <= 0:
            raise self._no_room(messages, len(pending.ids), trained)
        wanted = min(room, settings.max_turn_tokens, room if max_tokens is None else max(1, max_tokens))
        unknown: int | None = None
        if settings.expert_ids:
            # The first token whose expert ids no turn of the context contains; for a turn that is not trained, none
            # are requested. A fork requests all, because the turns that it shares belong to another context.
            known = pending.context.turns[-1].end - 1 if pending.context.turns else 0
            unknown = known if trained else len(pending.ids)
        sampling = Sampling(wanted, settings.temperature, self._chat.stop_token_ids, expert_ids_from=unknown)
        made = await self._complete(pending.ids, sampling)
        if self.closed:
            raise GenerationFailed(OVER)
        read = self._chat.read(made.token_ids, tools, pending.context.count)
        if trained:
            self.contexts.add_turn(pending, made.token_ids, read.message, made)
            # The caller may change its own copy.
            kept = copy.deepcopy(read.message) if "tool_calls" in read.message else dict(read.message)
            self.conversation = [*messages, kept]
        finish = "tool_calls" if read.message.get("tool_calls") else made.finish_reason
        counts = (len(pending.ids), len(made.token_ids))
        return Reply(read.message, finish, read.malformed, counts)  # type: ignore[arg-type]  # checked: stop or length

    async def _complete(self, ids: list[int], sampling: Sampling) -> Completion:
        context = context_digest(ids, sampling.temperature)
        turn = self._known(context, len(ids), sampling)
        if turn is None:
            try:
                made = await self.session.complete(ids, sampling)
            except BadResponse as error:
                raise self._failed(f"bad response: {error}") from error
            if not self._fits(made):
                self.other_incarnation = self.resumed > 0
                before = self.turns[0].completion.incarnation
                raise self._failed(
                    f"incarnation: turns of {before!r} and of {made.incarnation!r}, whose versions cannot be compared"
                )
            turn = RecordedTurn(context, made, self.session.identity)
            if self._on_turn is not None:
                self._on_turn(len(self.turns), turn)
        self.turns.append(turn)
        return turn.completion

    def _known(self, context: str, tokens: int, sampling: Sampling) -> RecordedTurn | None:
        waiting = self._recorded.get(context)
        while waiting:
            turn = waiting.popleft()
            made, wanted = turn.completion, sampling.expert_ids_from
            if wanted is not None and (
                not made.expert_ids or tokens + len(made.token_ids) - 1 - len(unpacked_ids(made.expert_ids)) > wanted
            ):
                continue
            if len(made.token_ids) <= sampling.max_tokens and self._fits(made):
                self.resumed += 1
                return turn
        return None

    def _fits(self, made: Completion) -> bool:
        return not self.turns or made.incarnation == self.turns[0].completion.incarnation

    def _no_room(self, messages: Messages, size: int, trained: bool) -> Exception:
        most = self._settings.max_context_tokens
        if not (trained and self.turns):
            return self._failed(f"context: the prompt has {size} tokens, max_context_tokens is {most}")
        self.full = messages
        return ContextFull(f"the conversation has {size} tokens, and the context {most}")

    def _failed(self, reason: str) -> GenerationFailed:
        self.failure = self.failure or reason
        return GenerationFailed(reason)
