"""Chat for a server of token ids: a long conversation is rendered once, in another thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.schemas.chat.families import FAMILIES
from tidemill.schemas.chat.messages import BadMessage
from tidemill.schemas.chat.protocol import chat_request
from tidemill.schemas.chat.serving import LARGE, ChatServer

CHAT = FAMILIES["qwen3"].chat()


def begun(server: ChatServer, content: str) -> list[int]:
    """Return the token ids of the prompt of a chat with one message."""

    async def begin() -> list[int]:
        request = chat_request({"messages": [{"role": "user", "content": content}]})
        turn = await server.begin(request, stream=False, versions=False)
        turn.close()
        return turn.prompt

    return asyncio.run(begin())


@pytest.mark.parametrize("size", [100, LARGE + 1])
def test_a_conversation_is_rendered_once(monkeypatch, size):
    content, threads = "one " * (size // 4 + 1), []
    expected = CHAT.open([{"role": "user", "content": content}])
    text = CHAT.template.text

    def noted(*asked):
        threads.append(threading.current_thread())
        return text(*asked)

    monkeypatch.setattr(CHAT.template, "text", noted)
    assert begun(ChatServer(CHAT, 10, 1 << 20), content) == expected
    assert [thread is threading.main_thread() for thread in threads] == [size < LARGE]


def test_a_conversation_of_more_than_twice_the_limit_is_refused():
    with pytest.raises(BadMessage, match="at most 10 are served"):
        begun(ChatServer(CHAT, 10, 10), "one " * LARGE)
