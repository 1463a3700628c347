"""vLLM's own OpenAI-compatible server around the replica's engine, with Tidemill's additions.

The application, its routes and its metrics are vLLM's. Added, by a subclass of a handler, a middleware and two routes:

- each choice of `/v1/completions` and `/v1/chat/completions` has `weight_versions`: [[version, start, end], ...]
  over its sampled tokens, and `weight_incarnation`: the incarnation of these version numbers; for a streamed
  response see `versions`;
- with `replica.expert_ids`, each choice of an unstreamed answer of `/v1/completions` has `routed_experts`, in vLLM's
  format: the expert ids of its tokens (`schemas.expert_ids`) in base64, from `routed_experts_prompt_start` on;
- `fill_context: true` in `/v1/completions` with token ids: an answer may fill the rest of the context;
- the response header `x-tidemill-replica`, and `GET /tidemill/status`.

Chat is Tidemill's own (`completions.chat_route`). vLLM's other chat endpoints answer that they are not supported: their
rendering differs from that of training.
"""

from __future__ import annotations

import logging
from argparse import Namespace, _AppendAction
from collections.abc import Callable
from copy import copy
from typing import Any, NoReturn

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tidemill.consumers.replica.completions import CHAT_PATH, ChatCompletion, VersionedCompletion, chat_route
from tidemill.consumers.replica.config import ReplicaSettings, flags
from tidemill.consumers.replica.engine import ReplicaEngine
from tidemill.consumers.replica.versions import IncarnationOf
from tidemill.schemas.chat.serving import ChatServer
from tidemill.schemas.config import HttpSettings
from tidemill.schemas.http_server import BoundedConfig

CANCEL_AFTER_S = 10.0
"""Seconds from the start of a shutdown until the server cancels requests that have not ended."""
_EXTENSION = "tidemill.consumers.replica.extension.ReplicaExtension"
_OTHER_CHATS = (
    "openai_serving_chat",
    "openai_serving_chat_batch",
    "openai_serving_responses",
    "anthropic_serving_messages",
    "cohere_serving_chat_v2",
)
"""vLLM's own handlers of chats, by their attribute in the application's state."""


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is read without its types
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"replica.vllm_args: {message}")


def server_arguments(model: str, settings: ReplicaSettings) -> Namespace:
    """Return vLLM's server arguments for a checkpoint directory, parsed by vLLM's own parser.

    Raises ValueError with vLLM's message if vLLM refuses an argument of `replica.vllm_args`.
    """
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
        "tensor-parallel-size": settings.tensor_parallel,
        "data-parallel-size": settings.data_parallel,
        # Engine cores that compute together agree to pause at a multiple of this number of steps.
        "dp-sync-interval": 1,
        "worker-extension-cls": _EXTENSION,
        "generation-config": "vllm",
    }
    switches = ["enforce-eager", "enable-prefix-caching", "disable-uvicorn-access-log", "disable-fastapi-docs"]
    # A batch that is in flight while a version is written would get the wrong version.
    switches.append("no-async-scheduling")
    if not settings.log_stats:
        switches.append("disable-log-stats")
    if settings.expert_ids and not current_platform.is_cpu():
        switches.append("enable-return-routed-experts")
    if settings.expert_parallel:
        switches.append("enable-expert-parallel")
    parser = make_arg_parser(_Parser(allow_abbrev=False))
    options = parser._option_string_actions
    own = flags(
        settings.vllm_args,
        repeats=lambda option: isinstance(options.get(option), _AppendAction),
        takes_many=lambda option: option in options and options[option].nargs in ("+", "*"),
    )
    given = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    arguments: Namespace = parser.parse_args([*given, *(f"--{name}" for name in switches), *own])
    validate_parsed_serve_args(arguments)
    return arguments


async def build_replica_app(
    engine: ReplicaEngine,
    arguments: Namespace,
    replica_id: str,
    status: Callable[[], dict[str, Any]],
    incarnation_of: IncarnationOf,
    chat: ChatServer,
) -> ASGIApp:
    """Return vLLM's application over `engine`, with the replica's additions."""
    tasks = await engine.get_supported_tasks()
    level = logging.getLogger().level
    app = build_app(arguments, tasks, engine.model_config)
    await init_app_state(engine, app.state, arguments, tasks)
    # One of vLLM's libraries has set the root logger to errors only.
    logging.getLogger().setLevel(level)
    # The handler that vLLM has made from its arguments, with Tidemill's additions.
    completion = app.state.openai_serving_completion
    completion.__class__, completion.incarnation_of = VersionedCompletion, incarnation_of
    chatting = copy(completion)
    chatting.__class__ = ChatCompletion
    for name in _OTHER_CHATS:
        setattr(app.state, name, None)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") != CHAT_PATH]
    app.include_router(chat_route(chat, chatting))
    app.add_api_route("/tidemill/status", status, methods=["GET"])

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-tidemill-replica", replica_id.encode())]
            await send(message)

        await app(scope, receive, send_named if scope["type"] == "http" else send)

    # vLLM has built its middleware stack already, so the header is added around the whole application.
    return named


def make_server(app: ASGIApp, settings: HttpSettings) -> uvicorn.Server:
    """Return an HTTP server that leaves signals to its caller; `await server.serve(sockets=[...])` runs it."""
    server: uvicorn.Server = NoSignalServer(BoundedConfig(app, settings, lifespan="auto", grace_s=CANCEL_AFTER_S))
    return server
