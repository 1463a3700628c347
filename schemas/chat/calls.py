"""Tool calls as model families write them: grammars that parse the calls in a sampled turn.

A family's grammar is not configured: `grammar_of` selects the one that correctly parses a call which the model's own
chat template has written. For any text of a model, the result is the calls that could be parsed, never an error. The
time depends only on the text's length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tidemill.schemas.chat.messages import JSON, Tool

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters of each tool, by name."""
Pieces = Callable[[str], Iterator[tuple[int, int, str]]]
_NOTHING: Schemas = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it."""

    name: str
    arguments: str
    """JSON text of an object."""
    id: str = ""
    """Empty if the family's text contains none."""


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The form in which one family writes tool calls."""

    name: str
    marker: str
    """Text with which every call begins; empty if a call is the whole turn."""
    pieces: Pieces
    """Yields start, end and body of each piece of text that is meant as a call."""
    calls: Callable[[str, Schemas], Sequence[ToolCall]]
    """Returns the calls of one body. Raises ValueError, RecursionError."""
    marks: frozenset[str] = frozenset()
    """Texts that structure a call. If they are tokens, they do not end a turn."""

    def read(self, text: str, tools: Sequence[Tool] = ()) -> tuple[str, tuple[ToolCall, ...], tuple[str, ...]]:
        """Return the text without its calls, the calls in order, and the malformed calls.

        The malformed calls also remain in the text.
        """
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools} if tools else _NOTHING
        content, found, malformed, last = [], list[ToolCall](), list[str](), 0
        for start, end, body in self.pieces(text):
            content.append(text[last:start])
            last = end
            try:
                calls = self.calls(body, schemas)
                "".join(call.name + call.arguments for call in calls).encode()  # rejects half of a surrogate pair
                found.extend(calls)
            except (ValueError, RecursionError):
                malformed.append(text[start:end])
                content.append(text[start:end])
        content.append(text[last:])
        return "".join(content).strip(), tuple(found), tuple(malformed)


def grammar_of(written: str, name: str, arguments: Mapping[str, str]) -> CallGrammar | None:
    """Return the grammar in which `written` is exactly one call of `name` with `arguments`; None if there is none."""
    for grammar in GRAMMARS:
        _, calls, malformed = grammar.read(written)
        if len(calls) == 1 and not malformed and calls[0].name == name and json.loads(calls[0].arguments) == arguments:
            return grammar
    return None


def _between(begin: str, end: str) -> Pieces:
    """Return a function that yields the bodies between two markers; the last body may be cut off."""
    pattern = re.compile(rf"{re.escape(begin)}(.*?)(?:{re.escape(end)}|\Z)", re.DOTALL)

    def pieces(text: str) -> Iterator[tuple[int, int, str]]:
        for match in pattern.finditer(text):
            yield match.start(), match.end(), match[1]

    return pieces


def _from_marker(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield the body from Mistral's first marker to the end of the turn, including the marker."""
    start = text.find("[TOOL_CALLS]")
    if start >= 0:
        yield start, len(text), text[start:]


_PYTHON_TAG = "<|python_tag|>"


def _whole_turn(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield the turn itself if it begins like an object with a function's name and parameters, or contains the tag."""
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    is_call = re.match(r'\{\s*"(name|type|function|parameters)"', body) and re.search(r'"(parameters|arguments)"', body)
    if is_call or _PYTHON_TAG in text:
        yield 0, len(text), body


_BETWEEN_OBJECTS = re.compile(r"[\s;,]*")


def _json_calls(body: str, _schemas: Schemas) -> list[ToolCall]:
    """Parse objects, or lists of objects, in sequence: {"name": …, "arguments" or "parameters": …}."""
    calls: list[ToolCall] = []
    at, body = 0, body.strip()
    while at < len(body):
        value, end = JSON.raw_decode(body, at)
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, dict) or not isinstance(each.get("name"), str):
                raise ValueError("the text is not a call in this grammar")
            identifier = str(each.get("id"))
            # Templates that show ids (Mistral's) refuse any other form.
            known = identifier if re.fullmatch(r"[A-Za-z0-9]{9}", identifier) else ""
            calls.append(ToolCall(each["name"], _object(each.get("arguments", each.get("parameters", {}))), known))
        at = _BETWEEN_OBJECTS.match(body, end).end()  # type: ignore[union-attr]  # it matches nothing as well
    if not calls:
        raise ValueError("the text is not a call in this grammar")
    return calls


def _object(given: object) -> str:
    """Return the JSON text of an object that is given as an object or as JSON text. Raises ValueError."""
    value = JSON.decode(given) if isinstance(given, str) else given
    if not isinstance(value, dict):
        raise ValueError("the text is not a call in this grammar")
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _named_arguments(begin: str, end: str) -> Callable[[str, Schemas], list[ToolCall]]:
    """Return a parser of calls in sequence: pattern `begin` with groups `name` and `id`, JSON arguments, then `end`."""
    before, behind = re.compile(begin), re.compile(end)

    def calls(body: str, _schemas: Schemas) -> list[ToolCall]:
        found, at, body = [], 0, body.strip()
        while at < len(body):
            named = before.match(body, at)
            if named is None:
                raise ValueError("the text is not a call in this grammar")
            value, at = JSON.raw_decode(body, named.end())
            found.append(ToolCall(named["name"], _object(value), named.groupdict().get("id") or ""))
            ended = behind.match(body, at)
            at = ended.end() if ended is not None else at
        if not found:
            raise ValueError("the text is not a call in this grammar")
        return found

    return calls


def _mistral_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse a list of objects after one marker, or, in later models, a name and arguments after a marker each."""
    listed = body.removeprefix("[TOOL_CALLS]").lstrip()
    return _json_calls(listed, schemas) if listed.startswith("[") else _MISTRAL_NAMED(body, schemas)


_MISTRAL_NAMED = _named_arguments(
    r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>[A-Za-z0-9]{9}))?\[ARGS\]\s*", r"\s*"
)


def _tagged_calls(
    name: str, key: tuple[str, str], value: tuple[str, str], frame: str
) -> Callable[[str, Schemas], list[ToolCall]]:
    """Return a parser of one call for each body: a pattern for its name, then keys and values, each between two texts.

    One `frame` on each side of a value is not part of the value.
    """
    pattern = re.compile(name)

    def calls(body: str, schemas: Schemas) -> list[ToolCall]:
        named = pattern.match(body)
        if named is None:
            raise ValueError("the text is not a call in this grammar")
        schema, given = schemas.get(named["name"], _NOTHING), {}
        rest = body[named.end() :].strip().removesuffix("</function>").strip()
        at = 0
        while at < len(rest):
            key_text, at = _enclosed(rest, at, key)
            text, at = _enclosed(rest, at, value)
            text = text.removeprefix(frame).removesuffix(frame)
            given[key_text.strip()] = _typed(text, schema, key_text.strip())
        return [ToolCall(named["name"], json.dumps(given, ensure_ascii=False, allow_nan=False))]

    return calls


def _enclosed(text: str, at: int, ends: tuple[str, str]) -> tuple[str, int]:
    """Return the text between two others, and the position after them; skips leading space. Raises ValueError."""
    while ends[0] and at < len(text) and text[at].isspace():
        at += 1
    begin = at + len(ends[0])
    end = text.find(ends[1], begin)
    if not text.startswith(ends[0], at) or end < 0:
        raise ValueError("the text is not a call in this grammar")
    return text[begin:end], end + len(ends[1])


def _typed(text: str, schema: Mapping[str, Any], key: str) -> object:
    """Return a value from text without quotes: the text if the schema says string, otherwise parsed JSON if valid."""
    properties = schema.get("properties")
    described = properties.get(key) if isinstance(properties, Mapping) else None
    if isinstance(described, Mapping) and described.get("type") == "string":
        return text
    try:
        return JSON.decode(text)
    except (ValueError, RecursionError):
        return text


_TAGS = frozenset({"<tool_call>", "</tool_call>"})
_KIMI = tuple(
    f"<|tool_{mark}|>"
    for mark in ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")
)
_DEEPSEEK = tuple(
    f"<｜tool▁{mark}｜>" for mark in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end")
)  # their bars and underscores are not the ASCII characters
GRAMMARS = (
    CallGrammar("hermes", "<tool_call>", _between("<tool_call>", "</tool_call>"), _json_calls, _TAGS),
    CallGrammar(
        "qwen-xml",
        "<tool_call>",
        _between("<tool_call>", "</tool_call>"),
        _tagged_calls(r"\s*<function=(?P<name>[\w.-]+)>", ("<parameter=", ">"), ("", "</parameter>"), "\n"),
        _TAGS | {"</parameter>", "</function>"},
    ),
    CallGrammar(
        "glm",
        "<tool_call>",
        _between("<tool_call>", "</tool_call>"),
        _tagged_calls(r"\s*(?P<name>[\w.-]+)", ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), frame=""),
        _TAGS | {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"},
    ),
    CallGrammar(
        "phi",
        "<|tool_call|>",
        _between("<|tool_call|>", "<|/tool_call|>"),
        _json_calls,
        frozenset({"<|tool_call|>", "<|/tool_call|>"}),
    ),
    CallGrammar(
        "mistral",
        "[TOOL_CALLS]",
        _from_marker,
        _mistral_calls,
        frozenset({"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}),
    ),
    CallGrammar(
        "kimi",
        _KIMI[0],
        _between(_KIMI[0], _KIMI[1]),
        _named_arguments(
            r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>\s*",
            r"\s*(?:<\|tool_call_end\|>)?\s*",
        ),
        frozenset(_KIMI),
    ),
    CallGrammar(
        "deepseek",
        _DEEPSEEK[0],
        _between(_DEEPSEEK[0], _DEEPSEEK[1]),
        _named_arguments(
            r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[\w.-]+)(?:<｜tool▁sep｜>|\n```json\n)\s*",
            r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?\s*",
        ),
        frozenset(_DEEPSEEK),
    ),
    CallGrammar("llama", "", _whole_turn, _json_calls, frozenset({_PYTHON_TAG})),
)
HERMES = GRAMMARS[0]
"""The grammar that is explained to models whose template shows no tools."""
