"""An answer of a replica: collected for the record, chunk by chunk, and shown to the client. Pure.

What holds: a chunk is believed only when it has as many logprobs as tokens and spans that begin at 0 and leave no gap;
an answer of which one chunk cannot be believed has no sampled tokens. Spans are told when a version begins
(`weight_versions` of a streamed chunk), so that an answer that is cut off knows its versions too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tidemill.producers.router.ask import Wanted
from tidemill.producers.sampling.completion import (
    BadResponse,
    Completion,
    checked_ids,
    checked_logprobs,
    checked_spans,
    incarnation_of,
)
from tidemill.producers.sampling.segments import build_segment
from tidemill.schemas.chat.contexts import SampledTurn
from tidemill.schemas.records import Segment, VersionSpan

Json = Any
"""A JSON tree."""
MOST_TOKENS = 2**31
_TOKENS = ("token_ids", "prompt_token_ids", "weight_versions", "weight_incarnation")


class Collected:
    """The one choice of one answer of `/v1/completions`, streamed or whole."""

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.incarnation = ""
        """Which life of the run's version numbers the spans count in; empty until the replica said."""
        self._logprobs: list[float] = []
        self._spans: tuple[VersionSpan, ...] = ()

    def take(self, answer: Mapping[str, Json]) -> int:
        """Take in a chunk, or a whole body; returns how many tokens it brought. Raises BadResponse."""
        choices = answer.get("choices", [])
        if not isinstance(choices, list) or len(choices) > 1 or not all(isinstance(one, dict) for one in choices):
            raise BadResponse("`choices` is not a list of one choice")
        if not choices:
            return 0
        choice = choices[0]
        if prompt := choice.get("prompt_token_ids"):
            self.prompt = checked_ids(prompt, MOST_TOKENS)
        tokens = choice.get("token_ids") or []
        if tokens:
            self.tokens += checked_ids(tokens, MOST_TOKENS)
            self._logprobs += checked_logprobs(choice.get("logprobs"), len(tokens))
        if choice.get("weight_versions"):
            self._spans, self.incarnation = checked_spans(choice["weight_versions"]), incarnation_of(choice)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return len(tokens)

    def segment(self, trainable: bool) -> Segment:
        """Prompt and answer as they are recorded; the answer is masked out when it is not `trainable`.

        Raises BadResponse when the replica did not say which version sampled which token.
        """
        turns = []
        if trainable and self.tokens:
            made = Completion(self.tokens, self._logprobs, self._complete_spans(), str(self.finish_reason))
            start = len(self.prompt)
            turns.append(SampledTurn(start, start + len(self.tokens), made))
        return build_segment([*self.prompt, *self.tokens], turns)

    def _complete_spans(self) -> tuple[VersionSpan, ...]:
        spans, count = self._spans, len(self.tokens)
        if not spans or spans[-1].start >= count or (self.finish_reason is not None and spans[-1].end != count):
            raise BadResponse(f"`weight_versions` does not cover {count} sampled tokens: is this a Tidemill replica?")
        # Until the end only the beginning of the last span is known: a further version would have been told.
        return (*spans[:-1], replace(spans[-1], end=count))


def shown(document: Mapping[str, Json], wanted: Wanted) -> dict[str, Json]:
    """A chunk or a body of a completion for the client, without the parts that only the recording needs."""
    hidden = () if wanted.token_ids else _TOKENS
    kept = {name: value for name, value in document.items() if name not in hidden}
    kept["choices"] = choices = []
    for choice in document.get("choices", ()):
        choices.append({name: value for name, value in choice.items() if name not in hidden})
        if not wanted.logprobs:
            choices[-1]["logprobs"] = None
    return kept
