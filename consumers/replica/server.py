"""vLLM's own OpenAI-compatible server around the replica's engine, and what Tidemill adds to it.

The application, its routes and its metrics are vLLM's. Added, by subclasses of two handlers, a middleware and a route:

- each choice of `/v1/completions` and `/v1/chat/completions` carries `weight_versions`: [[version, start, end], ...]
  over its sampled tokens, and `weight_incarnation`: the life of the run's version numbers that they count in; a
  streamed response says them as `versions` describes;
- the response header `x-tidemill-replica`, and `GET /tidemill/status`.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.outputs import RequestOutput
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.engine import ReplicaEngine
from tidemill.consumers.replica.status import ReplicaStatus
from tidemill.consumers.replica.versions import IncarnationOf, SpanNews, incarnation_said, said

_EXTENSION = "tidemill.consumers.replica.extension.ReplicaExtension"


def server_arguments(model: str, settings: ReplicaSettings) -> Namespace:
    """vLLM's server arguments for a checkpoint directory, parsed by vLLM's own parser."""
    values = {
        "model": model,
        "served-model-name": settings.served_model,
        "host": settings.host,
        "port": settings.port,
        "dtype": settings.dtype.value,
        "max-model-len": settings.max_model_len,
        "max-num-seqs": settings.max_num_seqs,
        "max-num-batched-tokens": max(settings.max_num_batched_tokens, settings.max_model_len),
        "block-size": settings.block_size,
        "kv-cache-memory-bytes": settings.kv_cache_mb << 20,
        "worker-extension-cls": _EXTENSION,
        "generation-config": "vllm",
    }
    switches = ["enforce-eager", "enable-prefix-caching", "disable-uvicorn-access-log", "disable-fastapi-docs"]
    if not settings.log_stats:
        switches.append("disable-log-stats")
    flags = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    arguments: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(
        flags + [f"--{name}" for name in switches]
    )
    validate_parsed_serve_args(arguments)
    return arguments


class VersionedCompletion(OpenAIServingCompletion):  # type: ignore[misc]  # vLLM is read without its types
    """vLLM's completion handler, whose choices say which version sampled which token."""

    incarnation_of: IncarnationOf
    """Set when it is made."""

    def request_output_to_completion_response(
        self,
        final_res_batch: list[RequestOutput],
        *rest: Any,  # noqa: ANN401 - passed through to vLLM
        **options: Any,  # noqa: ANN401 - passed through to vLLM
    ) -> CompletionResponse:
        """vLLM's response with `weight_versions` in each choice."""
        response = super().request_output_to_completion_response(final_res_batch, *rest, **options)
        outputs = [output for result in final_res_batch for output in result.outputs]
        for choice, output in zip(response.choices, outputs, strict=True):
            choice.weight_versions = said(output)
            choice.weight_incarnation = incarnation_said(choice.weight_versions, self.incarnation_of)
        return response

    def completion_stream_generator(
        self,
        request: Any,  # noqa: ANN401 - vLLM's own types
        engine_inputs: Any,  # noqa: ANN401 - vLLM's own types
        result_generator: AsyncIterator[tuple[int, RequestOutput]],
        *rest: Any,  # noqa: ANN401 - passed through to vLLM
        **options: Any,  # noqa: ANN401 - passed through to vLLM
    ) -> AsyncIterator[str]:
        """vLLM's events, with the `weight_versions` of the choices that there is news of."""
        news = SpanNews(self.incarnation_of)

        async def watched() -> AsyncGenerator[tuple[int, RequestOutput], None]:
            async for prompt, result in result_generator:
                news.watch(result.outputs, first=prompt * (request.n or 1))
                yield prompt, result

        events = super().completion_stream_generator(request, engine_inputs, watched(), *rest, **options)
        return news.told(events)


class VersionedChat(OpenAIServingChat):  # type: ignore[misc]  # vLLM is read without its types
    """vLLM's chat handler, whose choices say which version sampled which token."""

    incarnation_of: IncarnationOf
    """Set when it is made."""

    def chat_completion_stream_generator(
        self,
        request: Any,  # noqa: ANN401 - vLLM's own types
        result_generator: AsyncIterator[RequestOutput],
        *rest: Any,  # noqa: ANN401 - passed through to vLLM
        **options: Any,  # noqa: ANN401 - passed through to vLLM
    ) -> AsyncIterator[str]:
        """vLLM's events, with the `weight_versions` of the choices that there is news of."""
        news = SpanNews(self.incarnation_of)
        events = super().chat_completion_stream_generator(request, _watched(result_generator, news), *rest, **options)
        return news.told(events)

    async def chat_completion_full_generator(
        self,
        request: Any,  # noqa: ANN401 - vLLM's own types
        result_generator: AsyncIterator[RequestOutput],
        *rest: Any,  # noqa: ANN401 - passed through to vLLM
        **options: Any,  # noqa: ANN401 - passed through to vLLM
    ) -> ErrorResponse | ChatCompletionResponse:
        """vLLM's response with `weight_versions` in each choice."""
        news, full = SpanNews(self.incarnation_of), super().chat_completion_full_generator
        response = await full(request, _watched(result_generator, news), *rest, **options)
        if isinstance(response, ChatCompletionResponse):
            for choice in response.choices:
                choice.weight_versions = news.take(choice.index)
                choice.weight_incarnation = incarnation_said(choice.weight_versions, self.incarnation_of)
        return response


async def _watched(results: AsyncIterator[RequestOutput], news: SpanNews) -> AsyncIterator[RequestOutput]:
    async for result in results:
        news.watch(result.outputs)
        yield result


class ReplicaHeader:
    """ASGI middleware: names the replica in every HTTP response."""

    def __init__(self, app: ASGIApp, replica_id: str) -> None:
        self._app = app
        self._header = (b"x-tidemill-replica", replica_id.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the exchange on, adding the header to its response."""

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self._header]
            await send(message)

        await self._app(scope, receive, send_named if scope["type"] == "http" else send)


async def build_replica_app(
    engine: ReplicaEngine,
    arguments: Namespace,
    replica_id: str,
    status: Callable[[], ReplicaStatus],
    incarnation_of: IncarnationOf,
) -> ASGIApp:
    """vLLM's application over `engine`, with the replica's additions."""
    tasks = await engine.get_supported_tasks()
    level = logging.getLogger().level
    app = build_app(arguments, tasks, engine.model_config)
    await init_app_state(engine, app.state, arguments, tasks)
    # One of vLLM's libraries silences the root logger below errors on the way.
    logging.getLogger().setLevel(level)
    app.state.openai_serving_completion = VersionedCompletion(
        engine,
        app.state.openai_serving_models,
        online_renderer=app.state.online_renderer,
        request_logger=None,
    )
    app.state.openai_serving_chat = VersionedChat(
        engine,
        app.state.openai_serving_models,
        arguments.response_role,
        online_renderer=app.state.online_renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format=arguments.chat_template_content_format,
    )
    app.state.openai_serving_completion.incarnation_of = incarnation_of
    app.state.openai_serving_chat.incarnation_of = incarnation_of
    app.add_api_route("/tidemill/status", lambda: asdict(status()), methods=["GET"])
    # vLLM has built its middleware stack already: the header goes around the whole application.
    return ReplicaHeader(app, replica_id)


def make_server(app: ASGIApp) -> uvicorn.Server:
    """An HTTP server that leaves signals to its caller; `await server.serve(sockets=[...])` runs it."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_keep_alive=75, timeout_graceful_shutdown=2
    )
    server: uvicorn.Server = NoSignalServer(config)
    return server
