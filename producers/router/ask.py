"""What a product asks for: an OpenAI request, checked, and as it is sent to a replica.

What holds: only fields that are known go on; the replica is always asked for token ids and the sampled tokens'
logprobs; sampling that the recorded logprobs would not describe is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tidemill.producers.router.errors import bad_request

LONGEST_SESSION = 256
Json = Any
"""A JSON tree."""


class Kind(StrEnum):
    """Which endpoint; the value is its path."""

    COMPLETION = "/v1/completions"
    CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of an answer the client asked for beside its text."""

    logprobs: bool
    token_ids: bool
    usage: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request."""

    kind: Kind
    body: bytes
    """As it is sent to a replica."""
    stream: bool
    user: str | None
    session_id: str
    wanted: Wanted
    other_sampling: tuple[str, ...]
    """Names of the parameters that make the sampler's distribution another one than the model's own."""
    prompt_tokens: int | None
    """Where the prompt came as token ids, how many."""


def _is(*values: Json) -> Callable[[Json], bool]:
    return lambda given: any(given == value and type(given) is not bool for value in values)


NEUTRAL: Mapping[str, Callable[[Json], bool]] = {
    "temperature": _is(1),
    "top_p": _is(1),
    "top_k": _is(-1, 0),
    "min_p": _is(0),
    "presence_penalty": _is(0),
    "frequency_penalty": _is(0),
    "repetition_penalty": _is(1),
    "min_tokens": _is(0),
    "logit_bias": lambda given: given == {},
    "bad_words": lambda given: given == [],
    "response_format": lambda given: given == {"type": "text"},
}
"""Sampling parameters, and which of their values leave the model's own distribution as it is."""

PASSED = {"model", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", *NEUTRAL}
ONLY_ONE = {"n": 1, "best_of": 1, "echo": False, "suffix": None, "seed": None, "store": False, "service_tier": "auto"}
"""Fields of OpenAI's interface that are taken with one value alone."""
OWN = {"stream", "stream_options", "user", "metadata", "logprobs", "return_token_ids"}
FIELDS: Mapping[Kind, frozenset[str]] = {
    Kind.COMPLETION: frozenset({"prompt", *PASSED}),
    Kind.CHAT: frozenset({"messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", *PASSED}),
}
"""What goes on to a replica, by endpoint."""


def parse(kind: Kind, body: bytes) -> Ask:
    """The request in a body. Raises Refusal (400), which names the field and never quotes its value."""
    asked = _object(body)
    _check_fields(kind, asked)
    stream = _flag(asked, "stream")
    wanted = Wanted(_wants_logprobs(kind, asked), _flag(asked, "return_token_ids"), _wants_usage(asked))
    return Ask(
        kind=kind,
        body=json.dumps(_forwarded(kind, asked, stream, wanted)).encode(),
        stream=stream,
        user=_text(asked, "user"),
        session_id=_session(asked),
        wanted=wanted,
        other_sampling=tuple(
            name for name, neutral in NEUTRAL.items() if asked.get(name) is not None and not neutral(asked[name])
        ),
        prompt_tokens=_count(asked["prompt"]) if kind is Kind.COMPLETION else None,
    )


def _object(body: bytes) -> dict[str, Json]:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request("the body is not JSON") from error
    if not isinstance(asked, dict):
        raise bad_request("the body is not a JSON object")
    return asked


def _check_fields(kind: Kind, asked: Mapping[str, Json]) -> None:
    needed = "prompt" if kind is Kind.COMPLETION else "messages"
    if asked.get(needed) is None:
        raise bad_request(f"`{needed}` is missing", needed)
    for name, value in asked.items():
        if name in ONLY_ONE:
            if value is not None and value != ONLY_ONE[name]:
                raise bad_request(f"`{name}` is only taken as {json.dumps(ONLY_ONE[name])}", name)
        elif name not in FIELDS[kind] and name not in OWN:
            raise bad_request(f"`{name[:64]}` is not a field of this endpoint", name[:64])


def _forwarded(kind: Kind, asked: Mapping[str, Json], stream: bool, wanted: Wanted) -> dict[str, Json]:
    body = {name: value for name, value in asked.items() if name in FIELDS[kind] and value is not None}
    body = {"temperature": 1.0, **body, "return_token_ids": True, "stream": stream}
    if stream and wanted.usage:
        body["stream_options"] = {"include_usage": True}
    if kind is Kind.CHAT:
        return {**body, "logprobs": True}
    return {**body, "logprobs": asked["logprobs"] if wanted.logprobs else 0}


def _wants_logprobs(kind: Kind, asked: Mapping[str, Json]) -> bool:
    given = asked.get("logprobs")
    if kind is Kind.CHAT:
        return _flag(asked, "logprobs")
    if given is not None and (type(given) is not int or given < 0):
        raise bad_request("`logprobs` is not a number of tokens", "logprobs")
    return given is not None


def _wants_usage(asked: Mapping[str, Json]) -> bool:
    options = asked.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise bad_request("`stream_options` takes `include_usage` alone", "stream_options")
    return _flag(options, "include_usage")


def _session(asked: Mapping[str, Json]) -> str:
    metadata = asked.get("metadata")
    if metadata is None:
        return ""
    if not isinstance(metadata, dict):
        raise bad_request("`metadata` is not an object", "metadata")
    session = _text(metadata, "session_id") or ""
    if len(session) > LONGEST_SESSION:
        raise bad_request(f"`metadata.session_id` is longer than {LONGEST_SESSION} characters", "metadata.session_id")
    return session


def _text(fields: Mapping[str, Json], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise bad_request(f"`{name}` is not a string", name)
    return value


def _flag(fields: Mapping[str, Json], name: str) -> bool:
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise bad_request(f"`{name}` is neither true nor false", name)
    return bool(value)


def _count(prompt: Json) -> int | None:
    if isinstance(prompt, str):
        return None
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return len(prompt)
    raise bad_request("`prompt` is one text or one list of token ids; send several prompts one by one", "prompt")
