"""vLLM's completion handler, whose answers say which weight version sampled which token."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, UsageInfo
from vllm.entrypoints.serve.utils.api_utils import should_include_usage
from vllm.exceptions import GenerationError
from vllm.inputs import EngineInput
from vllm.outputs import RequestOutput

from tidemill.consumers.replica.versions import IncarnationOf, SpanNews, incarnation_said, said
from tidemill.schemas.chat.protocol import usage
from tidemill.schemas.chat.serving import FILL_CONTEXT

logger = logging.getLogger(__name__)


class _Versioned(OpenAIServingCompletion):  # type: ignore[misc]  # vLLM is read without its types
    """vLLM's completion handler, the choices of whose whole answers say which version sampled which token."""

    incarnation_of: IncarnationOf
    """Set when it is made."""

    async def render_completion_request(self, request: CompletionRequest) -> list[EngineInput] | ErrorResponse:
        """vLLM's inputs of the engine; with `fill_context` the answer may be as long as the context holds."""
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
        """vLLM's response with `weight_versions` in each choice."""
        response = super().request_output_to_completion_response(final_res_batch, *rest, **options)
        outputs = [output for result in final_res_batch for output in result.outputs]
        for choice, output in zip(response.choices, outputs, strict=True):
            choice.weight_versions = said(output)
            choice.weight_incarnation = incarnation_said(choice.weight_versions, self.incarnation_of)
        return response


class VersionedCompletion(_Versioned):
    """The handler of `/v1/completions`."""

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


class ChatCompletion(_Versioned):
    """The handler behind chat: one prompt, one choice, and a stream of documents, which chat makes its events of."""

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
        """The documents of `/v1/completions` with token ids and spans, and without texts."""
        assert num_prompts == request.n == 1, "a chat has one prompt and one answer"
        head = {"id": request_id, "created": created_time, "model": model_name}
        at_end, always = should_include_usage(request.stream_options, self.enable_force_include_usage)
        news, prompt, count = SpanNews(self.incarnation_of), list[int](), 0
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
        except Exception as error:  # as vLLM does: the answer has begun, and ends with what went wrong
            logger.exception("a chat broke off")
            yield json.loads(self.create_streaming_error_response(error))
