"""A checked OpenAI request of a product, with the fields that are sent to a replica; and the replica's answer. Pure.

Invariants: only known fields are forwarded; the replica is always asked for token ids and the logprobs of the sampled
tokens; sampling that the recorded logprobs would not describe is named. An answer is collected for the record chunk by
chunk: a chunk is valid only if it has as many logprobs as tokens, and spans that begin at 0 and leave no gap; an answer
with an invalid chunk has no sampled tokens. A span is reported when its version begins (`weight_versions` of a streamed
chunk), so that the versions of an interrupted answer are known too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from tidemill.producers.sampling.completion import BadResponse, Completion, build_segment, read_choice
from tidemill.producers.sampling.replicas import RequestRefused
from tidemill.schemas.chat.contexts import SampledTurn
from tidemill.schemas.chat.messages import BadMessage
from tidemill.schemas.chat.protocol import CHAT_FIELDS, ChatRequest, chat_request, json_object
from tidemill.schemas.records import SamplingParameters, Segment, VersionSpan

LONGEST_SESSION = 256
Json = Any
"""A JSON tree."""


class Refusal(Exception):
    """A request that gets no answer, in the form of OpenAI's errors; `kind` is the error's `type`."""

    def __init__(self, status: int, message: str, kind: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.parameter = status, message, kind, parameter

    @classmethod
    def bad(cls, message: str, parameter: str | None = None) -> Refusal:
        """Return an error of the client: 400. Without `parameter` it names the field at the message's start, if any."""
        named = re.match(r"`?([a-z_]+)(?=[`\[])", message)
        return cls(400, message, "invalid_request_error", parameter or (named[1] if named else None))

    @classmethod
    def unavailable(cls, message: str) -> Refusal:
        """Return a failure that the client cannot correct: 503."""
        return cls(503, message, "service_unavailable_error")

    @classmethod
    def by_replica(cls, error: RequestRefused) -> Refusal:
        """Return a replica's refusal, with its own message if it has the form of OpenAI's errors."""
        try:
            detail = json.loads(error.detail)["error"]
            kind = str(detail.get("type") or "invalid_request_error")
            return cls(error.status, str(detail["message"]), kind, detail.get("param"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls(error.status, "the replica refused the request", "invalid_request_error")

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.parameter, "code": self.status}
        return {"error": error}


class RequestKind(StrEnum):
    """The endpoint of a request; the value is its path."""

    COMPLETION = "/v1/completions"
    CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    fields: Mapping[str, Json]
    """Fields of the request to a replica; for a chat, all except its prompt."""
    chat: ChatRequest | None
    """None for a completion."""
    stream: bool
    user: str | None
    session_id: str
    shows_logprobs: bool
    """Whether the client gets the logprobs in addition to the text."""
    shows_token_ids: bool
    other_sampling: tuple[str, ...]
    """Names of the parameters with which the sampler's distribution differs from the model's own."""


NEUTRAL: Mapping[str, tuple[Json, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "response_format": ({"type": "text"},),
}
"""Sampling parameters, with the values that do not change the model's own distribution."""

NUMBERS = tuple(f.name for f in fields(SamplingParameters) if f.name != "others")
"""Sampling parameters whose values are recorded; for all others, only the names are recorded."""

ONLY_ONE = {
    "n": 1, "best_of": 1, "echo": False, "suffix": None, "seed": None, "store": False, "service_tier": "auto",
    "parallel_tool_calls": True,
}  # fmt: skip
"""Fields of OpenAI's interface for which only one value is accepted."""
PASSED = frozenset({"model", "ignore_eos", *NEUTRAL})
FORWARDED: Mapping[RequestKind, frozenset[str]] = {
    RequestKind.COMPLETION: PASSED | {"prompt", "max_tokens", "stop", "stop_token_ids", "skip_special_tokens"},
    RequestKind.CHAT: PASSED,
}
"""The fields that are forwarded to a replica unchanged, by endpoint."""
OWN = {"stream", "stream_options", "user", "metadata", "logprobs", "return_token_ids"}


def parse(kind: RequestKind, body: bytes) -> CompletionRequest:
    """Return the request in a body. Raises Refusal (400), which names the field."""
    needed, known = "prompt", FORWARDED[kind] | OWN
    if kind is RequestKind.CHAT:
        needed, known = "messages", known | CHAT_FIELDS
    try:
        request = json_object(body)
        if request.get(needed) is None:
            raise Refusal.bad(f"`{needed}` is missing")
        for name, value in request.items():
            if name in ONLY_ONE:
                if value is not None and value != ONLY_ONE[name]:
                    raise Refusal.bad(f"`{name}` is only taken as {json.dumps(ONLY_ONE[name])}")
            elif name not in known:
                raise Refusal.bad(f"`{name[:64]}` is not a field of this endpoint", name[:64])
        chat = chat_request(request, formats=True) if kind is RequestKind.CHAT else None
    except BadMessage as error:
        raise Refusal.bad(str(error)) from error
    stream, token_ids = _flag(request, "stream"), _flag(request, "return_token_ids")
    fields = {name: value for name, value in request.items() if name in FORWARDED[kind] and value is not None}
    for name in fields.keys() - {"prompt"}:
        numbers = fields[name] if isinstance(fields[name], list) else [fields[name]]
        # A replica answers some of them with status 500, as if it had failed, and the record cannot hold them.
        if any(type(number) in (int, float) and abs(number) >= 2**63 for number in numbers):
            raise Refusal.bad(f"`{name}` has a number of more than 64 bits")
    fields = {"temperature": 1.0, **fields, "logprobs": 0, "return_token_ids": True, "stream": stream}
    options, metadata = ({} if request.get(name) is None else request[name] for name in ("stream_options", "metadata"))
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise Refusal.bad("`stream_options` takes only `include_usage`")
    if _flag(options, "include_usage") and stream:
        fields["stream_options"] = {"include_usage": True}
    if chat is None:
        prompt, logprobs = request["prompt"], request.get("logprobs")
        is_ids = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
        if not is_ids and not isinstance(prompt, str):
            raise Refusal.bad("`prompt` is one text or one list of token ids; send several prompts one by one")
        if logprobs is not None and (type(logprobs) is not int or logprobs < 0):
            raise Refusal.bad("`logprobs` is not a number of tokens")
        fields["logprobs"] = logprobs or 0
    if not isinstance(metadata, dict):
        raise Refusal.bad("`metadata` is not an object")
    user, session = _text(request, "user"), _text(metadata, "session_id") or ""
    if len(session) > LONGEST_SESSION:
        raise Refusal.bad(f"`metadata.session_id` is longer than {LONGEST_SESSION} characters", "metadata.session_id")
    given = {name: request[name] for name in NEUTRAL if request.get(name) is not None}
    other = (name for name, value in given.items() if type(value) is bool or value not in NEUTRAL[name])
    shows_logprobs = request.get("logprobs") is not None if chat is None else chat.alternatives is not None
    return CompletionRequest(fields, chat, stream, user, session, shows_logprobs, token_ids, tuple(other))


def _text(fields: Mapping[str, Json], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise Refusal.bad(f"`{name}` is not a string")
    return value


def _flag(fields: Mapping[str, Json], name: str) -> bool:
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise Refusal.bad(f"`{name}` is neither true nor false")
    return bool(value)


def sampling_of(ask: CompletionRequest) -> SamplingParameters:
    """Return the sampling for the record: the requested parameters that change the model's own distribution."""
    given = {name: ask.fields[name] for name in ask.other_sampling if name in NUMBERS}
    numbers: dict[str, Any] = {
        name: int(v) if name == "top_k" else float(v) for name, v in given.items() if type(v) in (int, float)
    }
    return SamplingParameters(**numbers, others=",".join(name for name in ask.other_sampling if name not in numbers))


_TOKENS = ("token_ids", "prompt_token_ids", "weight_versions", "weight_incarnation")


class CollectedChoice:
    """The one choice of an answer of `/v1/completions`, streamed or whole."""

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.incarnation = ""
        """The incarnation of the version numbers in the spans; empty until the replica has sent it."""
        self._logprobs: list[float] = []
        self._spans: tuple[VersionSpan, ...] = ()

    def take(self, answer: Mapping[str, Json]) -> int:
        """Add a chunk or a whole body; return its number of tokens. Raises BadResponse."""
        choices = answer.get("choices", [])
        if not isinstance(choices, list) or len(choices) > 1:
            raise BadResponse("`choices` is not a list of one choice")
        if not choices:
            return 0
        choice = read_choice(choices[0])
        tokens, logprobs = choice.tokens()
        self.tokens += tokens
        self._logprobs += logprobs
        self.prompt = choice.prompt_token_ids or self.prompt
        if choice.weight_versions:
            self._spans, self.incarnation = choice.spans(), choice.weight_incarnation
        self.finish_reason = choice.finish_reason or self.finish_reason
        return len(tokens)

    def segment(self, trainable: bool) -> Segment:
        """Return prompt and answer as they are recorded; the answer is masked out if it is not `trainable`.

        Raises BadResponse if the replica did not send a version for each sampled token.
        """
        turns = []
        if trainable and self.tokens:
            spans, count = self._spans, len(self.tokens)
            if not spans or spans[-1].start >= count or (self.finish_reason is not None and spans[-1].end != count):
                raise BadResponse(
                    f"`weight_versions` does not cover {count} sampled tokens: is this a Tidemill replica?"
                )
            # Before the end, only the start of the last span is known: the start of a newer one would have been sent.
            covering = (*spans[:-1], replace(spans[-1], end=count))
            made = Completion(self.tokens, self._logprobs, covering, str(self.finish_reason))
            start = len(self.prompt)
            turns.append(SampledTurn(start, start + len(self.tokens), made))
        return build_segment([*self.prompt, *self.tokens], turns)


def shown(document: Mapping[str, Json], ask: CompletionRequest) -> dict[str, Json]:
    """Return a chunk or a body of a completion for the client, without the parts that are only recorded."""
    hidden = () if ask.shows_token_ids else _TOKENS
    kept = {name: value for name, value in document.items() if name not in hidden}
    kept["choices"] = choices = []
    for choice in document.get("choices", ()):
        choices.append({name: value for name, value in choice.items() if name not in hidden})
        if not ask.shows_logprobs:
            choices[-1]["logprobs"] = None
    return kept
