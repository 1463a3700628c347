"""Adds to a streamed answer which weight version sampled which token; needs nothing of the engine but its outputs.

Beside the spans goes the incarnation that their version numbers count in.

What holds: a choice's spans so far are on its first chunk with a token, on the chunk that begins another version, and,
complete, on the chunk that ends the choice; so that a client that is cut off anywhere knows the version of every token
it has. Every other chunk goes through as it came, unparsed.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol

_EVENT = "data: "
IncarnationOf = Callable[[int], str]
"""The incarnation of a version."""


class Span(Protocol):
    """Tokens [start, end) of a choice, sampled under `version`."""

    version: str
    start: int
    end: int


class Output(Protocol):
    """The part of vLLM's `CompletionOutput` that is used here."""

    index: int
    finish_reason: str | None
    weight_versions: list[Span] | None


def said(output: Output) -> list[list[int]]:
    """An output's spans as they are written: [version, start, end] each."""
    return [[int(span.version), span.start, span.end] for span in output.weight_versions or []]


def incarnation_said(spans: list[list[int]], incarnation_of: IncarnationOf) -> str:
    """The incarnation of written spans. Where they are of several, all their names: one that no version has."""
    return "+".join(dict.fromkeys(incarnation_of(version) for version, _, _ in spans))


class SpanUpdates:
    """The spans of each choice that have not been sent yet."""

    def __init__(self, incarnation_of: IncarnationOf) -> None:
        self._incarnation_of = incarnation_of
        self._news: dict[int, list[list[int]]] = {}
        """Spans that a choice's client has not been told."""
        self._known: dict[int, int] = {}
        """Spans of each choice that were seen."""

    def watch(self, outputs: Iterable[Output], first: int = 0) -> None:
        """Look at outputs on their way to the client; `first` is added to the number of a choice."""
        for output in outputs:
            spans, ended = output.weight_versions, output.finish_reason is not None
            if spans and (ended or len(spans) != self._known.get(first + output.index)):
                self._known[first + output.index] = len(spans)
                self._news[first + output.index] = said(output)

    async def told(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """Server-sent events, with `weight_versions` and their incarnation in the choices that there is news of."""
        async for event in events:
            if self._news and event.startswith(_EVENT + "{"):
                chunk = json.loads(event.removeprefix(_EVENT))
                self.extend(chunk)
                yield f"{_EVENT}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
            else:
                yield event

    def extend(self, chunk: dict[str, Any]) -> None:
        """Write what there is news of into the choices of a chunk."""
        for choice in chunk.get("choices", ()):
            spans = self._news.pop(choice["index"], None)
            if spans is not None:
                choice["weight_versions"] = spans
                choice["weight_incarnation"] = incarnation_said(spans, self._incarnation_of)
