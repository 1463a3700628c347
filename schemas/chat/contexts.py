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
from typing import Generic, TypeVar

from tidemill.schemas.chat.format import ChatFormat
from tidemill.schemas.chat.messages import NO_TOOLS, Identity, Message, Tools, identity

T = TypeVar("T")


class Origin(StrEnum):
    """The origin of a request's context."""

    APPEND = "append"
    FORK = "fork"
    FRESH = "fresh"


@dataclass(frozen=True, slots=True)
class SampledTurn(Generic[T]):
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


@dataclass(frozen=True, slots=True)
class _End(Generic[T]):
    """The end of a sampled turn, from which a later request may continue."""

    context: Context[T]
    identities: tuple[Identity, ...]
    message: Message
    length: int
    """Number of ids of the context up to this end."""
    count: int


@dataclass(frozen=True, slots=True)
class PendingTurn(Generic[T]):
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

    def __init__(self, chat: ChatFormat, most: int | None = None) -> None:
        """`most`: number of turns' ends that are cached; the least recently used is dropped first. None: all."""
        self._chat, self._most = chat, most
        self._ends: OrderedDict[Hashable, _End[T]] = OrderedDict()
        self.all: list[Context[T]] = []
        """All contexts with a turn of their own, in order of the first turn; only filled if `most` is None."""

    def begin(self, messages: Sequence[Message], tools: Tools = NO_TOOLS) -> PendingTurn[T]:
        """Return the context of a request with checked messages. Raises TemplateRefused."""
        identities = tuple(map(identity, messages))
        keys = [hash(tools.identity)]
        for each in identities:
            keys.append(hash((keys[-1], each)))
        found = self._longest(messages, identities, keys)
        if found is None:
            turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
            head = list(messages[: turns[0] if turns else None])
            context = Context[T](tools, head, self._chat.open(messages, tools), count=len(turns), busy=True)
            return PendingTurn(context, Origin.FRESH, context.ids, identities, keys[-1])
        known, context, shared = len(found.identities), found.context, found.context.ids
        # Reuse the known texts, to save memory: each HTTP request contains new copies of them.
        identities = found.identities + identities[known:]
        more = self._chat.extend(shared[found.length - 1], context.head, found.message, messages[known:], tools)
        if len(shared) == found.length and not context.busy:
            context.busy = True
            return PendingTurn(context, Origin.APPEND, [*shared, *more], identities, keys[-1])
        fork = Context[T](tools, context.head, [*shared[: found.length], *more], count=found.count, busy=True)
        return PendingTurn(fork, Origin.FORK, fork.ids, identities, keys[-1])

    def add_turn(self, asked: PendingTurn[T], ids: Sequence[int], message: Message, made: T) -> None:
        """Add the turn that was sampled for a request."""
        context = asked.context
        start = len(asked.ids)
        context.ids = [*asked.ids, *ids]
        context.turns.append(SampledTurn(start, len(context.ids), made))
        context.count, context.busy = context.count + 1, False
        own = identity(message)
        key = hash((asked.key, own))
        self._ends[key] = _End(context, (*asked.messages, own), message, len(context.ids), context.count)
        self._ends.move_to_end(key)
        if self._most is None and len(context.turns) == 1:
            self.all.append(context)
        while self._most is not None and len(self._ends) > self._most:
            self._ends.popitem(last=False)

    def release(self, asked: PendingTurn[T]) -> None:
        """Allow a later request to extend the same end, whether a turn was sampled or not."""
        asked.context.busy = False

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
