"""`POST /v1/chat/completions` of a replica: rendered and read as in training, sampled by vLLM's completion handler.

The handler is called in this process with token ids; its documents become chat by `schemas.chat.serving`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from tidemill.consumers.replica.completions import ChatCompletion
from tidemill.schemas.chat.messages import BadMessage
from tidemill.schemas.chat.protocol import CHAT_FIELDS, chat_request, json_object
from tidemill.schemas.chat.serving import ChatServer, ChatTurn

CHAT_PATH = "/v1/chat/completions"
_IGNORED = {"user", "metadata", "store", "service_tier", "parallel_tool_calls"}
_PASSED = {
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "logit_bias", "bad_words", "allowed_token_ids", "ignore_eos", "seed", "stream", "stream_options",
    "response_format", "structured_outputs", "priority", "request_id", "session_id", "cache_salt", "vllm_xargs",
}  # fmt: skip
"""Fields that go to the completion handler as they are."""


def chat_route(chat: ChatServer, completion: ChatCompletion) -> APIRouter:
    """The route, over a completion handler."""
    router = APIRouter()

    @with_cancellation  # type: ignore[untyped-decorator]  # vLLM is read without its types
    @load_aware_call  # type: ignore[untyped-decorator]  # vLLM is read without its types
    async def answered(body: bytes, raw_request: Request) -> Response:
        try:
            asked = _asked(body)
            turn = await chat.begin(chat_request(asked, formats=True), stream=bool(asked.get("stream")), versions=True)
        except BadMessage as error:
            return _refused(completion.create_error_response(str(error)))
        return await _answer(completion, turn, asked, raw_request)

    @router.post(CHAT_PATH, dependencies=[Depends(validate_json_request)])
    async def chat_completions(raw_request: Request) -> Response:
        # Read here: what watches for the client's departure takes all that still comes from it.
        response: Response = await answered(await raw_request.body(), raw_request=raw_request)
        return response

    return router


def _asked(body: bytes) -> dict[str, Any]:
    """The fields of a request. Raises BadMessage."""
    asked = json_object(body)
    if unknown := sorted(asked.keys() - CHAT_FIELDS - _PASSED - _IGNORED):
        raise BadMessage(f"`{unknown[0]:.64}` is not a field of this endpoint")
    if asked.get("stream") not in (None, True, False):
        raise BadMessage("`stream` must be true or false")
    return asked


async def _answer(
    completion: ChatCompletion, turn: ChatTurn, asked: Mapping[str, Any], raw_request: Request
) -> Response:
    """Sample a rendered turn. Raises RequestValidationError, and what vLLM raises for a request it does not take."""
    streams = False
    try:
        try:
            sampling = {name: asked[name] for name in _PASSED if asked.get(name) is not None}
            request = CompletionRequest(**turn.body(sampling))
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from error
        made = await completion.create_completion(request, raw_request)
        if isinstance(made, ErrorResponse):
            return _refused(made)
        if isinstance(made, CompletionResponse):
            return JSONResponse(turn.take(made.model_dump()))
        streams = True
        interval = float(raw_request.app.state.args.sse_keep_alive_interval)
        return StreamingResponse(with_sse_keep_alive(_events(turn, made), interval), media_type="text/event-stream")
    finally:
        if not streams:
            turn.close()


async def _events(turn: ChatTurn, documents: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[str, None]:
    """Server-sent events of a streamed completion's chat form."""
    try:
        async for document in documents:
            if (told := turn.take(document)) is not None:
                yield f"data: {json.dumps(told, ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        turn.close()


def _refused(error: ErrorResponse) -> JSONResponse:
    return JSONResponse(error.model_dump(), error.error.code)
