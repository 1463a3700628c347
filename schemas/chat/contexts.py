"""Contexts: the growing token sequences of one or many conversations, looked up by their messages.

A request contains its whole conversation. It *appends* if it begins with all messages of a known context, and no turn
of the assistant that the context does not contain follows; it *forks* if it begins with a part of a context, up to one
of its turns; otherwise it is *fresh*, and rendered whole.

Invariants: the ids of a context only grow, and a fork begins with the ids of the turns that it shares, so that every
sampled token keeps its id. A turn belongs to the context that sampled it; a fork contains its ids but not the turn.
Calls may run at the same time: two calls that extend one turn are an append and a fork.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import is_
from typing import Generic, NamedTuple, TypeVar

from tidemill.schemas.chat.format import ChatFormat
from tidemill.schemas.chat.messages import NO_TOOLS, Identity, Message, Tools, identity

T = TypeVar("T")

MOST_TOKENS = 2**23
"""Most tokens of the contexts that a server keeps: about 40 bytes each."""


class Origin(StrEnum):
    """The origin of a request's context."""

    APPEND = "append"
    FORK = "fork"
    FRESH = "fresh"


class SampledTurn(NamedTuple, Generic[T]):
    """A turn that was sampled in its context."""

    start: int
    """Index of its first token in the context's ids."""
    end: int
    made: T


@dataclass(slots=True, eq=False)
class Context(Generic[T]):
    """One token sequence."""

    tools: Tools
    head: list[Message]
    """Messages before the first turn of the assistant."""
    ids: list[int]
    turns: list[SampledTurn[T]] = field(default_factory=list)
    """Its own turns, oldest first, without those that it shares with the context from which it forked."""
    count: int = 0
    """Number of the assistant's turns in it, including shared ones."""
    busy: bool = False
    """Whether a turn is being sampled, or was sampled, after its last known end."""
    ends: int = 0
    """Number of its turns' ends that are cached."""


class _End(NamedTuple, Generic[T]):
    """The end of a sampled turn, from which a later request may continue."""

    context: Context[T]
    identities: tuple[Identity, ...]
    message: Message
    length: int
    """Number of ids of the context up to this end."""
    turns: int
    """Number of the assistant's turns up to this end."""


class PendingTurn(NamedTuple, Generic[T]):
    """A request with its context: sample after `ids`, then pass the turn to `Contexts.add_turn`."""

    context: Context[T]
    origin: Origin
    ids: list[int]
    """Token ids of the prompt."""
    messages: tuple[Identity, ...]
    key: int = 0
    """Hash of the messages and tools."""


class Contexts(Generic[T]):
    """The contexts of one rollout, or the most recent ones of a server."""

    def __init__(self, chat: ChatFormat, most: int | None = None, most_tokens: int = MOST_TOKENS) -> None:
        """Make an empty cache.

        Args:
            most: number of turns' ends that are cached; the least recently used is dropped first. None: all.
            most_tokens: number of tokens of the contexts with a cached end, above which ends are dropped too, except
                the newest; not used without `most`.
        """
        self._chat, self._most, self._most_tokens = chat, most, most_tokens
        self._ends: OrderedDict[Hashable, _End[T]] = OrderedDict()
        self._last: tuple[tuple[Message, ...], tuple[Identity, ...], list[int]] = ((), (), [])
        """The messages of the last request, their identities, and the hashes up to each message."""
        self._tokens = 0
        """Number of tokens of the contexts with a cached end."""
        self.all: list[Context[T]] = []
        """All contexts with a turn of their own, in order of the first turn; only filled if `most` is None."""

    def begin(
        self, messages: Sequence[Message], tools: Tools = NO_TOOLS, opened: list[int] | None = None
    ) -> PendingTurn[T]:
        """Return the context of a request with checked messages. Raises TemplateRefused.

        `opened`: the result of `ChatFormat.open`, if it is known.
        """
        identities, keys = self._identified(messages, tools)
        found = self._longest(messages, identities, keys)
        if found is None:
            turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
            head = list(messages[: turns[0] if turns else None])
            ids = self._chat.open(messages, tools) if opened is None else opened
            context = Context[T](tools, head, ids, count=len(turns), busy=True)
            return PendingTurn(context, Origin.FRESH, context.ids, identities, keys[-1])
        known, context, shared = len(found.identities), found.context, found.context.ids
        # Reuse the known texts, to save memory: each HTTP request contains new copies of them.
        identities = found.identities + identities[known:]
        more = self._chat.extend(shared[found.length - 1], context.head, found.message, messages[known:], tools)
        if len(shared) == found.length and not context.busy:
            context.busy = True
            return PendingTurn(context, Origin.APPEND, [*shared, *more], identities, keys[-1])
        fork = Context[T](tools, context.head, [*shared[: found.length], *more], count=found.turns, busy=True)
        return PendingTurn(fork, Origin.FORK, fork.ids, identities, keys[-1])

    def add_turn(self, pending: PendingTurn[T], ids: Sequence[int], message: Message, made: T) -> None:
        """Add the turn that was sampled for a request."""
        context = pending.context
        start = len(pending.ids)
        counted = len(context.ids) if context.ends else 0
        context.ids = [*pending.ids, *ids]
        self._tokens += len(context.ids) - counted
        context.ends += 1
        context.turns.append(SampledTurn(start, len(context.ids), made))
        context.count, context.busy = context.count + 1, False
        own = identity(message)
        key = hash((pending.key, own))
        if (same := self._ends.pop(key, None)) is not None:
            self._drop(same)
        self._ends[key] = _End(context, (*pending.messages, own), message, len(context.ids), context.count)
        if self._most is None:
            if len(context.turns) == 1:
                self.all.append(context)
            return
        while len(self._ends) > 1 and (len(self._ends) > self._most or self._tokens > self._most_tokens):
            self._drop(self._ends.popitem(last=False)[1])

    def release(self, pending: PendingTurn[T]) -> None:
        """Allow a later request to extend the same end, whether a turn was sampled or not."""
        pending.context.busy = False

    def _drop(self, end: _End[T]) -> None:
        end.context.ends -= 1
        if not end.context.ends:
            self._tokens -= len(end.context.ids)

    def _identified(self, messages: Sequence[Message], tools: Tools) -> tuple[tuple[Identity, ...], list[int]]:
        """Return the identity of each message, and the hash of the tools and of the messages up to each one.

        Those of the last request's messages are not computed again if this request begins with the same objects.
        """
        before, identities, keys = self._last
        known, first_key = len(before), hash(tools.identity)
        if not (keys and keys[0] == first_key and known <= len(messages) and all(map(is_, before, messages))):
            known, identities, keys = 0, (), [first_key]
        identities = identities + tuple(map(identity, messages[known:]))
        keys = keys.copy()
        for each in identities[known:]:
            keys.append(hash((keys[-1], each)))
        self._last = (tuple(messages), identities, keys)
        return identities, keys

    def _longest(
        self, messages: Sequence[Message], identities: tuple[Identity, ...], keys: Sequence[int]
    ) -> _End[T] | None:
        """Return the longest known end with which the request begins, if no unknown turn follows; otherwise None."""
        for known in range(len(messages) - 1, 0, -1):
            if messages[known]["role"] == "assistant":
                return None
            if messages[known - 1]["role"] != "assistant":
                continue
            end = self._ends.get(keys[known])
            if end is not None and end.identities == identities[:known]:
                self._ends.move_to_end(keys[known])
                return end
        return None
