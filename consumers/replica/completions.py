"""vLLM's completion handler with the weight version of each sampled token in its answers, and chat on top of it.

`POST /v1/chat/completions` is rendered and parsed as in training: the handler is called in this process with token
ids, and `schemas.chat.serving` turns its documents into chat.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, UsageInfo
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    should_include_usage,
    validate_json_request,
    with_cancellation,
)
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.exceptions import GenerationError
from vllm.inputs import EngineInput
from vllm.outputs import RequestOutput

from tidemill.consumers.replica.versions import IncarnationOf, SpanUpdates, incarnation_of_spans, written_spans
from tidemill.schemas.chat.messages import BadMessage
from tidemill.schemas.chat.protocol import CHAT_FIELDS, chat_request, json_object, usage
from tidemill.schemas.chat.serving import FILL_CONTEXT, ChatServer, ChatTurn

logger = logging.getLogger(__name__)
CHAT_PATH = "/v1/chat/completions"
_IGNORED = {"user", "metadata", "store", "service_tier", "parallel_tool_calls"}
_PASSED = {
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "logit_bias", "bad_words", "allowed_token_ids", "ignore_eos", "seed", "stream", "stream_options",
    "response_format", "structured_outputs", "priority", "request_id", "session_id", "cache_salt", "vllm_xargs",
}  # fmt: skip
"""Fields that are passed to the completion handler unchanged."""


class VersionedCompletion(OpenAIServingCompletion):  # type: ignore[misc]  # vLLM is read without its types
    """vLLM's handler of `/v1/completions`; the choices of its answers contain the version of each sampled token."""

    incarnation_of: IncarnationOf
    """Set after construction."""

    async def render_completion_request(self, request: CompletionRequest) -> list[EngineInput] | ErrorResponse:
        """Return vLLM's engine inputs; with `fill_context` the answer may fill the rest of the context."""
        if getattr(request, FILL_CONTEXT, False) is True and isinstance(request.prompt, list):
            request.max_tokens = max(1, self.model_config.max_model_len - len(request.prompt))
        inputs: list[EngineInput] | ErrorResponse = await super().render_completion_request(request)
        return inputs

    def request_output_to_completion_response(
        self,
        final_res_batch: list[RequestOutput],
        *rest: Any,  # noqa: ANN401 - passed through to vLLM
        **options: Any,  # noqa: ANN401 - passed through to vLLM
    ) -> CompletionResponse:
        """Return vLLM's response with `weight_versions` in each choice."""
        response = super().request_output_to_completion_response(final_res_batch, *rest, **options)
        outputs = [output for result in final_res_batch for output in result.outputs]
        for choice, output in zip(response.choices, outputs, strict=True):
            choice.weight_versions = written_spans(output)
            choice.weight_incarnation = incarnation_of_spans(choice.weight_versions, self.incarnation_of)
        return response

    def completion_stream_generator(
        self,
        request: Any,  # noqa: ANN401 - vLLM's own types
        engine_inputs: Any,  # noqa: ANN401 - vLLM's own types
        result_generator: AsyncIterator[tuple[int, RequestOutput]],
        *rest: Any,  # noqa: ANN401 - passed through to vLLM
        **options: Any,  # noqa: ANN401 - passed through to vLLM
    ) -> AsyncIterator[Any]:
        """Return vLLM's events, with `weight_versions` in the choices whose spans have changed."""
        news = SpanUpdates(self.incarnation_of)

        async def watched() -> AsyncGenerator[tuple[int, RequestOutput], None]:
            async for prompt, result in result_generator:
                news.watch(result.outputs, first=prompt * (request.n or 1))
                yield prompt, result

        events = super().completion_stream_generator(request, engine_inputs, watched(), *rest, **options)
        return news.annotated(events)


class ChatCompletion(VersionedCompletion):
    """The handler for chat: one prompt, one choice, and a stream of documents, which chat turns into events."""

    async def completion_stream_generator(
        self,
        request: Any,  # noqa: ANN401 - vLLM's own types
        _engine_inputs: Any,  # noqa: ANN401 - vLLM's own types
        result_generator: AsyncIterator[tuple[int, RequestOutput]],
        request_id: str,
        created_time: int,
        model_name: str,
        num_prompts: int,
        tokenizer: Any,  # noqa: ANN401 - vLLM's own types
        request_metadata: Any,  # noqa: ANN401 - vLLM's own types
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the documents of `/v1/completions` with token ids and spans, without texts."""
        assert num_prompts == request.n == 1, "a chat has one prompt and one answer"
        head = {"id": request_id, "created": created_time, "model": model_name}
        at_end, always = should_include_usage(request.stream_options, self.enable_force_include_usage)
        news, prompt, count = SpanUpdates(self.incarnation_of), list[int](), 0
        try:
            async for _, result in result_generator:
                (output,) = result.outputs
                self._raise_if_error(output.finish_reason, request_id)
                if not output.token_ids and output.finish_reason is None:
                    continue
                choice = {"index": 0, "token_ids": list(output.token_ids), "finish_reason": output.finish_reason}
                if not prompt:
                    prompt = choice["prompt_token_ids"] = list(result.prompt_token_ids)
                if request.logprobs is not None:
                    choice["logprobs"] = self._create_completion_logprobs(
                        output.token_ids, output.logprobs, request.logprobs, tokenizer, return_as_token_id=True
                    ).model_dump()
                count += len(output.token_ids)
                document = {**head, "choices": [choice]}
                if always:
                    document["usage"] = usage(len(prompt), count)
                news.watch(result.outputs)
                news.extend(document)
                yield document
            request_metadata.final_usage_info = used = UsageInfo(**usage(len(prompt), count))
            if at_end:
                yield {**head, "choices": [], "usage": used.model_dump(exclude_none=True)}
        except GenerationError as error:
            yield json.loads(self._convert_generation_error_to_streaming_response(error))
        except Exception as error:  # as vLLM does: the answer has begun, so the error is its last document
            logger.exception("a chat broke off")
            yield json.loads(self.create_streaming_error_response(error))


def chat_route(chat: ChatServer, completion: ChatCompletion) -> APIRouter:
    """Return the route `CHAT_PATH` over a completion handler."""
    router = APIRouter()

    @with_cancellation  # type: ignore[untyped-decorator]  # vLLM is read without its types
    @load_aware_call  # type: ignore[untyped-decorator]  # vLLM is read without its types
    async def answered(body: bytes, raw_request: Request) -> Response:
        try:
            request_fields = json_object(body)
            if unknown := sorted(request_fields.keys() - CHAT_FIELDS - _PASSED - _IGNORED):
                raise BadMessage(f"`{unknown[0]:.64}` is not a field of this endpoint")
            if request_fields.get("stream") not in (None, True, False):
                raise BadMessage("`stream` must be true or false")
            turn = await chat.begin(
                chat_request(request_fields, formats=True), stream=bool(request_fields.get("stream")), versions=True
            )
        except BadMessage as error:
            refused = completion.create_error_response(str(error))
            return JSONResponse(refused.model_dump(), refused.error.code)
        streams = False
        try:
            try:
                sampling = {name: request_fields[name] for name in _PASSED if request_fields.get(name) is not None}
                request = CompletionRequest(**turn.body(sampling))
            except ValidationError as error:
                raise RequestValidationError(error.errors()) from error
            made = await completion.create_completion(request, raw_request)
            if isinstance(made, ErrorResponse):
                return JSONResponse(made.model_dump(), made.error.code)
            if isinstance(made, CompletionResponse):
                return JSONResponse(turn.take(made.model_dump()))
            streams = True
            interval = float(raw_request.app.state.args.sse_keep_alive_interval)
            return StreamingResponse(with_sse_keep_alive(_events(turn, made), interval), media_type="text/event-stream")
        finally:
            if not streams:
                turn.close()

    @router.post(CHAT_PATH, dependencies=[Depends(validate_json_request)])
    async def chat_completions(raw_request: Request) -> Response:
        # Read here: the check for a disconnected client consumes all later messages of the client.
        response: Response = await answered(await raw_request.body(), raw_request=raw_request)
        return response

    return router


async def _events(turn: ChatTurn, documents: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[str, None]:
    """Yield the server-sent events of a streamed completion's chat form."""
    try:
        async for document in documents:
            if (chunk := turn.take(document)) is not None:
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        turn.close()
