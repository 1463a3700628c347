"""The chat format of one checkpoint: messages to token ids, and a sampled turn back to a message.

Invariant: a context only grows. Sampled ids are never changed; only the text that ends a turn and the following text
are rendered and tokenised. Rendering a whole conversation again would lose sampled ids that tokenise differently.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

import fsspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tidemill.schemas.chat.messages import NO_TOOLS, Message, Tools
from tidemill.schemas.chat.template import ChatTemplate, TemplateRefused
from tidemill.schemas.config import CHATML, ChatSettings
from tidemill.schemas.record_class import record

TOKENIZER_FILE = "tokenizer.json"
THOUGHT = ("<think>", "</think>")
REMEMBERED, LONG = 512, 2**16
"""Number of cached opening prompts, which all rollouts of a group share, and greatest number of their characters."""


@record(frozen=True)
class ReadTurn:
    """A sampled turn as a message."""

    message: Message
    """`content`, and `tool_calls` and `reasoning_content` if there are any."""
    malformed: tuple[str, ...]
    """Texts that were meant as tool calls and cannot be parsed."""


class ChatFormat:
    """One tokenizer with one chat template. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, ends: Sequence[int]) -> None:
        """Combine both; `ends`: ids of further tokens that end a turn, such as those of the generation settings.

        Raises TemplateRefused if content could still spell special tokens.
        """
        self._tokenizer, self.template = tokenizer, template
        closes = (tokenizer.token_to_id(close) for close in sorted(template.closes))
        self.stop_token_ids = tuple(sorted({*ends, *(close for close in closes if close is not None)}))
        self.longest_token = max((len(token) for token in tokenizer.get_vocab()), default=1)
        """Number of characters of the longest token: a text of n tokens has at most n times as many."""
        opened = [prompt.rstrip().endswith(THOUGHT[0]) for prompt in template.prompts]
        self.opens_thought, self._always_opens = any(opened), all(opened)
        """Whether some prompts, or all prompts, open a thought, so that the turn begins within it."""
        spelled = set(self.encode(" ".join(map(template.broken, template.specials))))
        for text in template.specials:
            if tokenizer.token_to_id(text) in spelled:
                raise TemplateRefused(f"the tokenizer alters texts so that content can spell the special token {text}")
        self._remembered = lru_cache(maxsize=REMEMBERED)(lambda text: array("I", self.encode(text)))

    def open(self, messages: Sequence[Message], tools: Tools = NO_TOOLS) -> list[int]:
        """Return a conversation's token ids, up to the start of the assistant's next turn. Raises TemplateRefused."""
        text = self.template.text(messages, tools)
        return self._remembered(text).tolist() if len(text) <= LONG else self.encode(text)

    def extend(
        self, last: int, head: Sequence[Message], turn: Message, new: Sequence[Message], tools: Tools = NO_TOOLS
    ) -> list[int]:
        """Return the token ids that follow a sampled turn, up to the start of the next one.

        Args:
            last: the last sampled id; if the turn was cut off, its end is added.
            head: the messages before the conversation's first turn of the assistant.
            turn: the sampled turn.
            new: the messages that answer it.

        Raises TemplateRefused.
        """
        ids = self.encode("".join(self.template.extension(head, turn, new, tools)))
        return ids[1:] if ids[0] == last else ids

    def read(self, ids: Sequence[int], tools: Tools = NO_TOOLS, turn: int = 0) -> ReadTurn:
        """Return sampled ids as a message; `turn`: the turn's number in the conversation, for the ids of its calls."""
        body = ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids
        text: str = self._tokenizer.decode(list(body), skip_special_tokens=False)
        thought, text = self._thought(text, self.template.call_grammar.marker if tools else "")
        content, calls, malformed = self.template.call_grammar.read(text, tools) if tools else (text, (), ())
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            written = [call.id for call in calls]
            message["tool_calls"] = [
                {
                    # The model's own id is kept if it is unique. Templates require 9 characters.
                    "id": call.id if call.id and written.count(call.id) == 1 else f"c{turn:04d}{number:04d}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(calls)
            ]
        return ReadTurn(message, malformed)

    def _thought(self, text: str, call: str) -> tuple[str, str]:
        """Return a leading thought, and the rest. A thought without an end ends at `call`, the marker of a call."""
        begin, end = THOUGHT
        opens = text.lstrip().startswith(begin)
        if end in text and (opens or self.opens_thought):
            thought, _, rest = text.partition(end)
        elif opens or self._always_opens:
            at = text.find(call) if call else -1
            thought, rest = (text, "") if at < 0 else (text[:at], text[at:])
        else:
            return "", text
        return thought.lstrip().removeprefix(begin).strip(), rest.lstrip()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that contains the template's own special tokens."""
        # A batch, since `encode` holds Python's lock; without the offsets, which cost a quarter of the time.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def step(self, stream: DecodeStream, token_id: int) -> str:
        """Return the text that one more id adds to a stream of ids; empty within a character."""
        return stream.step(self._tokenizer, token_id) or ""

    def token(self, token_id: int) -> str:
        """Return the text of one single token."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text


def load_chat_format(uri: str, settings: ChatSettings) -> ChatFormat:
    """Load the chat format of a checkpoint directory (path or fsspec URL).

    Raises FileNotFoundError if there is no tokenizer, ValueError if it is damaged or has ids that the model does not
    have, TemplateRefused.
    """
    root = uri.rstrip("/")
    text = _read(f"{root}/{TOKENIZER_FILE}")
    if text is None:
        raise FileNotFoundError(f"{root}/{TOKENIZER_FILE} does not exist: the checkpoint needs a fast tokenizer's file")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception for every defect of the file
        raise ValueError(f"{root}/{TOKENIZER_FILE} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config, model = _object(f"{root}/tokenizer_config.json"), _object(f"{root}/config.json")
    generation = _object(f"{root}/generation_config.json") or model
    source = chat_template_source(root, config, settings)
    names = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            names[name] = token
    written = source + "".join(token for name, token in names.items() if name in source)
    _require_ids_of_model(root, tokenizer, written, model)
    ends = generation.get("eos_token_id")
    listed = [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
    return ChatFormat(tokenizer, ChatTemplate(source, names, special_texts(tokenizer, source), settings), listed)


def _require_ids_of_model(root: str, tokenizer: Tokenizer, written: str, model: Mapping[str, Any]) -> None:
    """Raise ValueError if the tokenizer can give a prompt ids that the model does not have.

    Args:
        written: the texts that the template writes. Other added tokens, for padding or images, may have larger ids.
        model: the content of config.json; empty if the directory has none.
    """
    own = model.get("text_config", model)
    size = own.get("vocab_size") if isinstance(own, dict) else None
    if not isinstance(size, int):
        return
    unused = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.content not in written}
    greatest = max((index for token, index in tokenizer.get_vocab().items() if token not in unused), default=0)
    if greatest >= size:
        raise ValueError(
            f"{root}: the tokenizer has ids up to {greatest}, and the model has ids below {size} (`vocab_size` in "
            "config.json): take the tokenizer that belongs to this model"
        )


def chat_template_source(root: str, config: Mapping[str, Any], settings: ChatSettings) -> str:
    """Return the Jinja text of the chat template in the settings, or of the checkpoint's. Raises TemplateRefused."""
    if settings.template == CHATML:
        return chatml()
    if settings.template:
        found = _read(settings.template)
        if found is None:
            raise TemplateRefused(f"chat.template {settings.template} does not exist")
        return found
    found = _read(f"{root}/chat_template.jinja")
    named: object = found if found is not None else config.get("chat_template")
    if isinstance(named, list):  # several named templates
        by_name = {each.get("name"): each.get("template") for each in named if isinstance(each, dict)}
        named = by_name.get("tool_use", by_name.get("default"))
    if not isinstance(named, str):
        raise TemplateRefused(
            f"{root} has no chat template (chat_template.jinja, or `chat_template` in tokenizer_config.json): it is a "
            'base model. Take its instruction-tuned variant, or set chat.template to a file or to "chatml"'
        )
    return named


def chatml() -> str:
    """Return the built-in ChatML template, with tools and tool calls in the Hermes form."""
    return (files("tidemill.schemas.chat") / "chatml.jinja").read_text("utf-8")


def special_texts(tokenizer: Tokenizer, source: str | None = None) -> set[str]:
    """Return the texts of the tokens that structure a conversation: content must not be able to spell them.

    These are the special tokens, and others in brackets: `<|…|>`, and those that the template `source` writes (all if
    it is None). Gemma's vocabulary has a token for each HTML tag.
    """
    found = set()
    for token in tokenizer.get_added_tokens_decoder().values():
        text = token.content
        in_brackets = len(text) >= 3 and text[0] + text[-1] in ("<>", "[]")
        if token.special or (in_brackets and (source is None or text in source or text[1] in "|｜")):
            found.add(text)
    return found


def _read(address: str) -> str | None:
    filesystem, path = fsspec.core.url_to_fs(address)
    try:
        return bytes(filesystem.cat_file(path)).decode("utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ValueError(f"{address} is not UTF-8 text: {error}") from error


def _object(address: str) -> dict[str, Any]:
    text = _read(address)
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"{address} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}
