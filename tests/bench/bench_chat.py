"""Cost of a conversation in the completion layer, one JSON line per figure: `python tests/bench/bench_chat.py`.

An episode is a conversation of 1, 4 or 16 given turns. Its requests are checked and rendered, its turns read and
stored, as `RolloutPolicy` does around a replica. `episodes_per_s` is per second of processor time, the best of
`--rounds`; `ids` counts the ids of the finished context. With `--model DIR`, the tokenizer and template are those of
the checkpoint, otherwise a byte-level tokenizer with the built-in template.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.schemas.chat.families import TOOLS
from tidemill.schemas.chat.contexts import Contexts
from tidemill.schemas.chat.format import CHATML_TOKENS, ChatFormat, chatml, load_chat_format, special_texts
from tidemill.schemas.chat.messages import NO_TOOLS, Message, Tools, checked_messages
from tidemill.schemas.chat.template import ChatTemplate
from tidemill.schemas.config import ChatSettings

CALL = '<tool_call>{"name": "add", "arguments": {"a": 17, "b": 25}}</tool_call>'
GROUP = 8
"""Rollouts that begin with the same prompt."""


def byte_level() -> ChatFormat:
    """Return a format with one token per byte and the built-in template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CHATML_TOKENS])
    return ChatFormat(tokenizer, ChatTemplate(chatml(), {}, special_texts(tokenizer), ChatSettings()), [])


def episode(chat: ChatFormat, number: int, turns: int, tools: Tools) -> int:
    """Play one episode and return the number of ids of its context."""
    contexts = Contexts[None](chat)
    task = f"How much is {number // GROUP} sacks of rye at 17 a sack, and what remains of 1000?"
    messages: list[Message] = [{"role": "system", "content": "You are a miller."}, {"role": "user", "content": task}]
    said = [*chat.encode(CALL if tools else "That makes 42."), chat.stop_token_ids[0]]
    for _ in range(turns):
        asked = contexts.ask(checked_messages(messages), tools)
        message = chat.read(said, tools, asked.context.count).message
        contexts.said(asked, said, message, None)
        if tools:
            result = {"role": "tool", "content": "42", "tool_call_id": message["tool_calls"][0]["id"]}
            messages = [*messages, message, result]
        else:
            messages = [*messages, message, {"role": "user", "content": "And if it rains?"}]
    return len(contexts.all[0].ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one round")
    asked = parser.parse_args()
    chat = load_chat_format(asked.model, ChatSettings()) if asked.model else byte_level()
    numbers = itertools.count()
    for tools, turns in itertools.product((NO_TOOLS, TOOLS), (1, 4, 16)):
        rates = []
        for _ in range(asked.rounds):
            played, begun = 0, time.process_time()
            while time.process_time() - begun < asked.seconds:
                ids = episode(chat, next(numbers), turns, tools)
                played += 1
            rates.append(played / (time.process_time() - begun))
        figure = {"turns": turns, "tools": len(tools), "ids": ids, "episodes_per_s": round(max(rates))}
        print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
