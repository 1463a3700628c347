"""Training and serving have equal conversations: the ids that reach a replica, and the returned messages."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.producers.conftest import END
from tests.producers.router_support import chat_format, rig, saying
from tidemill.producers.config import RolloutSettings
from tidemill.producers.rollout.policy import RolloutPolicy
from tidemill.producers.sampling.completion import Completion
from tidemill.producers.sampling.replicas import ReplicaIdentity
from tidemill.schemas.chat.format import chatml
from tidemill.schemas.chat.messages import checked_message
from tidemill.schemas.chat.serving import ChatServer
from tidemill.schemas.config import CHATML_TOKENS
from tidemill.schemas.records import VersionSpan

PATH = "/v1/chat/completions"
EXAMPLES = 30
TEXT = 'hello there, the sum is 12 and not 21; héé 漢字 think <think> </think> add {"name": "add", "arguments": {}} '
PROMPT_ENDS = "{{- '<|im_start|>assistant\\n' }}"
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Adds.", "parameters": {"type": "object"}}}
    for name in ("add", "sub")
]


def merging_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes with merges, so that a text has many tokenisations, and of ChatML's tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 5, trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in CHATML_TOKENS])
    return tokenizer


TOKENIZER = merging_tokenizer()
FORMATS = {
    "chatml": chat_format(TOKENIZER),
    "thinking": chat_format(TOKENIZER, chatml().replace(PROMPT_ENDS, PROMPT_ENDS.replace("\\n'", "\\n<think>\\n'"))),
    "tools in the system message": chat_format(TOKENIZER, tools_in_system=True),
}
LAST = TOKENIZER.token_to_id(END)
WORDS = st.lists(st.sampled_from([*TEXT, *CHATML_TOKENS, "hello", "<", "\u2060"]), max_size=20).map("".join)
CALLS = st.builds(
    lambda name, text: f"<tool_call>{json.dumps({'name': name, 'arguments': {'a': text}})}</tool_call>",
    st.sampled_from(["add", "sub", "no tool"]), WORDS,
)  # fmt: skip


@st.composite
def sampled_turns(draw):
    """Draw token ids as a model may sample them: in the usual tokenisation or not, whole or cut off, or any ids."""
    text = "".join(draw(st.lists(WORDS | CALLS | st.sampled_from(["<think>", "</think>", "<tool_call>{"]), max_size=4)))
    pieces = [text] if draw(st.booleans()) else list(text)
    ids = [token for piece in pieces for token in TOKENIZER.encode(piece).ids]
    ids += draw(st.lists(st.integers(0, TOKENIZER.get_vocab_size() + 3), max_size=5))
    ids = [token for token in ids if token != LAST]
    return [*ids, LAST] if draw(st.booleans()) or not ids else ids


CONVERSATIONS = st.tuples(
    st.booleans(), st.lists(st.tuples(WORDS, sampled_turns()), min_size=1, max_size=4), st.integers(1, 5)
)


class Training:
    """A replica session of a rollout that returns the given turns."""

    def __init__(self, turns):
        self.turns, self.identity, self.asked = list(turns), ReplicaIdentity("r1", "here"), []

    async def complete(self, prompt, sampling):
        self.asked.append((list(prompt), list(sampling.stop_token_ids)))
        ids = self.turns[len(self.asked) - 1]
        finish = "stop" if ids[-1] == LAST else "length"
        return Completion(ids, [-0.5] * len(ids), (VersionSpan(0, 0, len(ids)),), finish)


async def converse(turns, say):
    """Return the conversation's messages; `say(messages)` returns the model's, and each tool call gets a result."""
    messages = [{"role": "system", "content": "be brief"}]
    for question, _ in turns:
        messages.append({"role": "user", "content": question})
        message = await say(messages)
        messages.append(message)
        results = [
            {"role": "tool", "content": "7", "tool_call_id": call["id"], "name": call["function"]["name"]}
            for call in message.get("tool_calls") or ()
        ]
        messages += results
    return [checked_message(message, "message") for message in messages]


async def trained(chat, turns, tools):
    """Return a rollout's prompts and messages."""
    session = Training([ids for _, ids in turns])
    policy = RolloutPolicy(chat, session, RolloutSettings(max_context_tokens=100_000, max_turn_tokens=1000), 100)

    async def say(messages):
        return dict((await policy.chat(messages, tools=tools)).message)

    return await converse(turns, say), session.asked


async def served(router, turns, tools, stream):
    """Return the prompts that reach the router's replica, and the messages that reach its client."""
    asked = {**({"tools": tools} if tools else {}), "return_token_ids": True}
    before = len(router.replicas[0].requests)

    async def say(messages):
        body = {**asked, "messages": messages}
        if stream:
            return collected(await router.streamed(body, PATH))
        status, answer = await router.asked(body, PATH)
        assert status == 200, answer
        return answer["choices"][0]["message"]

    messages = await converse(turns, say)
    sent = [(request["prompt"], request["stop_token_ids"]) for request in router.replicas[0].requests[before:]]
    return messages, sent


def collected(events):
    """Return the message that a client builds from a stream, as `openai` does."""
    *chunks, done = events
    assert done == "[DONE]"
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    made = {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}
    for name in ("reasoning_content", "tool_calls"):
        found = [delta[name] for delta in deltas if delta.get(name)]
        assert len(found) <= 1
        if found:
            made[name] = found[0]
    return made


@pytest.mark.parametrize("name", FORMATS)
def test_a_conversation_is_served_as_it_is_trained(name):
    chat = FORMATS[name]

    async def compare(router, with_tools, turns, size):
        tools = TOOLS if with_tools else []
        router.replicas[0].told, router.replicas[0].requests = saying([ids for _, ids in turns], size, LAST), []
        expected = await trained(chat, turns, tools)
        assert await served(router, turns, tools, stream=False) == expected
        assert await served(router, turns, tools, stream=True) == expected

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        router = runner.run(stack.enter_async_context(rig(chat=chat)))

        @settings(max_examples=EXAMPLES)
        @given(CONVERSATIONS)
        def check(conversation):
            runner.run(asyncio.wait_for(compare(router, *conversation), 60))

        check()
        runner.run(stack.aclose())


def test_a_router_that_forgot_a_conversation_renders_it_again():
    """Shows that the ids of the test above come from memory: rendering alone loses a turn in another tokenisation."""
    spelt = [token for letter in "hello there" for token in TOKENIZER.encode(letter).ids]
    turns, chat = [("a question", [*spelt, LAST]), ("another", [LAST])], FORMATS["chatml"]

    async def scenario():
        messages, (_, (expected, _)) = await trained(chat, turns, [])
        async with rig(told=saying([ids for _, ids in turns], 1, LAST), chat=chat) as router:
            assert (await served(router, turns, [], stream=False))[1][1][0] == expected
            router.router.chat = ChatServer(chat, 100, 1000)
            assert (await router.asked({"messages": messages[:-1]}, PATH))[0] == 200
            anew = router.replicas[0].requests[-1]["prompt"]
            assert anew == chat.open(messages[:-1]) and len(anew) < len(expected)

    asyncio.run(asyncio.wait_for(scenario(), 60))
