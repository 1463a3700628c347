"""The harness of agents that name none: a chat loop in this process that calls the tools of the taskset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

HARNESS_ID = "tidemill_loop"
CONTEXT_FULL = "context_length_exceeded"
"""Marks the error of a conversation that fills the context, for every harness."""


class LoopConfig(vf.HarnessConfig):  # type: ignore[misc]
    """The loop has no options of its own."""

    id: str = HARNESS_ID


class LoopHarness(vf.Harness[LoopConfig]):  # type: ignore[misc]
    """Calls the model until a turn has no tool call, or the context is full."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Hold one conversation, from a prompt or from the messages so far."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, known, connections = await connect_mcp({"mcpServers": servers}, stack)
            hidden = self.config.disabled_tools or ()
            asked = {"model": ctx.model, "tools": [each for each in tools if each["function"]["name"] not in hidden]}
            http = await stack.enter_async_context(
                aiohttp.ClientSession(
                    headers={"authorization": f"Bearer {secret}"}, timeout=aiohttp.ClientTimeout(total=None)
                )
            )
            while True:
                async with http.post(f"{endpoint}/chat/completions", json={**asked, "messages": messages}) as answer:
                    if answer.status != 200:
                        said = await answer.text()
                        return vf.ProgramResult(0 if CONTEXT_FULL in said else 1, "", said[-500:])
                    message = (await answer.json())["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    content = await self._result(call["function"], known, connections)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    async def _result(self, call: Mapping[str, str], known: dict[str, Any], connections: dict[str, Any]) -> Any:  # noqa: ANN401
        if call["name"] not in known or call["name"] in (self.config.disabled_tools or ()):
            return f"error: there is no tool {call['name']!r:.64}; there are {', '.join(known) or 'none'}"
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            return f"error: the arguments are no JSON: {error}"
        if not isinstance(arguments, dict):
            return "error: the arguments are no JSON object"
        return await call_mcp(connections, known, call["name"], arguments)


__all__ = ["LoopHarness"]
