"""OpenAI's chat protocol for a chat format: reads requests and forms answers, whole or as a stream.

The agent endpoint of the rollout worker, the router and the replica use only this code for chat, so that serving and
training treat a turn in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers.decoders import DecodeStream

from tidemill.schemas.chat.format import THOUGHT, ChatFormat, ReadTurn
from tidemill.schemas.chat.messages import JSON, NO_TOOLS, BadMessage, Message, Tools, checked_messages, checked_tools

COMPLETION = "chat.completion"
CHUNK = "chat.completion.chunk"
CHAT_FIELDS = frozenset({
    "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "logprobs", "top_logprobs",
    "return_token_ids", "n", "response_format",
})  # fmt: skip
"""Fields of a request that `chat_request` reads."""
MOST_ALTERNATIVES = 20
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The fields of a chat request that determine the prompt, and the length and form of the answer."""

    messages: list[Message]
    tools: Tools
    max_tokens: int | None
    stop: tuple[str, ...] = ()
    """Texts that end the turn, and are not part of the turn."""
    alternatives: int | None = None
    """Number of likely tokens to return in addition to each sampled one's logprob; None: no logprobs requested."""
    token_ids: bool = False
    """Whether token ids are requested."""


def json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a request's body. Raises BadMessage, also if a text is not valid Unicode."""
    try:
        value = JSON.decode(body.decode())
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadMessage("the body contains half of a surrogate pair, which is not a character") from None
    except (ValueError, RecursionError) as error:
        raise BadMessage("the body is not JSON") from error
    if not isinstance(value, dict):
        raise BadMessage("the body is not a JSON object")
    return value


def chat_request(request: Mapping[str, Any], *, formats: bool = False) -> ChatRequest:
    """Read a request's body.

    `formats`: whether the caller supports `response_format`. Raises BadMessage for an unsupported field; sampling
    parameters are not checked.
    """
    messages, tools = checked_messages(request.get("messages")), checked_tools(request.get("tools"))
    choice = request.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise BadMessage("`tool_choice` must be auto or none: a forced call is not sampled by the policy")
    if request.get("n") not in (None, 1):
        raise BadMessage("`n` must be 1: send the request again for another answer")
    if not formats and request.get("response_format") not in (None, {"type": "text"}):
        raise BadMessage('`response_format` must be {"type": "text"}')
    field = "max_tokens" if request.get("max_completion_tokens") is None else "max_completion_tokens"
    most = request.get(field)
    if most is not None and (type(most) is not int or most < 1):
        raise BadMessage(f"`{field}` must be a whole number of at least 1")
    stop = request.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise BadMessage("`stop` must be a text or a list of texts, none of them empty")
    logprobs, alternatives = request.get("logprobs") or False, request.get("top_logprobs") or 0
    if not isinstance(logprobs, bool):
        raise BadMessage("`logprobs` must be true or false")
    if type(alternatives) is not int or not 0 <= alternatives <= (MOST_ALTERNATIVES if logprobs else 0):
        raise BadMessage(f"`top_logprobs` must be a whole number up to {MOST_ALTERNATIVES}, and needs `logprobs`")
    return ChatRequest(
        messages,
        NO_TOOLS if choice == "none" else tools,
        most,
        tuple(stop),
        alternatives if logprobs else None,
        request.get("return_token_ids") is True,
    )


def shown_message(message: Message) -> dict[str, Any]:
    """Return an assistant's message for an answer: empty content next to calls becomes None."""
    shown = dict(message)
    if shown.get("tool_calls") and not shown["content"]:
        shown["content"] = None
    return shown


def whole_answer(
    identifier: str, model: str, created: int, message: Message, finish: str, tokens: tuple[int, int]
) -> dict[str, Any]:
    """Return the body of an answer that is not streamed; `tokens`: token counts of the prompt and of the answer."""
    choice = {"index": 0, "message": shown_message(message), "logprobs": None, "finish_reason": finish}
    head = {"id": identifier, "object": COMPLETION, "created": created, "model": model}
    return {**head, "choices": [choice], "usage": usage(*tokens)}


def chunk(
    identifier: str, model: str, created: int, delta: Mapping[str, Any], finish: str | None = None
) -> dict[str, Any]:
    """Return one event of a streamed answer."""
    choice = {"index": 0, "delta": dict(delta), "logprobs": None, "finish_reason": finish}
    return {"id": identifier, "object": CHUNK, "created": created, "model": model, "choices": [choice]}


def call_deltas(message: Message) -> list[dict[str, Any]]:
    """Return the tool calls of a message in the form of a stream's delta."""
    return [{"index": number, **call} for number, call in enumerate(message.get("tool_calls") or ())]


def usage(prompt: int, answer: int) -> dict[str, int]:
    """Return the token counts of an answer."""
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


class TurnStream:
    """The text of a turn while it is sampled.

    Invariant: the concatenated texts of `take` and `end` are the content of the message that `end` returns: the result
    of `ChatFormat.read` for all ids, up to the first of the texts that end the turn. Text that may belong to a thought,
    a tool call or such an end is not returned until this is known.
    """

    def __init__(self, chat: ChatFormat, tools: Tools = NO_TOOLS, turn: int = 0, stop: Sequence[str] = ()) -> None:
        self._chat, self._tools, self._turn, self._stop = chat, tools, turn, stop
        self._longest_stop = max(map(len, stop), default=1)
        self._decoder = DecodeStream(skip_special_tokens=False)
        self.ids: list[int] = []
        """All ids of the turn so far."""
        self._text = ""
        self._returned = 0
        """Number of characters of the content that were returned."""

    def take(self, ids: Sequence[int]) -> str:
        """Add ids. Return the new content that is certain."""
        text, ends = "", self._chat.stop_token_ids
        for token in ids:
            if self.ids and self.ids[-1] in ends:  # it did not end the turn
                text += self._chat.step(self._decoder, self.ids[-1])
            self.ids.append(token)
            if token not in ends:
                text += self._chat.step(self._decoder, token)
        if self._returned and not self._tools and not self._stop:  # content has begun, and no text can end it
            self._returned += len(text)
            return text
        self._text += text
        content = self._certain()
        if self._stop:  # a longer stop text may begin in the last characters, and before the one that is found
            content = self._cut(content)[: max(0, len(content) - self._longest_stop + 1)]
        return self._new_text(content)

    def end(self, ids: Sequence[int] = ()) -> tuple[ReadTurn, str]:
        """Add the last ids. Return the whole turn, and the content that was not returned yet."""
        self.ids += ids
        read = self._chat.read(self.ids, self._tools, self._turn)
        content = self._cut(str(read.message["content"]))
        return replace(read, message={**read.message, "content": content}), self._new_text(content)

    def _certain(self) -> str:
        begin, end = THOUGHT
        text = self._text
        if self._chat.opens_thought or text.lstrip().startswith(begin):
            if end not in text:
                return ""
            text = text.partition(end)[2].lstrip()
        elif begin.startswith(text.lstrip()):
            return ""
        if not self._tools:
            return text
        text = text.lstrip()
        marker = self._chat.template.call_grammar.marker
        if not marker:  # the whole turn may be a call
            return "" if text[:1] in ("{", "<", "") else text.rstrip()
        cut = text.find(marker)
        if cut < 0:  # the end of the text may be the beginning of the marker
            ends = range(max(0, len(text) - len(marker) + 1), len(text))
            cut = next((end for end in ends if marker.startswith(text[end:])), len(text))
        return text[:cut].rstrip()

    def _cut(self, content: str) -> str:
        """Return the content up to the first of the texts that end the turn."""
        return content[: min((at for stop in self._stop if (at := content.find(stop)) >= 0), default=len(content))]

    def _new_text(self, content: str) -> str:
        new = content[self._returned :]
        self._returned = max(self._returned, len(content))
        return new
