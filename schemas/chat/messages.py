"""Chat messages and tools in OpenAI's form: checked, and reduced to the fields that a chat template reads.

Messages arrive from environments, agent programs and products. Clients add their own fields, send content as a text
or as a list of parts, and write the arguments of a call in their own JSON style. So two messages are equal if their
`identity` is equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, TypeGuard

Message = Mapping[str, Any]
"""An OpenAI chat message: `role`, `content`, and `tool_calls` or `tool_call_id` if they apply."""
Tool = Mapping[str, Any]
"""An OpenAI tool: {"type": "function", "function": {"name", "description", "parameters"}}."""
Identity = tuple[object, ...]

ROLES = ("system", "user", "assistant", "tool")
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MOST_LEVELS = 100
"""Most nested levels of objects and lists in the JSON schema of a tool."""
_NEWER_ROLES = {"developer": "system"}


class BadMessage(ValueError):
    """A message or a tool that no chat template can render; the text names the position and the fault."""


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


JSON = json.JSONDecoder(parse_constant=_no_number)
"""Parser of JSON without NaN and infinity, which Python's own parser accepts."""


def checked_messages(given: object) -> list[Message]:
    """Return the messages of a request, each with only `role`, text `content` and the fields of tool calls.

    Raises BadMessage.
    """
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not given:
        raise BadMessage("`messages` must be a list of at least one message")
    place = 0
    try:
        checked = []
        for place, message in enumerate(given):  # noqa: B007 - named in an error
            checked.append(_message(message))
        return checked
    except BadMessage as error:
        raise BadMessage(f"messages[{place}]{error}") from None


def checked_message(given: object, place: str) -> Message:
    """Return one message, as in `checked_messages`; `place` names it in an error."""
    try:
        return _message(given)
    except BadMessage as error:
        raise BadMessage(f"{place}{error}") from None


class Tools(tuple[Tool, ...]):
    """Checked tools. Equal `identity` means equal tools in the same order."""

    @cached_property
    def identity(self) -> str:
        """JSON of the tools; empty for none."""
        return json.dumps(self, ensure_ascii=False) if self else ""


def checked_tools(given: object) -> Tools:
    """Return the tools of a request, possibly none. Tools that are already checked are returned unchanged.

    Raises BadMessage.
    """
    if isinstance(given, Tools):
        return given
    if given is None or given == ():
        return NO_TOOLS
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise BadMessage("`tools` must be a list")
    if not given:
        return NO_TOOLS
    tools: list[Tool] = []
    for number, tool in enumerate(given):
        place, function = f"tools[{number}].function", tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise BadMessage(f'tools[{number}] must be {{"type": "function", "function": {{…}}}}')
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise BadMessage(f"{place}.name must be 1 to 64 letters, digits or `_.-`")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise BadMessage(f"{place}.parameters must be a JSON schema")
        description = _text(function.get("description") or "", f"{place}.description")
        # A copy: later changes by the caller do not affect the checked tools.
        schema = json.loads(_json(parameters or {"type": "object", "properties": {}}, f"{place}.parameters"))
        if _is_deeper(schema, MOST_LEVELS):
            raise BadMessage(f"{place}.parameters has more than {MOST_LEVELS} levels")
        checked = {"name": name, "description": description, "parameters": schema}
        tools.append({"type": "function", "function": checked})
    names = [tool["function"]["name"] for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadMessage(f"`tools` names {twice[0]!r} twice")
    return Tools(tools)


def identity(message: Message) -> Identity:
    """Return a hashable value that is equal for messages with equal content; reasoning is ignored."""
    calls: Identity = ()
    if message.get("tool_calls"):
        calls = tuple(
            (call.get("id"), call["function"]["name"], _canonical(call["function"]["arguments"]))
            for call in message["tool_calls"]
        )
    return (message["role"], message["content"], calls, message.get("tool_call_id"), message.get("name"))


@lru_cache(maxsize=256)
def _canonical(arguments: str) -> str:
    """Return the arguments of a call in one JSON style; a text that is not JSON is unchanged."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _is_object(value: object) -> TypeGuard[Mapping[str, Any]]:
    return type(value) is dict or isinstance(value, Mapping)  # the latter is as slow as all other checks together


def _message(given: object) -> Message:
    """Return one checked message. Errors begin with the position within it."""
    if not _is_object(given):
        raise BadMessage(" is not an object")
    role, content = given.get("role"), given.get("content")
    role = _NEWER_ROLES.get(role, role) if isinstance(role, str) else None
    if role not in ROLES:
        raise BadMessage(f".role must be one of {', '.join(ROLES)}")
    if content is not None and not isinstance(content, str):
        if not isinstance(content, Sequence):
            raise BadMessage(".content must be a text or a list of text parts")
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise BadMessage(".content contains a part that is not text: this model reads only text")
        content = "".join(part["text"] for part in content)
    message: dict[str, Any] = {"role": role, "content": _text(content or "", ".content")}
    if role == "assistant":
        if isinstance(given.get("reasoning_content"), str):
            message["reasoning_content"] = _text(given["reasoning_content"], ".reasoning_content")
        if given.get("tool_calls"):
            calls = given["tool_calls"]
            if type(calls) is not list and (not isinstance(calls, Sequence) or isinstance(calls, str | bytes)):
                raise BadMessage(".tool_calls must be a list")
            message["tool_calls"] = [_call(call, f".tool_calls[{number}]") for number, call in enumerate(calls)]
    if role == "tool":
        message["tool_call_id"] = _text(given.get("tool_call_id", ""), ".tool_call_id")
    if given.get("name") is not None:
        message["name"] = _text(given["name"], ".name")
    return message


def _call(given: object, place: str) -> dict[str, Any]:
    function = given.get("function") if _is_object(given) else None
    if not _is_object(given) or not _is_object(function):
        raise BadMessage(f"{place} must be an object with a `function`")
    name, arguments, identifier = function.get("name"), function.get("arguments"), given.get("id") or ""
    if not isinstance(arguments, str):
        arguments = _json({} if arguments is None else arguments, f"{place}.function.arguments")
    shown = {
        "name": _text(name, f"{place}.function.name"),
        "arguments": _text(arguments, f"{place}.function.arguments"),
    }
    return {"id": _text(identifier, f"{place}.id"), "type": "function", "function": shown}


def _is_deeper(value: object, levels: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(item, levels - 1) for item in items)


def _json(value: object, place: str) -> str:
    try:
        return _text(json.dumps(value, ensure_ascii=False, allow_nan=False), place)
    except (TypeError, ValueError, RecursionError):
        raise BadMessage(f"{place} is not JSON") from None


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise BadMessage(f"{place} must be a text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadMessage(f"{place} contains half of a surrogate pair, which is not a character") from None
    return value


NO_TOOLS = Tools()
