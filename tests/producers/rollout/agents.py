"""A policy over a fake replica: a byte-level tokenizer with ChatML, and turns that the test gives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.records import build
from tidemill.producers.config import RolloutSettings
from tidemill.producers.environments.base import Endpoint
from tidemill.producers.rollout.policy import RolloutPolicy
from tidemill.producers.sampling.completion import Completion, Sampling
from tidemill.producers.sampling.replicas import ReplicaIdentity
from tidemill.schemas.chat.format import ChatFormat, chatml, special_texts
from tidemill.schemas.chat.template import ChatTemplate
from tidemill.schemas.config import ChatSettings
from tidemill.schemas.records import Task, VersionSpan

END = "<|im_end|>"
Say = Callable[[str], "str | Awaitable[str]"]
"""Returns the next turn after a context, both as text."""


def byte_tokenizer(marks: Sequence[str] = ("<|im_start|>", END)) -> Tokenizer:
    """Return a tokenizer with one token per byte and one per mark."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return tokenizer


def chat_format() -> ChatFormat:
    tokenizer = byte_tokenizer()
    template = ChatTemplate(chatml(), {}, special_texts(tokenizer), ChatSettings())
    return ChatFormat(tokenizer, template, [])


CHAT = chat_format()


def last(context: str, role: str = "user") -> str:
    """Return the text of the last message of a role in a context."""
    return re.findall(rf"<\|im_start\|>{role}\n(.*?)<\|im_end\|>", context, re.DOTALL)[-1]


class FakeSession:
    """A ReplicaSession that samples the turns of `say`."""

    def __init__(self, say: Say, tokenizer: Tokenizer) -> None:
        self.say, self.tokenizer = say, tokenizer
        self.identity = ReplicaIdentity("fake", "here")
        self.contexts: list[str] = []
        self.cancelled = 0

    async def complete(self, prompt: list[int], sampling: Sampling) -> Completion:
        context = self.tokenizer.decode(prompt, skip_special_tokens=False)
        self.contexts.append(context)
        try:
            said = self.say(context)
            text = said if isinstance(said, str) else await said
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        whole = self.tokenizer.encode(text + END, add_special_tokens=False).ids
        ids = whole[: sampling.max_tokens]
        reason = "stop" if len(ids) == len(whole) else "length"
        return Completion(ids, [-0.5] * len(ids), (VersionSpan(0, 0, len(ids)),), reason)

    def failures_so_far(self) -> str:
        return "no request was tried again"

    async def __aenter__(self) -> FakeSession:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        pass


def policy_of(
    say: Say,
    offer: Callable[[RolloutPolicy], Endpoint] | None = None,
    *,
    max_turns: int = 64,
    max_context_tokens: int = 8192,
    **more: Any,
) -> RolloutPolicy:
    limits = RolloutSettings(max_context_tokens=max_context_tokens, max_turn_tokens=2048)
    session: Any = FakeSession(say, CHAT._tokenizer)
    return RolloutPolicy(CHAT, session, limits, max_turns, offer=offer, **more)


def task_of(payload: str, environment: str = "test", max_turns: int = 64, options: str = "{}") -> Task:
    return build(Task, task_id="task", group_id="group", environment=environment, payload=payload, group_size=1,
                 max_turns=max_turns, deadline_at=2**60, options=options)  # fmt: skip
