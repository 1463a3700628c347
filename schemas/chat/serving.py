"""Chat for a server of token ids: converts a chat request to one for `/v1/completions`, and its answer to chat.

The router and the replica use only this code for chat. Invariants: a conversation has the same ids as in a rollout,
with the ids of sampled turns unchanged; and a turn is read in the same way as in a rollout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.schemas.chat.contexts import Contexts
from tidemill.schemas.chat.format import ChatFormat, load_chat_format
from tidemill.schemas.chat.messages import BadMessage
from tidemill.schemas.chat.protocol import ChatRequest, TurnStream, call_deltas, chunk, whole_answer
from tidemill.schemas.chat.template import TemplateRefused
from tidemill.schemas.config import ChatSettings

LOG = logging.getLogger(__name__)
LARGE = 2**16
"""Number of characters from which a conversation's tokens are counted in another thread first."""
FILL_CONTEXT = "fill_context"
"""Field of a request to a replica's `/v1/completions` instead of `max_tokens`: as many tokens as the context allows."""
_VERSIONS = ("weight_versions", "weight_incarnation")


class ChatServer:
    """The chat format of one checkpoint, and the most recent conversations of its clients."""

    def __init__(self, chat: ChatFormat | None, most_turns: int, most_tokens: int, refusal: str = "") -> None:
        """Serve a chat format.

        Args:
            chat: the chat format; None: every request is refused with `refusal`.
            most_turns: number of turns whose token ids are cached.
            most_tokens: most tokens of a prompt that the engine accepts.
        """
        self.chat, self._most_tokens, self._refusal = chat, most_tokens, refusal
        self._contexts = Contexts[None](chat, most_turns) if chat is not None else None

    @classmethod
    def load(cls, uri: str, settings: ChatSettings, most_turns: int, most_tokens: int) -> ChatServer:
        """Serve the chat format of a checkpoint directory (path or fsspec URL).

        If the checkpoint has no tokenizer file or no usable template, every request is refused with the reason. Raises
        ValueError if the tokenizer is damaged.
        """
        try:
            return cls(load_chat_format(uri, settings), most_turns, most_tokens)
        except (FileNotFoundError, TemplateRefused) as error:
            LOG.warning("chat is not served: %s", error)
            # Clients must not see the location of the checkpoint.
            return cls(None, most_turns, most_tokens, str(error).replace(uri.rstrip("/"), "the checkpoint"))

    async def begin(self, request: ChatRequest, *, stream: bool, versions: bool) -> ChatTurn:
        """Render a request. The caller must `close` the turn when it is answered or cancelled.

        `versions`: whether the answer names the version that sampled each token. Raises BadMessage.
        """
        if self.chat is None or self._contexts is None:
            raise BadMessage(f"chat is not served: {self._refusal}")
        ids = None
        try:
            calls = [call for message in request.messages for call in message.get("tool_calls") or ()]
            fields = [*request.messages, *calls, *(call["function"] for call in calls)]
            texts = [text for each in fields for text in each.values() if isinstance(text, str)]
            if sum(map(len, texts)) + len(request.tools.identity) > LARGE:
                # A tokenizer needs a second for a megabyte, and lets other threads run meanwhile. A known conversation
                # may have fewer tokens: only one of more than twice the limit is refused here.
                text = await asyncio.to_thread(self.chat.template.text, request.messages, request.tools)
                ids = await asyncio.to_thread(self.chat.encode, text)
                if len(ids) > 2 * self._most_tokens:
                    raise BadMessage(f"`messages` have {len(ids)} tokens, at most {self._most_tokens} are served")
            return ChatTurn(self.chat, self._contexts, request, stream, versions, ids)
        except TemplateRefused as error:
            raise BadMessage(f"`messages` cannot be rendered: {error}") from error
        except RecursionError:
            raise BadMessage("`tools` are nested too deeply") from None


class ChatTurn:
    """One chat request and its answer. Created by `ChatServer.begin`."""

    def __init__(
        self,
        chat: ChatFormat,
        contexts: Contexts[None],
        request: ChatRequest,
        stream: bool,
        versions: bool,
        ids: list[int] | None,
    ) -> None:
        """Render the prompt, unless `ids` are the whole conversation's. Raises TemplateRefused."""
        if request.tools:
            chat.template.call_grammar  # noqa: B018 - raises now, where it would after the turn has been sampled
        self._chat, self._contexts, self._request = chat, contexts, request
        self._is_stream, self._versions = stream, versions
        self._asked = contexts.begin(request.messages, request.tools, ids)
        self._turn = TurnStream(chat, request.tools, self._asked.context.count, request.stop)
        self._started = self._ended = False

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        return self._asked.ids

    def body(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request to `/v1/completions`; `sampling`: further fields, such as the temperature."""
        request = self._request
        body = {**sampling, "prompt": self.prompt, "return_token_ids": True}
        body |= {FILL_CONTEXT: True} if request.max_tokens is None else {"max_tokens": request.max_tokens}
        if not sampling.get("ignore_eos"):
            body["stop_token_ids"] = self._chat.stop_token_ids
        if request.stop:
            body["stop"] = request.stop
        if request.alternatives is not None:
            # Token ids are unique, the texts of tokens are not.
            body |= {"logprobs": request.alternatives, "return_tokens_as_token_ids": True}
        return body

    def take(self, document: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the chat form of a body, or of one stream event, of `/v1/completions`; None for an event to omit."""
        head = (f"chat{document.get('id', '')}", str(document.get("model", "")), int(document.get("created", 0)))
        if not document.get("choices"):  # the usage of a stream, or an error
            return {**document, **chunk(*head, {}), "choices": []} if "usage" in document else dict(document)
        choice = document["choices"][0]
        ids = choice.get("token_ids") or []
        extra = {field: choice[field] for field in _VERSIONS if field in choice} if self._versions else {}
        if self._request.alternatives is not None:
            extra["logprobs"] = {"content": self._logprobs(ids, choice.get("logprobs") or {})}
        if self._request.token_ids:
            extra["token_ids"] = ids
        answer = self._answer(head, ids, choice.get("finish_reason"))
        if answer is None and not extra:
            return None
        answer = answer or chunk(*head, {})
        answer["choices"][0] |= extra
        if self._request.token_ids and choice.get("prompt_token_ids"):
            answer["prompt_token_ids"] = choice["prompt_token_ids"]
        if document.get("usage"):
            answer["usage"] = document["usage"]
        return answer

    def close(self) -> None:
        """Close the turn; if it did not end, the same turn may be requested again."""
        if not self._ended:
            self._contexts.release(self._asked)

    def _answer(self, head: tuple[str, str, int], ids: list[int], finish: str | None) -> dict[str, Any] | None:
        delta: dict[str, Any] = {} if self._started else {"role": "assistant", "content": ""}
        self._started = True
        if finish is None:
            text = self._turn.take(ids)
            return chunk(*head, {**delta, "content": text}) if text or delta else None
        read, text = self._turn.end(ids)
        self._contexts.add_turn(self._asked, self._turn.ids, read.message, None)
        self._ended, calls = True, call_deltas(read.message)
        finish = "tool_calls" if calls else finish
        if not self._is_stream:
            return whole_answer(*head, read.message, finish, (len(self.prompt), len(ids)))
        rest = {"reasoning_content": read.message.get("reasoning_content"), "content": text, "tool_calls": calls}
        return chunk(*head, {**delta, **{field: value for field, value in rest.items() if value}}, finish)

    def _logprobs(self, ids: Sequence[int], given: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return OpenAI's chat form of the logprobs of `/v1/completions`, in which tokens have the form token_id:N."""
        most, likely = self._request.alternatives, given.get("top_logprobs") or [{}] * len(ids)
        content = []
        for token, logprob, others in zip(ids, given.get("token_logprobs") or [], likely, strict=False):
            named = sorted((others or {}).items(), key=lambda item: -item[1])[:most]
            content.append({
                **self._token(token, logprob),
                "top_logprobs": [self._token(int(name.removeprefix("token_id:")), other) for name, other in named],
            })  # fmt: skip
        return content

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._chat.token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
