"""A replica's completion, checked before its tokens are used, and the segments that store it in records.

The replica implements vLLM's `/v1/completions` with `return_token_ids`, `logprobs: 0`, and two extensions of the
choice: `weight_versions`, a list of [version, start, end) over the sampled tokens, and `weight_incarnation`, the
incarnation of these version numbers. Invariants of a `Completion`: as many logprobs as token ids, all finite; spans
that cover the tokens in order, without gap or overlap.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import numpy as np

from tidemill.schemas.chat.contexts import Context, SampledTurn
from tidemill.schemas.expert_ids import packed_ids, unpacked_ids
from tidemill.schemas.record_class import record
from tidemill.schemas.records import MOST_LOGPROB, Segment, VersionSpan

Token = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Logprob = Annotated[float, msgspec.Meta(ge=-1e5, le=MOST_LOGPROB)]
"""vLLM writes -9999 for minus infinity."""
Version = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class BadResponse(ValueError):
    """The replica's answer is not a valid completion; the message gives the reason."""


class ReplicaUnavailable(RuntimeError):
    """The replica did not answer the request; another replica, or the same one later, may answer it."""


@record(frozen=True)
class Sampling:
    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()

    expert_ids_from: int | None = None
    """The first token of the context whose expert ids are requested; None: no expert ids are requested."""

    def request_body(self, prompt: list[int], model: str | None) -> bytes:
        """Return the request. It overrides the checkpoint's generation_config.json, whose values would bias it."""
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        optional: dict[str, Any] = {
            "model": model,
            "stop_token_ids": self.stop_token_ids or None,
            "routed_experts_prompt_start": self.expert_ids_from,
        }
        return json.dumps(body | {name: value for name, value in optional.items() if value is not None}).encode()


@record(frozen=True)
class Completion:
    token_ids: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    """In turn coordinates."""
    finish_reason: str
    incarnation: str = ""
    """The incarnation of the version numbers in the spans; empty if the replica did not send it."""
    expert_ids: bytes = b""
    """Of the tokens from `Sampling.expert_ids_from` up to the last one, packed; empty if they were not requested."""


class Logprobs(msgspec.Struct):
    token_logprobs: list[Logprob]


class Choice(msgspec.Struct):
    """The fields that are read from the choice of an answer or of a chunk."""

    finish_reason: str | None = None
    token_ids: list[Token] | None = None
    prompt_token_ids: list[Token] | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[tuple[Version, Version, Version]] | None = None
    weight_incarnation: Annotated[str, msgspec.Meta(max_length=256)] = ""
    routed_experts: Any = None

    def tokens(self) -> tuple[list[int], list[float]]:
        """Return the sampled tokens and their logprobs. Raises BadResponse."""
        ids, logprobs = self.token_ids or [], [] if self.logprobs is None else self.logprobs.token_logprobs
        if ids and len(logprobs) != len(ids):
            raise BadResponse(f"`logprobs.token_logprobs` must be a list of {len(ids)}, as many as token ids")
        return ids, logprobs[: len(ids)]

    def spans(self, count: int | None = None) -> tuple[VersionSpan, ...]:
        """Return spans that cover `count` tokens, by default up to the end of the last one. Raises BadResponse."""
        versions = self.weight_versions
        if versions is None:
            raise BadResponse("`weight_versions` must be a list of [version, start, end]: is this a Tidemill replica?")
        spans = tuple(VersionSpan(*item) for item in versions)
        ends = [0, *(span.end for span in spans)]
        starts = [*(span.start for span in spans), ends[-1] if count is None else count]
        if ends != starts or any(span.start >= span.end for span in spans):
            raise BadResponse(f"`weight_versions` {versions!r:.200} does not cover the tokens in order, without gap")
        return spans


class CompletionBody(msgspec.Struct):
    choices: Annotated[list[Choice], msgspec.Meta(min_length=1, max_length=1)]


def read_choice(value: object) -> Choice:
    """Convert a JSON tree to a choice. Raises BadResponse."""
    try:
        return msgspec.convert(value, Choice)
    except msgspec.ValidationError as error:
        raise BadResponse(f"this is no choice of a completion: {error}") from error


def parse_completion(body: bytes, sampling: Sampling, prompt_tokens: int = 0) -> Completion:
    """Return the completion in a response body. Raises BadResponse; ReplicaUnavailable if the engine aborted it."""
    try:
        (choice,) = msgspec.json.decode(body, type=CompletionBody).choices
    except msgspec.ValidationError as error:
        raise BadResponse(f"the body is no completion: {error}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadResponse(f"the body is not JSON: {error}") from error
    if choice.finish_reason == "abort":
        raise ReplicaUnavailable("the engine aborted the request")
    made = checked_completion(choice, sampling)
    if sampling.expert_ids_from is None:
        return made
    if not isinstance(choice.routed_experts, str):
        raise BadResponse(
            "`routed_experts` is missing: set replica.expert_ids on every replica, or rollout.expert_ids to false"
        )
    try:
        expert_ids = base64.b64decode(choice.routed_experts, validate=True)
        tokens = len(unpacked_ids(expert_ids))
    except ValueError as error:
        raise BadResponse(f"`routed_experts`: {error}") from error
    expected = prompt_tokens + len(made.token_ids) - 1 - sampling.expert_ids_from
    if tokens != expected:
        raise BadResponse(f"`routed_experts` has {tokens} tokens, expected {expected}")
    return replace(made, expert_ids=expert_ids)


def checked_completion(choice: Choice, sampling: Sampling) -> Completion:
    """Convert a choice to a completion. Raises BadResponse if `sampling` cannot have produced it."""
    reason, (ids, logprobs) = choice.finish_reason, choice.tokens()
    if reason not in ("stop", "length"):
        raise BadResponse(f"finish_reason is {reason!r}, expected 'stop' or 'length'")
    if not ids:
        raise BadResponse("`token_ids` is missing or empty: does the replica honour return_token_ids?")
    if len(ids) > sampling.max_tokens:
        raise BadResponse(f"{len(ids)} token ids sampled, at most {sampling.max_tokens} were asked for")
    return Completion(ids, logprobs, choice.spans(len(ids)), reason, choice.weight_incarnation)


def build_segment(ids: Sequence[int], turns: Iterable[SampledTurn[Completion]]) -> Segment:
    """Return the segment of a context.

    Its mask is 1 on the tokens of `turns`, which are in order; spans cover exactly those tokens, and neighbouring spans
    of one version are merged.
    """
    mask, logprobs = np.zeros(len(ids), "u1"), np.zeros(len(ids), "<f4")
    spans: list[VersionSpan] = []
    for turn in turns:
        mask[turn.start : turn.end] = 1
        logprobs[turn.start : turn.end] = turn.made.logprobs
        for span in turn.made.spans:
            moved = VersionSpan(span.version, span.start + turn.start, span.end + turn.start)
            if spans and (spans[-1].version, spans[-1].end) == (moved.version, moved.start):
                moved = VersionSpan(moved.version, spans.pop().start, moved.end)
            spans.append(moved)
    token_ids = np.asarray(ids, dtype="<u4").tobytes()
    return Segment(len(ids), token_ids, mask.tobytes(), logprobs.tobytes(), spans)


def build_expert_ids(contexts: Iterable[Context[Completion]]) -> bytes:
    """Return the expert ids of the segments of contexts, packed; empty if those of any token are not known.

    A token has the ids of the first answer that contains them: a later one may have new ids, from a newer version.
    """
    parts = []
    for context in contexts:
        known = 0
        for turn in context.turns:
            if not turn.made.expert_ids:
                return b""
            ids = unpacked_ids(turn.made.expert_ids)
            first = turn.end - 1 - len(ids)
            if first > known:
                return b""
            parts.append(ids[known - first :])
            known = turn.end - 1
    if len({(ids.shape[1:], ids.dtype) for ids in parts}) != 1:
        return b""
    return packed_ids(np.concatenate(parts))
