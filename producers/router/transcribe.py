"""Collects what an answer was made of, chunk by chunk: token ids in and out, logprobs, weight versions. Pure.

What holds: a chunk is believed only when it has as many logprobs as tokens and spans that begin at 0 and leave no gap;
a collection of which one chunk cannot be believed has no sampled tokens. Spans are told when a version begins
(`weight_versions` of a streamed chunk), so that an answer that is cut off knows its versions too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tidemill.producers.completion import BadResponse, Completion, incarnation_of
from tidemill.producers.transcript import TranscriptBuilder
from tidemill.schemas.records import Segment, VersionSpan

LARGEST = 2**32 - 1
Json = Any
"""A JSON tree."""


class BadAnswer(ValueError):
    """A replica's answer that cannot be recorded; the message says what is wrong with it."""


class Collected:
    """One choice of one answer, streamed or whole."""

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.incarnation = ""
        """Which life of the run's version numbers the spans count in; empty until the replica said."""
        self._logprobs: list[float] = []
        self._spans: list[list[int]] = []

    def take(self, answer: Mapping[str, Json]) -> int:
        """Take in a chunk, or a whole body; returns how many tokens it brought. Raises BadAnswer."""
        for choice in _choices(answer):
            prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
            if prompt:
                self.prompt = _ids(prompt)
            tokens = _ids(choice.get("token_ids") or [])
            self.tokens += tokens
            self._logprobs += _logprobs(choice.get("logprobs"), len(tokens))
            if choice.get("weight_versions"):
                self._spans = _spans(choice["weight_versions"])
                self.incarnation = _incarnation(choice)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            return len(tokens)
        return 0

    def spans(self) -> tuple[VersionSpan, ...]:
        """Which version sampled which token. Raises BadAnswer when the replica did not say."""
        spans = [VersionSpan(*span) for span in self._spans]
        count = len(self.tokens)
        if not self.tokens:
            return ()
        if not spans or spans[-1].start >= count:
            raise BadAnswer("`weight_versions` does not cover the sampled tokens: is this a Tidemill replica?")
        if self.finish_reason is not None and spans[-1].end != count:
            raise BadAnswer(f"`weight_versions` ends at {spans[-1].end}, and {count} tokens were sampled")
        # Until the end only the beginning of the last span is known: a further version would have been told.
        return (*spans[:-1], VersionSpan(spans[-1].version, spans[-1].start, count))

    def segment(self, trainable: bool) -> Segment:
        """Prompt and answer as they are recorded; the answer is masked out when it is not `trainable`.

        Raises BadAnswer as `spans` does.
        """
        transcript = TranscriptBuilder()
        transcript.append_prompt(self.prompt)
        if trainable:
            transcript.append_sampled(Completion(self.tokens, self._logprobs, self.spans(), self.finish_reason or ""))
        else:
            transcript.append_tool(self.tokens)
        return transcript.segment()


def _choices(answer: Mapping[str, Json]) -> list[dict[str, Json]]:
    choices = answer.get("choices", [])
    if not isinstance(choices, list) or len(choices) > 1 or not all(isinstance(one, dict) for one in choices):
        raise BadAnswer("`choices` is not a list of one choice")
    return choices


def _incarnation(choice: Mapping[str, Json]) -> str:
    try:
        return incarnation_of(choice)
    except BadResponse as error:
        raise BadAnswer(str(error)) from error


def _ids(value: Json) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= LARGEST for item in value):
        raise BadAnswer("`token_ids` holds something that is not a token id")
    return value


def _logprobs(value: Json, count: int) -> list[float]:
    if count == 0:
        return []
    if not isinstance(value, dict):
        raise BadAnswer("`logprobs` is missing")
    content = value.get("content")
    found = [one.get("logprob") for one in content] if isinstance(content, list) else value.get("token_logprobs")
    if not isinstance(found, list) or len(found) != count:
        raise BadAnswer(f"`logprobs` does not have {count} entries, as many as token ids")
    if not all(type(one) in (int, float) and math.isfinite(one) for one in found):
        raise BadAnswer("`logprobs` holds something that is not a finite number")
    return [float(one) for one in found]


def _spans(value: Json) -> list[list[int]]:
    whole = isinstance(value, list) and all(
        isinstance(span, list) and len(span) == 3 and all(type(part) is int and part >= 0 for part in span)
        for span in value
    )
    if not whole or [0, *(span[2] for span in value[:-1])] != [span[1] for span in value]:
        raise BadAnswer("`weight_versions` is not a list of [version, start, end] without a gap")
    return list(value)
