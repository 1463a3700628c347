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
        failed = len(reply.malformed)
        for call in reply.message.get("tool_calls") or ():
            name, result, fault = call["function"]["name"], "", ""
            try:
                if name in self._functions:
                    result = str(self._functions[name](**_ARGUMENTS.validate_json(call["function"]["arguments"])))
                else:
                    fault = f"there is no tool {name[:64]!r}; there are {', '.join(self._functions)}"
            except ValidationError as error:
                fault = faults(error, "arguments", most=3)
            except Exception as error:  # noqa: BLE001 - any error of a tool is an answer to the model
                fault = f"{type(error).__name__}: {error}"
            failed += bool(fault)
            content = f"error: {fault}" if fault else result
            messages.append({"role": "tool", "content": content, "tool_call_id": call["id"]})
        return messages + unreadable(reply), failed


def unreadable(reply: Reply) -> list[Message]:
    """Return the messages that answer the calls in a turn that cannot be parsed."""
    fault = "error: this is no tool call that can be read: "
    return [{"role": "user", "content": fault + text[:200]} for text in reply.malformed]


def json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in a text, or None if the text is no JSON object."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None
