"""Model families: chat templates with the structure of the published ones, and tokenizers with their special tokens.

The templates in `templates/` are our own and short. Each has what the family's published template has that matters
here: roles and their marks, how tools, calls and results are written, what ends a turn, dates, the removal of thoughts,
and what it refuses.
"""

from __future__ import annotations

import datetime
import json
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tidemill.schemas.chat.format import ChatFormat, special_texts
from tidemill.schemas.chat.messages import Message, Tools, checked_tools
from tidemill.schemas.chat.template import ChatTemplate
from tidemill.schemas.config import ChatSettings

TEMPLATES = Path(__file__).with_name("templates")
DAY = datetime.date(2025, 11, 3)
PROSE = """The miller weighs the grain that the boats bring up the river, writes the weight in the ledger and answers
the questions of the farmers: how much is 17 plus 25, what does a sack of rye cost, when will the tide turn? {"name":
"add", "arguments": {"a": 1, "b": 2}} he writes, and reads the result, {"value": 3}, before he answers them."""
_NUMBER, _TEXT = {"type": "integer"}, {"type": "string"}
_ADD = {"type": "object", "properties": {"a": _NUMBER, "b": _NUMBER, "note": _TEXT}, "required": ["a", "b"]}
_LOOK_UP = {"type": "object", "properties": {"key": _TEXT}}
TOOLS = checked_tools(
    [
        {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": _ADD}},
        {"type": "function", "function": {"name": "look.up", "description": "Look up.", "parameters": _LOOK_UP}},
    ]
)


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One family, and the expected results of its template's probes."""

    name: str
    specials: tuple[str, ...]
    """Special tokens; the last one is the end of sequence."""
    marks: tuple[str, ...] = ()
    """Added tokens that are not special."""
    bos: str = ""
    grammar: str | None = None
    """None: the template shows no tools."""
    closes: frozenset[str] = frozenset()
    shows_system: bool = True
    one_call: bool = False
    """The template refuses a turn of several calls."""
    alternates: bool = False
    """The template refuses two questions in a row."""
    object_arguments: bool = True
    call: str = ""
    """A call of `add` with a = 1 and b = 2, as the model writes it."""

    @property
    def source(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text()

    @property
    def tokens(self) -> dict[str, str]:
        """The template's token variables."""
        return {"eos_token": self.specials[-1], **({"bos_token": self.bos} if self.bos else {})}

    def tokenizer(self) -> Tokenizer:
        """A byte-level tokenizer with merges, so that a text has more than one tokenization."""
        tokenizer = Tokenizer.from_str(_trained())
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in self.specials])
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in self.marks])
        return tokenizer

    def template(self, **settings: Any) -> ChatTemplate:
        given = ChatSettings(**{"date": DAY, **settings})
        return ChatTemplate(self.source, self.tokens, special_texts(self.tokenizer(), self.source), given)

    def chat(self, **settings: Any) -> ChatFormat:
        return ChatFormat(self.tokenizer(), self.template(**settings), []) if settings else _chat(self)


@cache
def _chat(family: ModelFamily) -> ChatFormat:
    return ChatFormat(family.tokenizer(), family.template(), [])


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=480, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([PROSE], trainer)
    return tokenizer.to_str()


_HERMES_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
_DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", *(f"<｜tool▁{mark}｜>" for mark in (
    "calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin", "outputs▁end", "output▁begin",
    "output▁end")))  # fmt: skip
_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
FAMILIES = {
    family.name: family
    for family in (
        ModelFamily("smollm2", ("<|im_start|>", "<|im_end|>"), closes=frozenset({"<|im_end|>"}), call=_HERMES_CALL),
        ModelFamily(
            "qwen3",
            ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            _HERMES_TAGS,
            grammar="hermes",
            closes=frozenset({"<|im_end|>"}),
            call=_HERMES_CALL,
        ),
        ModelFamily(
            "qwen3_coder",
            ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            _HERMES_TAGS,
            grammar="qwen-xml",
            closes=frozenset({"<|im_end|>"}),
            call="<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        ModelFamily(
            "llama32",
            ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>",
             "<|eot_id|>"),
            bos="<|begin_of_text|>",
            grammar="llama",
            closes=frozenset({"<|eot_id|>"}),
            one_call=True,
            call='{"name": "add", "parameters": {"a": 1, "b": 2}}',
        ),
        ModelFamily(
            "kimi_k2",
            ("[BOS]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[EOS]", "<|im_end|>"),
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
             "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            grammar="kimi",
            closes=frozenset({"<|im_end|>"}),
            call="<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
            '{"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|>',
        ),
        ModelFamily(
            "glm46",
            ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
            (*_HERMES_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
            grammar="glm",
            closes=frozenset({"<|user|>", "<|observation|>"}),
            call="<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>",
        ),
        ModelFamily(
            "phi4_mini",
            ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|/tool|>", "<|tool_call|>",
             "<|/tool_call|>", "<|tool_response|>", "<|endoftext|>"),
            grammar="phi",
            closes=frozenset({"<|end|>"}),
            call='<|tool_call|>{"name": "add", "arguments": {"a": 1, "b": 2}}<|/tool_call|>',
        ),
        ModelFamily(
            "deepseek_r1",
            (_BOS, _EOS),
            _DEEPSEEK,
            bos=_BOS,
            closes=frozenset({_EOS}),
            call=_HERMES_CALL,
        ),
        ModelFamily(
            "deepseek_v3",
            (_BOS, _EOS),
            _DEEPSEEK,
            bos=_BOS,
            grammar="deepseek",
            closes=frozenset({_EOS}),
            object_arguments=False,
            call="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        ModelFamily(
            "mistral31",
            ("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
             "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "</s>"),
            bos="<s>",
            grammar="mistral",
            closes=frozenset({"</s>"}),
            alternates=True,
            call='[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcDEF123"}]',
        ),
        ModelFamily(
            "gemma",
            ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
            ("<table>", "<b>"),
            bos="<bos>",
            closes=frozenset({"<end_of_turn>"}),
            shows_system=False,
            alternates=True,
            call=_HERMES_CALL,
        ),
    )
}  # fmt: skip


WORDS = (
    "wheat", "two", " and", "é", "水", "\n", '"', "{}", " 17", "a/b", "<b>", "\t", "'", "sack", "…", "  ", "\\", "[1]",
)  # fmt: skip


def prose(random: random.Random, most: int = 8) -> str:
    """Draw a text that begins and ends with a word."""
    return "".join(["rye ", *random.choices(WORDS, k=random.randrange(most)), " tide"])


def called(random: random.Random, number: int) -> dict[str, Any]:
    """Return a call of `add` in OpenAI's form."""
    arguments = {"a": random.randrange(99), "b": -3, "note": prose(random)}
    function = {"name": "add", "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"functions.add:{number}", "type": "function", "function": function}


def conversation(random: random.Random, family: ModelFamily, tools: Tools) -> list[Message]:
    """Draw a conversation that the family's template accepts; the policy's turn is next."""
    messages: list[Message] = []
    if family.shows_system and random.random() < 0.5:
        messages.append({"role": "system", "content": prose(random)})
    messages.append({"role": "user", "content": prose(random)})
    for number in range(random.randrange(4)):
        said: dict[str, Any] = {"role": "assistant", "content": prose(random)}
        if family.name in ("qwen3", "glm46") and random.random() < 0.5:
            said["reasoning_content"] = prose(random)
        if not tools or random.random() < 0.4:
            messages += [said, {"role": "user", "content": prose(random)}]
            continue
        calls = [called(random, 2 * number + n) for n in range(1 if family.one_call else random.choice((1, 2)))]
        messages.append({**said, "content": "" if random.random() < 0.5 else said["content"], "tool_calls": calls})
        messages += [{"role": "tool", "content": prose(random), "tool_call_id": call["id"]} for call in calls]
        if not family.alternates and random.random() < 0.3:
            messages.append({"role": "user", "content": prose(random)})
    return messages


def odd_ids(random: random.Random, chat: ChatFormat, text: str) -> list[int]:
    """Ids of a text, its special tokens aside, with seams where a tokenizer would make none, as models sample them."""
    pieces = re.split("(" + "|".join(map(re.escape, chat.template.specials)) + ")", text)
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        while number % 2 == 0 and len(piece) > 1:
            cut = random.randrange(1, 80)
            ids += chat.encode(piece[:cut])
            piece = piece[cut:]
        ids += chat.encode(piece)
    return ids
