"""Adds the weight version of each sampled token to a streamed answer; needs only the engine's outputs.

The spans are sent with the incarnation of their version numbers.

Invariants: a choice's spans so far are on its first chunk with a token, on the chunk that begins another version, and,
complete, on the chunk that ends the choice. So a client whose connection breaks anywhere knows the version of every
token that it has. Every other chunk is passed through unparsed.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

_EVENT = "data: "
IncarnationOf = Callable[[int], str]
"""Returns the incarnation of a version."""


def written_spans(output: CompletionOutput) -> list[list[int]]:
    """Return an output's spans in the form of the response: [version, start, end] each."""
    return [[int(span.version), span.start, span.end] for span in output.weight_versions or []]


def incarnation_of_spans(spans: list[list[int]], incarnation_of: IncarnationOf) -> str:
    """Return the incarnation of written spans. If they have several, all names joined: a name that no version has."""
    return "+".join(dict.fromkeys(incarnation_of(version) for version, _, _ in spans))


class SpanUpdates:
    """The spans of each choice that have not been sent yet."""

    def __init__(self, incarnation_of: IncarnationOf) -> None:
        self._incarnation_of = incarnation_of
        self._news: dict[int, list[list[int]]] = {}
        """By choice: spans that were not sent to its client yet."""
        self._known: dict[int, int] = {}
        """By choice: number of spans seen."""

    def watch(self, outputs: Iterable[CompletionOutput], first: int = 0) -> None:
        """Read the spans of outputs before they are sent; `first` is added to the number of a choice."""
        for output in outputs:
            spans, ended = output.weight_versions, output.finish_reason is not None
            if spans and (ended or len(spans) != self._known.get(first + output.index)):
                self._known[first + output.index] = len(spans)
                self._news[first + output.index] = written_spans(output)

    async def annotated(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """Yield server-sent events, with `weight_versions` and incarnation in the choices whose spans have changed."""
        async for event in events:
            if self._news and event.startswith(_EVENT + "{"):
                chunk = json.loads(event.removeprefix(_EVENT))
                self.extend(chunk)
                yield f"{_EVENT}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
            else:
                yield event

    def extend(self, chunk: dict[str, Any]) -> None:
        for choice in chunk.get("choices", ()):
            spans = self._news.pop(choice["index"], None)
            if spans is not None:
                choice["weight_versions"] = spans
                choice["weight_incarnation"] = incarnation_of_spans(spans, self._incarnation_of)
