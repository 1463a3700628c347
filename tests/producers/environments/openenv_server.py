"""A small server with OpenEnv's protocol, in its own thread: it asks for a number; a test can set its faults."""

from __future__ import annotations

import asyncio
import json
import random
import threading

from aiohttp import WSMsgType, web

SCHEMA = {"properties": {"guess": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["guess"]}
TOOLS = [{"name": "look", "description": "See it.", "input_schema": {"type": "object", "properties": {}}}]


class OpenEnvServer:
    """A context manager; `faults` maps a kind of message to a function that runs instead of the answer."""

    def __init__(self, capacity=100, schema=SCHEMA, faults=None, seeded=True, tools=TOOLS):
        self.capacity, self.schema, self.seeded, self.tools = capacity, schema, seeded, tools
        self.faults = faults or {}
        self.open = self.most_open = self.connections = 0
        self.received = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _start(self):
        app = web.Application()
        app.router.add_get("/ws", self._session)
        app.router.add_get("/schema", self._described)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def _described(self, request):
        if isinstance(self.schema, web.Response):
            return self.schema
        return web.json_response({"action": self.schema})

    async def _session(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.connections += 1
        if self.open >= self.capacity:
            await socket.send_json({"type": "error", "data": {"message": "no room", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._episode(socket)
        finally:
            self.open -= 1
        return socket

    async def _episode(self, socket):
        number, steps = 0, 0
        async for frame in socket:
            message = json.loads(frame.data) if frame.type is WSMsgType.TEXT else {}
            self.received.append(message)
            kind, data = message.get("type"), message.get("data", {})
            if kind == "close":
                return
            fault = self.faults.get("list_tools" if data.get("type") == "list_tools" else kind)
            if fault is not None:
                await fault(socket)
                continue
            if kind == "reset":
                number = random.Random(data.get("seed") if self.seeded else None).randint(1, 1000)
                answer = observed({"text": f"Guess {number}", "metadata": {}}, None)
            elif data.get("type") == "list_tools":
                answer = observed({"tools": self.tools, "metadata": {}}, None)
            elif data.get("type") == "call_tool":
                result = {"content": [{"type": "text", "text": str(number)}], "is_error": False}
                answer = observed({"tool_name": data["tool_name"], "result": result, "error": None}, 0)
            elif not isinstance(data.get("guess"), str):
                told = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [{"loc": ["guess"]}]}
                answer = {"type": "error", "data": told}
            else:
                steps += 1
                right = data["guess"] == str(number)
                answer = observed({"text": "Right" if right else "Wrong"}, 1.0 if right else -0.25, right or steps == 6)
            await socket.send_json(answer)


def observed(observation, reward, done=False):
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}
