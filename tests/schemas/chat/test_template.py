import copy
import json
import random
import time
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.schemas.chat.families import DAY, FAMILIES, TOOLS, ModelFamily, called, conversation, prose
from tidemill.schemas.chat.format import chatml
from tidemill.schemas.chat.messages import NO_TOOLS, Message, Tools, checked_tools
from tidemill.schemas.chat.template import ChatTemplate, TemplateRefused
from tidemill.schemas.config import ChatSettings

each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
USER = {"role": "user", "content": "How much is it?"}
MORE = {"role": "user", "content": "And then?"}
SAID = {"role": "assistant", "content": "This much."}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "functions.add:0"}
SYSTEM = {"role": "system", "content": "You are a miller."}


def probed(source: str, specials: tuple[str, ...] = ("<|end|>",), **settings: Any) -> ChatTemplate:
    return ChatTemplate(source, {}, specials, ChatSettings(**settings))


@each_family
def test_probes_find_what_a_familys_template_does(family: ModelFamily):
    template = family.template()
    assert (template.grammar.name if template.grammar else None) == family.grammar
    assert template.shows_tools is template.shows_results is (family.grammar is not None)
    assert template.closes == family.closes
    assert template.shows_system is family.shows_system
    _, calls, malformed = template.call_grammar.read(family.call, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 1, "b": 2})] and not malformed


# The rendering of transformers for the same conversation


class Reference:
    """A family's template in transformers."""

    def __init__(self, family: ModelFamily) -> None:
        self.family = family
        self.fast = PreTrainedTokenizerFast(tokenizer_object=family.tokenizer(), **family.tokens)

    def ids(self, messages: list[Message], tools: object, prompt: bool = True) -> list[int]:
        return self.fast.apply_chat_template(
            [self._native(message) for message in messages],
            tools=list(tools) or None,
            chat_template=self.family.source,
            strftime_now=DAY.strftime,
            add_generation_prompt=prompt,
            return_dict=False,
        )

    def text(self, messages: list[Message], tools: object) -> str:
        return self.fast.decode(self.ids(messages, tools), skip_special_tokens=False)

    def _native(self, message: Message) -> dict[str, Any]:
        """Return calls as users of transformers pass them: with arguments as objects, in most families."""
        native = copy.deepcopy(dict(message))
        for call in native.get("tool_calls", ()) if self.family.object_arguments else ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return native


def offered(family: ModelFamily, draw: random.Random):
    """Tools, where the template shows them. Phi's takes no conversation without."""
    return TOOLS if family.grammar and (family.name == "phi4_mini" or draw.random() < 0.7) else NO_TOOLS


@each_family
def test_a_conversation_is_opened_as_transformers_renders_it(family: ModelFamily):
    chat, reference, draw = family.chat(), Reference(family), random.Random(1)
    for _ in range(30):
        tools = offered(family, draw)
        messages = conversation(draw, family, tools)
        assert chat.open(messages, tools) == reference.ids(messages, tools), messages


@each_family
def test_a_turn_is_continued_as_transformers_renders_it(family: ModelFamily):
    chat, reference, draw = family.chat(), Reference(family), random.Random(2)
    for _ in range(30):
        tools = offered(family, draw)
        head: list[Message] = [SYSTEM, USER] if family.shows_system else [USER]
        calls = bool(tools) and draw.random() < 0.6
        if calls:
            said = chat.read(chat.encode(family.call), TOOLS).message
            new: list[Message] = [{"role": "tool", "content": prose(draw), "tool_call_id": said["tool_calls"][0]["id"]}]
        else:
            said, new = {"role": "assistant", "content": prose(draw)}, [{"role": "user", "content": prose(draw)}]
        close, rest = chat.template.extension(head, said, new, tools)
        whole = reference.text([*head, said, *new], tools)
        assert whole.endswith(close + rest)
        assert whole.removesuffix(close + rest).endswith(family.call[-9:] if calls else said["content"])
        asked = reference.ids([*head, said, *new], tools)
        extension = chat.extend(-1, head, said, new, tools)
        assert asked[-len(extension) :] == extension


def test_a_template_that_refuses_none_as_its_tools_is_rendered_without_the_variable():
    family = FAMILIES["phi4_mini"]
    with pytest.raises(TypeError, match="NoneType"):
        Reference(family).ids([USER], NO_TOOLS)
    assert family.template().text([USER]) == "<|user|>How much is it?<|end|><|assistant|>"
    assert "<|tool|>" in family.template().text([USER], TOOLS)


# Content that a template cannot show is written where it can


@pytest.mark.parametrize("name", ["smollm2", "deepseek_r1", "gemma"])
def test_tools_that_a_template_ignores_are_explained_in_the_system_message(name: str):
    template = FAMILIES[name].template()
    calls = [called(random.Random(4), 0)]
    results = [{"role": "tool", "content": "3", "tool_call_id": calls[0]["id"]}]
    text = template.text([USER, {**SAID, "tool_calls": calls}, *results], TOOLS)
    for tool in TOOLS:
        assert json.dumps(tool["function"], ensure_ascii=False) in text
    assert f'<tool_call>\n{{"name": "add", "arguments": {calls[0]["function"]["arguments"]}}}\n</tool_call>' in text
    assert "<tool_response>\n3\n</tool_response>" in text
    assert text.index("You can call") < text.index("How much")


def test_tools_in_the_system_message_are_a_setting_too():
    template = FAMILIES["qwen3"].template(tools_in_system=True)
    assert "You can call these functions" in template.text([SYSTEM, USER], TOOLS)
    assert template.call_grammar.name == "hermes" and not template.shows_results
    read = template.call_grammar.read(FAMILIES["qwen3"].call)[1]
    said = {**SAID, "tool_calls": [{"id": "1", "function": {"name": read[0].name, "arguments": read[0].arguments}}]}
    assert "<tool_call>" in template.text([USER, said, MORE], TOOLS)
    close, rest = template.extension([USER], said, [{"role": "tool", "content": "3", "tool_call_id": "1"}], TOOLS)
    assert (close, rest) == (
        "<|im_end|>",
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    )


def test_a_template_without_system_messages_shows_them_before_the_first_question():
    template = FAMILIES["gemma"].template()
    first = "<bos><start_of_turn>user\nYou are a miller.\n\nHow much is it?<end_of_turn>\n<start_of_turn>model\n"
    assert template.text([SYSTEM, USER]) == first
    assert template.text([SYSTEM]) == "<bos><start_of_turn>user\nYou are a miller.<end_of_turn>\n<start_of_turn>model\n"


@each_family
def test_every_later_system_message_is_shown_in_its_place(family: ModelFamily):
    template = family.template()
    _, rest = template.extension([USER], SAID, [SYSTEM, MORE])
    assert 0 <= rest.find("You are a miller.") < rest.find("And then?")
    text = template.text([USER, SAID, SYSTEM, MORE])
    assert text.find("This much.") < text.find("You are a miller.") < text.find("And then?")


@each_family
def test_several_questions_and_results_in_a_row_are_shown(family: ModelFamily):
    template = family.template()
    said = {**SAID, "tool_calls": [called(random.Random(1), 0), called(random.Random(2), 1)]}
    results = [{**RESULT, "content": f"result {n}", "tool_call_id": f"functions.add:{n}"} for n in range(2)]
    _, rest = template.extension([USER], said, [*results, USER, MORE], TOOLS)
    places = [rest.find(text) for text in ("result 0", "result 1", "How much", "And then?")]
    assert -1 not in places and places == sorted(places)


def test_calls_of_one_turn_are_shown_as_several_turns_where_a_template_takes_one_call():
    template = FAMILIES["llama32"].template()
    said = {**SAID, "content": "", "tool_calls": [called(random.Random(n), n) for n in range(3)]}
    text = template.text([USER, said, MORE], TOOLS)
    assert text.count('{"name": "add", "parameters": ') == 3
    close, rest = template.extension([USER], said, [MORE], TOOLS)
    assert (close, rest.count("<|start_header_id|>")) == ("<|eot_id|>", 2)


def test_a_turn_ends_with_its_first_call_where_a_template_takes_one_and_shows_content():
    template = probed(
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}"
        "{% if m.tool_calls %}{{ raise_exception('one') if m.tool_calls[1:] }}"
        "<tool_call>{{ m.tool_calls[0].function | tojson }}</tool_call>{% endif %}<|end|>{% endfor %}"
    )
    said = {**SAID, "tool_calls": [called(random.Random(n), n) for n in range(3)]}
    assert template.text([USER, said], TOOLS).count("<tool_call>") == 3
    assert template.extension([USER], said, [RESULT], TOOLS) == ("<|end|>", "3<|end|>")


@each_family
def test_a_question_may_follow_calls(family: ModelFamily):
    said = {**SAID, "content": "", "tool_calls": [called(random.Random(1), 0)]}
    close, rest = family.chat().template.extension([USER], said, [MORE], TOOLS)
    assert close in family.closes and "And then?" in rest and "functions.add" not in rest


@pytest.mark.parametrize(
    "arguments", ["{broken", "[1]", '"text"', "null", "[" * 10**5, '{"a":' * 400 + "1" + "}" * 400]
)
@each_family
def test_arguments_of_another_program_that_are_no_object_are_shown_all_the_same(family: ModelFamily, arguments: str):
    template = family.template()
    call = {**called(random.Random(1), 0), "function": {"name": "add", "arguments": arguments}}
    said = {**SAID, "tool_calls": [call]}
    result = {**RESULT, "content": "a result"}
    assert "a result" in template.extension([USER], said, [result], TOOLS)[1]
    assert "a result" in template.text([USER, said, result], TOOLS)


# Special tokens that content spells


@each_family
def test_no_text_of_a_message_or_a_tool_becomes_a_special_token(family: ModelFamily):
    chat = family.chat()
    spelled = "".join(chat.template.specials)
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in spelled)

    def spelling(text: str, arguments: str) -> tuple[list[Message], Tools]:
        function = {"name": "add" + text, "arguments": arguments}
        messages: list[Message] = [
            {"role": "user", "content": text},
            {
                "role": "assistant",
                "content": text,
                "reasoning_content": text,
                "tool_calls": [{"id": "abcDEF123" + text, "type": "function", "function": function}],
            },
            {"role": "tool", "content": text, "tool_call_id": "abcDEF123" + text, "name": text},
        ]
        described = {"name": "add", "description": text, "parameters": {text: {"enum": [text]}}}
        return messages, checked_tools([{"function": described}])

    harmless = spelling("x", '{"x": ["x"]}')
    hostile = spelling(spelled, f'{{"{escaped}": ["{escaped}", "{spelled}"]}}')
    special = {chat.encode(text)[0] for text in chat.template.specials}

    def seen(ids: list[int]) -> list[int]:
        return [token for token in ids if token in special]

    assert seen(chat.open(*hostile)) == seen(chat.open(*harmless))
    extensions = [
        chat.extend(-1, messages[:1], messages[1], messages[2:], tools) for messages, tools in (harmless, hostile)
    ]
    assert seen(extensions[0]) == seen(extensions[1])


def test_words_in_brackets_that_structure_nothing_stay_as_they_are():
    gemma = FAMILIES["gemma"].template()
    assert "<table> <b>" in gemma.text([{"role": "user", "content": "<table> <b>"}])


# Dates and other fixed settings of a run


@pytest.mark.parametrize(("name", "shown"), [("llama32", "Today Date: 03 Feb 2021"), ("mistral31", "2021-02-03.")])
def test_the_day_is_the_settings(name: str, shown: str):
    assert shown in FAMILIES[name].template(date="2021-02-03").text([USER])


def test_variables_of_the_template_are_settings():
    thoughtless = FAMILIES["qwen3"].template(arguments={"enable_thinking": False})
    assert thoughtless.text([USER]).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert thoughtless.extension([USER], SAID, [MORE])[1].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    dated = FAMILIES["llama32"].template(arguments={"date_string": "a fixed day"})
    assert "Today Date: a fixed day" in dated.text([USER])


def test_a_tool_is_shown_as_json_would_show_it():
    template = probed(
        "{% if tools %}{{ tools | tojson }}{{ tools[0] | tojson }}{{ tools[0].function | tojson }}"
        "{{ tools[0] | tojson(indent=1) }}{% endif %}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>"
        "{% endfor %}"
    )
    first, *_ = given = [dict(tool) for tool in TOOLS]
    expected = "".join(json.dumps(each, ensure_ascii=False) for each in (given, first, first["function"]))
    assert template.text([USER], TOOLS) == f"{expected}{json.dumps(first, indent=1)}{USER['content']}<|end|>"


def test_a_training_librarys_marks_are_ignored():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}<|end|>{% endfor %}"
    assert probed(source).text([USER, SAID]) == "How much is it?<|end|>This much.<|end|>"


# Templates that are refused at start

PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
ONE = "{{ m.content }}<|end|>"
REFUSED = {
    "no Jinja": ("{% for m in messages %}", "not a usable Jinja template"),
    "too long": (PLAIN + "{# " + "x" * 10_000_000 + " #}", "more than 1048576"),
    "raises": ("{{ raise_exception('not today') }}", "not today"),
    "shows no question": ("<|end|>", "does not show a user's message"),
    "shows no earlier turn": (
        "{% for m in messages if m.role != 'assistant' %}" + ONE + "{% endfor %}",
        "does not show earlier turns",
    ),
    "shows the last message alone": ("{{ messages[-1].content }}<|end|>", "does not show earlier turns"),
    "takes one question": (PLAIN + "{% if messages[1:] %}{{ raise_exception('one only') }}{% endif %}", "one only"),
    "counts its messages": ("{{ messages | length }} messages " + PLAIN, "rewrites the text before a turn"),
    "forgets earlier questions": (
        "{% for m in messages[-2:] %}" + ONE + "{% endfor %}",
        "rewrites the text before a turn",
    ),
    "puts questions first": (
        "{% for m in messages | sort(attribute='role', reverse=true) %}" + ONE + "{% endfor %}",
        "does not show a new message after the turn",
    ),
    "alters turns": ("{% for m in messages %}{{ m.content | upper }}<|end|>{% endfor %}", "does not show a user's"),
    "ends no turn": ("{% for m in messages %}{{ m.content }}\n\n{% endfor %}", "no special token"),
    "writes turns in parts": (
        "{% for m in messages %}{{ m.thinking + '<|end|>' if m.thinking and loop.last }}" + ONE + "{% endfor %}",
        "in parts that each end with",
    ),
    "loops over a range": ("{% for i in range(1000000000) %}{% endfor %}" + PLAIN, "too many steps"),
    "sums a range": ("{{ range(1000000000) | sum }}" + PLAIN, "too many steps"),
    "loops in loops": (
        "{% for i in range(9999) %}{% for j in messages * 9999 %}{% endfor %}{% endfor %}" + PLAIN,
        "too many steps",
    ),
    "loops over an iterator": (
        "{% for i in range(99) %}{% for c in ('x' * 9999) | map('upper') %}{% endfor %}{% endfor %}" + PLAIN,
        "too many steps",
    ),
    "calls itself twice": (
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(99) }}" + PLAIN,
        "too many steps",
    ),
    "calls itself for ever": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}" + PLAIN, "recursion"),
    "calls itself in a loop": ("{% for i in [[[]]] recursive %}{{ loop(i) }}{% endfor %}" + PLAIN, "recursive loop"),
    "takes powers": ("{{ 9 ** 9 ** 9 ** 9 }}" + PLAIN, "too large"),
    "repeats": ("{{ 'x' * 10000000000 }}" + PLAIN, "too large"),
    "reaches for classes": ("{{ ''.__class__.__mro__ }}" + PLAIN, "unsafe"),
    "reaches for an object": ("{{ strftime_now.__self__.year }}" + PLAIN, "unsafe"),
    "reaches for globals": ("{{ raise_exception.__globals__['json'] }}" + PLAIN, "unsafe"),
    "reaches by a format": ("{{ '{0.__class__.__mro__}'.format(messages) }}" + PLAIN, "unsafe"),
    "changes its messages": ("{{ messages.append(1) }}" + PLAIN, "unsafe"),
    "includes a file": ("{% include '/etc/passwd' %}" + PLAIN, "no loader"),
}


@pytest.mark.parametrize(("source", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_template_that_cannot_be_continued_is_refused_with_the_reason(source: str, reason: str):
    begun = time.thread_time()
    with pytest.raises(TemplateRefused, match=reason.replace("*", r"\*")):
        probed(source)
    assert time.thread_time() - begun < 5
    assert probed(PLAIN).closes == {"<|end|>"}  # the next one is accepted


def test_a_bound_grows_with_the_conversation():
    template = probed("{% for m in messages %}{% for n in messages %}{% endfor %}" + ONE + "{% endfor %}")
    assert template.text([USER, SAID] * 500).count("<|end|>") == 1000
    worse = probed("{% if messages[9:] %}{% for n in range(999999) %}{% endfor %}{% endif %}" + PLAIN)
    with pytest.raises(TemplateRefused, match="too many steps"):
        worse.text([USER, SAID] * 5)
    assert worse.text([USER])


def test_a_form_of_calls_that_is_not_known_is_refused_when_tools_are_offered():
    source = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}@{{ c.function.name }}({{ c.function.arguments }}){% endfor %}<|end|>"
        "{% endfor %}"
    )
    template = probed(source)
    assert template.shows_tools and template.grammar is None
    assert template.text([USER, SAID, MORE])
    with pytest.raises(TemplateRefused, match=r"set chat\.tools_in_system"):
        _ = template.call_grammar
    with pytest.raises(TemplateRefused, match=r"set chat\.tools_in_system"):
        template.text([USER], TOOLS)
    assert probed(source, tools_in_system=True).call_grammar.name == "hermes"


def test_a_conversation_that_a_template_does_not_take_is_refused_and_the_next_is_shown():
    template = FAMILIES["mistral31"].template()
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        template.text([USER, SAID, SAID, USER])
    with pytest.raises(TemplateRefused, match="length >= 9"):
        template.text([USER, SAID, {"role": "tool", "content": "3", "tool_call_id": "1"}])
    assert template.text([USER])


def test_rendering_is_the_same_from_many_threads():
    from concurrent.futures import ThreadPoolExecutor

    template, draw = FAMILIES["qwen3"].template(), random.Random(5)
    conversations = [conversation(draw, FAMILIES["qwen3"], TOOLS) for _ in range(64)]
    expected = [template.text(messages, TOOLS) for messages in conversations]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda messages: template.text(messages, TOOLS), conversations)) == expected


def test_the_built_in_template_shows_everything():
    template = ChatTemplate(chatml(), {}, ("<|im_start|>", "<tool_call>", "</tool_call>", "<|im_end|>"), ChatSettings())
    assert template.grammar is not None and template.grammar.name == "hermes"
    assert template.shows_tools and template.shows_results and template.shows_system
    assert template.closes == {"<|im_end|>"}
