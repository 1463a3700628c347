"""The policy of `tidemill env try` over an endpoint that does not answer as it should."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.records import build
from tidemill.compose.cli.env_policies import EndpointModel
from tidemill.producers.environments.base import GenerationFailed
from tidemill.schemas.records import Task


@pytest.mark.parametrize("text", ["<html>bad gateway</html>", '{"error": "bad gateway"}', '["bad gateway"]'])
def test_an_answer_that_is_no_completion_is_a_failed_generation_with_its_text(text: str):
    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def complete(_request: web.Request) -> web.Response:
        return web.Response(text=text, status=502)

    async def ask() -> None:
        application = web.Application()
        application.router.add_get("/v1/models", models)
        application.router.add_post("/v1/chat/completions", complete)
        async with TestServer(application) as server, EndpointModel(str(server.make_url("/v1")), "none", 8) as endpoint:
            await endpoint.policy(build(Task, max_turns=2)).chat([{"role": "user", "content": "hello"}])

    with pytest.raises(GenerationFailed, match="bad gateway"):
        asyncio.run(ask())
