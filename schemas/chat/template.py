"""A model's own chat template: conversations to text, and the text that follows a sampled turn.

Templates support different kinds of messages. Probes at construction, each a rendering of a known conversation, find
out how this one shows system messages, tools, calls and results; unsupported content is written into supported
messages. A template that cannot continue a conversation after a sampled turn is refused, with the reason.

Invariants: the text of one conversation depends only on its messages, its tools and the settings (the date that a
template may print is a setting); content that spells a special token of the model does not become that token.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2

from tidemill.schemas.chat.calls import HERMES, CallGrammar, grammar_of
from tidemill.schemas.chat.messages import NO_TOOLS, Message, Tools, checked_tools
from tidemill.schemas.chat.sandbox import ChatSandbox, ShownTool
from tidemill.schemas.config import ChatSettings

BREAK = "\u2060"
"""Word joiner: inserted after the first character of a special token's text, so that it is not that token any more."""
MOST_STEPS = 5_000
"""Most loop iterations and calls of a rendering."""
MOST_STEPS_EACH = 5_000
"""Additional steps for each message and each tool."""
MOST_TOOLS = 64
"""Number of lists of tools whose rendered form is cached."""
TOOLS_TEXT = """You can call these functions:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and its arguments, and nothing else:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""
"""System message for a model whose template shows no tools; `tools` has one JSON object in each line."""

_PROBE_TOOLS = checked_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "probe_function",
                "description": "Probe.",
                "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
            },
        }
    ]
)
_PROBE_ARGUMENTS = {"probe_key": "probe value"}
_PROBE_IDS = ("probe0001", "functions.probe_function:0")
"""Ids of calls as families write them: Mistral's, and Kimi's, which contains the name."""
_SYSTEM: Message = {"role": "system", "content": "probe system"}
_USER: Message = {"role": "user", "content": "probe question"}
_MORE: Message = {"role": "user", "content": "probe further"}
_RESULT: Message = {"role": "tool", "content": "probe result", "name": "probe_function"}


class TemplateRefused(ValueError):
    """The chat template cannot be used for this; the text says why, and what to do."""


class ChatTemplate:
    """One chat template, with the results of its probes. Safe to share between threads."""

    def __init__(self, source: str, names: Mapping[str, str], specials: Iterable[str], settings: ChatSettings) -> None:
        """Probe a template.

        Args:
            source: Jinja text of the template.
            names: texts that templates read as variables, such as `bos_token`.
            specials: texts of the tokens that must not appear in a message's content.

        Raises TemplateRefused.
        """
        try:
            self._render = ChatSandbox(settings.date).bounded(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateRefused(f"the chat template is not a usable Jinja template: {error}") from error
        self._variables = {**names, **settings.arguments}
        self.specials = sorted(specials, key=len, reverse=True)
        """Texts of special tokens, which no content can spell."""
        # Patterns are grouped by their first two characters, so that few are tried at each position.
        ends: dict[str, list[str]] = {}
        for text in self.specials:
            ends.setdefault(text[:2], []).append(re.escape(text[2:]))
        self._specials = re.compile(
            "|".join(f"{re.escape(begin)}(?:{'|'.join(each)})" for begin, each in ends.items()) or "(?!)"
        )
        # Random, so that content cannot contain the mark: it would be mistaken for the sampled turn.
        self._mark = secrets.token_hex(12)
        self._shown_tools: Callable[[str], tuple[list[ShownTool], str]] = self._make_shown_tools
        self.closes: set[str] = set()
        """Texts of the special tokens that end a turn."""
        self.prompts: list[str] = []
        """The text before a turn: after a question and, if calls are shown, after a result."""
        # Capabilities of the template: assumed until a probe disproves them.
        self.shows_system = self._shows_later_system = True
        self._no_user_after: set[str] = set()
        self.shows_tools, self.shows_results = not settings.tools_in_system, True
        self._native_calls = self._shows_content = self._object_arguments = True
        self._one_call = False
        self._without_tools: Mapping[str, Any] = {}
        self.grammar: CallGrammar | None = None
        self._probe_conversations()
        self.shows_tools = self.shows_tools and self._shows([_USER], "probe_function", _PROBE_TOOLS)
        self.grammar = self._probe_calls() if self.shows_tools else None
        if self.grammar is None:
            self._native_calls = self.shows_results = False
        self._shown_tools = lru_cache(maxsize=MOST_TOOLS)(self._make_shown_tools)

    def _probe_conversations(self) -> None:
        """Probe how conversations without tools continue. Raises TemplateRefused."""
        turn: Message = {"role": "assistant", "content": self._mark}
        for self._without_tools in ({"tools": None}, {}, {"tools": []}):  # some templates do not accept None
            if self._shows([_USER], _USER["content"]):
                break
        prompt = self.text([_USER])
        whole = self.text([_USER, turn, _MORE])
        if _USER["content"] not in prompt:
            raise TemplateRefused("the chat template does not show a user's message")
        close, rest = self._continued(whole)
        before, _, _ = whole.partition(self._mark)
        if not before.startswith(prompt[: prompt.find(_USER["content"])]) or _USER["content"] not in before:
            raise TemplateRefused("the chat template rewrites the text before a turn when the conversation continues")
        if _MORE["content"] not in rest:
            raise TemplateRefused("the chat template does not show a new message after the turn that it answers")
        if self._shows_end_within(close):
            raise TemplateRefused(
                f"the chat template writes a turn in parts that each end with {close}, so that its first part would be "
                "taken for the turn"
            )
        self.closes.add(close)
        self.prompts.append(rest)
        self.shows_system = self._shows([_SYSTEM, _USER], _SYSTEM["content"])
        if not self._shows([_USER, _MORE], _MORE["content"]):
            self._no_user_after.add("user")
        try:
            self._shows_later_system = _SYSTEM["content"] in self.extension([_USER], turn, [_SYSTEM, _MORE])[1]
        except TemplateRefused:
            self._shows_later_system = False

    def _shows_end_within(self, close: str) -> bool:
        """Return whether a token that ends turns is between a thought and the text after it."""
        thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "probe thought")
        try:
            whole = self.text([_USER, {"role": "assistant", "content": self._mark, **thought}], prompt=False)
        except TemplateRefused:
            return False
        return close in whole[: max(0, whole.find(self._mark))].partition("probe thought")[2]

    def _probe_calls(self) -> CallGrammar | None:
        """Return the grammar of the template's calls, and probe how it shows calls and results."""
        for self._object_arguments in (True, False):
            for identifier in _PROBE_IDS:
                function = {"name": "probe_function", "arguments": json.dumps(_PROBE_ARGUMENTS)}
                call = {"id": identifier, "type": "function", "function": function}
                grammar = self._grammar(call)
                if grammar is None:
                    continue
                turn = {"role": "assistant", "content": self._mark, "tool_calls": [call]}
                result = {**_RESULT, "tool_call_id": identifier}
                self.grammar = grammar
                self._shows_content = self._shows([_USER, turn], self._mark, _PROBE_TOOLS)
                self._one_call = not self._shows([_USER, {**turn, "tool_calls": [call] * 2}], "probe_key", _PROBE_TOOLS)
                self.shows_results = self._shows([_USER, turn, result], result["content"], _PROBE_TOOLS)
                if self.shows_results and not self._shows([_USER, turn, result, _MORE], _MORE["content"], _PROBE_TOOLS):
                    self._no_user_after.add("tool")
                close, rest = self.extension([_USER], turn, [result], _PROBE_TOOLS)
                self.closes.add(close)
                self.prompts.append(rest)
                return grammar
        return None

    def _grammar(self, call: Mapping[str, Any]) -> CallGrammar | None:
        """Return the grammar in which the template writes a call; None if there is none."""
        try:
            prompt = self.text([_USER], _PROBE_TOOLS)
            whole = self.text([_USER, {"role": "assistant", "content": "", "tool_calls": [call]}], _PROBE_TOOLS, False)
        except TemplateRefused:
            return None
        # The prompt of a turn may open a thought, which a finished turn lacks: the turn begins at the first difference.
        begin = next((n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        written = whole[max(whole.rfind(character, 0, begin) for character in "\n>]") + 1 :]
        ends = [place for close in self.closes if (place := written.find(close)) > 0]
        return grammar_of(written[: min(ends, default=None)].strip(), "probe_function", _PROBE_ARGUMENTS)

    @property
    def call_grammar(self) -> CallGrammar:
        """The grammar of calls: the family's, or the one that the system message explains."""
        if not self.shows_tools:
            return HERMES
        if self.grammar is None:
            raise TemplateRefused(
                "the chat template shows tools, and writes calls in a form that is not known: set chat.tools_in_system "
                "to true, so that tools are explained in the system message"
            )
        return self.grammar

    def text(self, messages: Sequence[Message], tools: Tools = NO_TOOLS, prompt: bool = True) -> str:
        """Return the conversation as text; with `prompt`, up to the start of the assistant's next turn.

        Raises TemplateRefused for a conversation that the template does not accept.
        """
        shown: list[Message] = []
        for message in messages:
            for each in self._message(message):
                if each["role"] == "system" and shown and not self._shows_later_system:
                    each["role"] = "user"
                if each["role"] == "user" and shown and shown[-1]["role"] in self._no_user_after:
                    before = shown.pop()
                    each = {**before, "content": f"{before['content']}\n\n{each['content']}"}
                shown.append(each)
        listed, explained = self._shown_tools(tools.identity) if tools else ([], "")
        if explained and shown and shown[0]["role"] == "system":
            shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{explained}".lstrip()}
        elif explained:
            shown = [{"role": "system", "content": explained}, *shown]
        if shown and shown[0]["role"] == "system" and not self.shows_system:
            first, shown = shown[0]["content"], shown[1:]
            if not shown or shown[0]["role"] != "user":
                shown = [{"role": "user", "content": ""}, *shown]
            shown[0] = {**shown[0], "content": f"{first}\n\n{shown[0]['content']}".rstrip()}
        steps = MOST_STEPS + MOST_STEPS_EACH * (len(shown) + len(listed))
        offered = {"tools": listed} if listed else self._without_tools
        variables = {**self._variables, **offered, "messages": shown, "add_generation_prompt": prompt}
        try:
            return self._render(steps, variables)
        except Exception as error:  # a template is a program of the model's author, and may raise any error
            raise TemplateRefused(f"the chat template does not accept this conversation: {error!s:.300}") from error

    def extension(
        self, head: Sequence[Message], turn: Message, new: Sequence[Message], tools: Tools = NO_TOOLS
    ) -> tuple[str, str]:
        """Return the text that ends the sampled `turn`, and the text from there to the assistant's next turn.

        Args:
            head: the messages before the conversation's first turn of the assistant.
            turn: the sampled turn; only its calls matter here, to show their results.
            new: the messages that answer it.

        Raises TemplateRefused.
        """
        marked: dict[str, Any] = {"role": "assistant", "content": self._mark}
        if turn.get("tool_calls") and any(message["role"] == "tool" for message in new):
            calls = marked["tool_calls"] = list(turn["tool_calls"][: 1 if self._one_call else None])
            if not self._shows_content:
                function = {**calls[-1]["function"], "arguments": json.dumps({self._mark: ""})}
                calls[-1] = {**calls[-1], "function": function}
        return self._continued(self.text([*head, marked, *new], tools))

    def broken(self, value: Any) -> Any:  # noqa: ANN401 - a JSON tree
        """Return a JSON tree in which no text contains a special token."""
        if isinstance(value, str):
            return self._specials.sub(lambda found: found[0][0] + BREAK + found[0][1:], value)
        if isinstance(value, dict):
            return {self.broken(key): self.broken(item) for key, item in value.items()}
        return [self.broken(item) for item in value] if isinstance(value, list) else value

    def _continued(self, whole: str) -> tuple[str, str]:
        """Return the text that ends a conversation's marked turn, and the text after it. Raises TemplateRefused."""
        at = whole.find(self._mark)
        if at < 0:
            raise TemplateRefused("the chat template does not show earlier turns of the assistant, or alters them")
        marks = (self.grammar or HERMES).marks
        for found in self._specials.finditer(whole, at + len(self._mark)):
            if found[0] not in marks:
                return found[0], whole[found.end() :]
        raise TemplateRefused("no special token of the chat template ends a turn of the assistant")

    def _make_shown_tools(self, tools: str) -> tuple[list[ShownTool], str]:
        """Return the tools for the template, or the text of a system message that explains them."""
        listed = [ShownTool(self.broken(tool)) for tool in json.loads(tools)]
        if self.shows_tools:
            if not self._native_calls:
                _ = self.call_grammar  # raises, with the reason
            return listed, ""
        return [], TOOLS_TEXT.format(
            tools="\n".join(json.dumps(each["function"], ensure_ascii=False) for each in listed)
        )

    def _message(self, message: Message) -> list[dict[str, Any]]:
        """Return the message in this template's form: several messages if it supports only one call for each turn."""
        shown: dict[str, Any] = {"role": message["role"]}
        for key, value in message.items():
            if key not in ("role", "tool_calls"):
                shown[key] = self.broken(value)
        if message["role"] == "tool" and not self.shows_results:
            return [{"role": "user", "content": f"<tool_response>\n{shown['content']}\n</tool_response>"}]
        calls = message.get("tool_calls")
        if not calls:
            return [shown]
        if not self._native_calls:
            # In the form that the system message explains.
            named = [(json.dumps(call["function"]["name"]), call["function"]["arguments"]) for call in calls]
            texts = [self.broken(f'{{"name": {name}, "arguments": {arguments}}}') for name, arguments in named]
            written = "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
            return [{**shown, "content": f"{shown['content']}\n{written}".strip()}]
        called = [self._call(call) for call in calls]
        if not self._one_call:
            return [{**shown, "tool_calls": called}]
        more = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in called[1:]]
        return [{**shown, "tool_calls": called[:1]}, *more]

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call as templates read it: in most families, with its arguments as an object."""
        name, text = call["function"]["name"], call["function"]["arguments"]
        arguments = self.broken(text)
        if self._object_arguments:
            try:
                value = self.broken(json.loads(text))
            except (ValueError, RecursionError):
                value = None
            arguments = value if isinstance(value, dict) else {"text": arguments}
        function = {"name": self.broken(name), "arguments": arguments}
        return {"id": self.broken(call.get("id", "")), "type": "function", "function": function}

    def _shows(self, messages: Sequence[Message], needle: str, tools: Tools = NO_TOOLS) -> bool:
        try:
            return needle in self.text(messages, tools)
        except TemplateRefused:
            return False
