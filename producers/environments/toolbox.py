"""Python functions as tools: makes their schemas, executes calls, and answers faulty calls in the conversation."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError, validate_call

from tidemill.producers.environments.base import Reply, faults
from tidemill.schemas.chat.messages import Message, Tools, checked_tools

_ARGUMENTS = TypeAdapter(dict[str, Any])


class ToolBox:
    """Functions with annotated parameters and a docstring, offered under their own names."""

    def __init__(self, *functions: Callable[..., object]) -> None:
        self._functions: dict[str, Callable[..., object]] = {each.__name__: validate_call(each) for each in functions}
        shown = []
        for name, function in self._functions.items():
            parameters = TypeAdapter(function).json_schema()
            for described in parameters.get("properties", {}).values():
                described.pop("title", None)
            description = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
            shown.append({"name": name, "description": description, "parameters": parameters})
        self.schemas: Tools = checked_tools([{"type": "function", "function": each} for each in shown])
        """The tools in the form of a request."""

    def answer(self, reply: Reply) -> tuple[list[Message], int]:
        """Execute a turn's calls; return the messages that answer them, and how many could not be executed.

        For a turn without calls, there are no messages and the number is 0.
        """
        messages: list[Message] = []
        faults = 0
        for call in reply.message.get("tool_calls") or ():
            said, fault = self._execute(call["function"]["name"], call["function"]["arguments"])
            messages.append({"role": "tool", "content": said, "tool_call_id": call["id"]})
            faults += fault
        return messages + unreadable(reply), faults + len(reply.malformed)

    def _execute(self, name: str, arguments: str) -> tuple[str, bool]:
        function = self._functions.get(name)
        if function is None:
            return f"error: there is no tool {name[:64]!r}; there are {', '.join(self._functions)}", True
        try:
            given = _ARGUMENTS.validate_json(arguments)
            return str(function(**given)), False
        except ValidationError as error:
            return f"error: {faults(error, 'arguments', most=3)}", True
        except Exception as error:  # noqa: BLE001 - any error of a tool is an answer to the model
            return f"error: {type(error).__name__}: {error}", True


def unreadable(reply: Reply) -> list[Message]:
    """Return the messages that answer the calls in a turn that cannot be parsed."""
    said = "error: this is no tool call that can be read: "
    return [{"role": "user", "content": said + text[:200]} for text in reply.malformed]


def json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in a text, or None if the text is no JSON object."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None
