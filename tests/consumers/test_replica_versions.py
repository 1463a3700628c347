"""Spans in a streamed answer: added when a version begins and when a choice ends; all other text is unchanged."""

import asyncio
import json
from dataclasses import dataclass

from tidemill.consumers.replica.versions import SpanUpdates


def incarnation_of(version: int) -> str:
    return "first" if version < 100 else "second"


@dataclass
class Span:
    version: str
    start: int
    end: int


@dataclass
class Output:
    index: int
    weight_versions: list[Span] | None = None
    finish_reason: str | None = None


def event(index: int, finish_reason: str | None = None, text: str = "a") -> str:
    return f"data: {json.dumps({'choices': [{'index': index, 'text': text, 'finish_reason': finish_reason}]})}\n\n"


def told(news: SpanUpdates, *events: str) -> list[str]:
    async def source():
        for one in events:
            yield one

    async def collect():
        return [one async for one in news.annotated(source())]

    return asyncio.run(collect())


def spans_in(text: str):
    return json.loads(text.removeprefix("data: "))["choices"][0].get("weight_versions")


def test_every_choice_ends_with_its_own_spans():
    news = SpanUpdates(incarnation_of)
    news.watch([Output(0, [Span("3", 0, 2)], "length"), Output(1, [Span("3", 0, 1), Span("4", 1, 5)], "stop")])
    first, second, done = told(news, event(1, "stop"), event(0, "length"), "data: [DONE]\n\n")
    assert spans_in(first) == [[3, 0, 1], [4, 1, 5]] and spans_in(second) == [[3, 0, 2]]
    assert done == "data: [DONE]\n\n"


def test_a_version_is_reported_once_when_it_begins():
    news, found = SpanUpdates(incarnation_of), []
    for end in range(1, 5):
        spans = [Span("3", 0, min(end, 2))] + ([Span("4", 2, end)] if end > 2 else [])
        news.watch([Output(0, spans)])
        found += told(news, event(0))
    assert [spans_in(one) for one in found] == [[[3, 0, 1]], None, [[3, 0, 2], [4, 2, 3]], None]
    assert found[1] == event(0)


def test_choices_of_several_prompts_are_numbered_consecutively():
    news = SpanUpdates(incarnation_of)
    news.watch([Output(0, [Span("3", 0, 2)], "stop")], first=2)
    other, first, again = told(news, event(0, "stop"), event(2, "stop"), event(2, "stop"))
    assert [spans_in(one) for one in (other, first, again)] == [None, [[3, 0, 2]], None]


def test_a_chunk_without_new_spans_is_unchanged():
    news = SpanUpdates(incarnation_of)
    news.watch([Output(0)])
    assert told(news, event(0, text="é"), "data: [DONE]\n\n") == [event(0, text="é"), "data: [DONE]\n\n"]


def test_the_incarnation_is_reported_with_the_spans():
    news = SpanUpdates(incarnation_of)
    news.watch([Output(0, [Span("3", 0, 1), Span("4", 1, 2)], "stop"), Output(1, [Span("4", 0, 1), Span("100", 1, 2)])])
    first, second = told(news, event(0, "stop"), event(1))
    found = [json.loads(text.removeprefix("data: "))["choices"][0]["weight_incarnation"] for text in (first, second)]
    assert found == ["first", "first+second"], "of several there is no one name"
