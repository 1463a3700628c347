import json
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schemas.chat.families import FAMILIES, TOOLS
from tidemill.schemas.chat.calls import GRAMMARS, HERMES, ToolCall, grammar_of

BY_NAME = {grammar.name: grammar for grammar in GRAMMARS}
WRITERS = {family.grammar: family for family in FAMILIES.values() if family.grammar}
PIECES = sorted(
    {mark for grammar in GRAMMARS for mark in (*grammar.marks, grammar.marker)}
    | {family.call for family in FAMILIES.values()}
    | {
        '{"name": "add"',
        ', "arguments": {}}',
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        ",",
        "null",
        "NaN",
        "1e999",
        "\\ud800",
        "\\",
    }
    | {"<function=add>", "<parameter=a>", "functions.add:0", "```", "\n```json\n", "add", " ", "\n", "9" * 5000, "é"}
)
TURNS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)
KEYS = st.text("abc_é", min_size=1)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.name)
@given(turn=TURNS)
def test_any_turn_is_answered_with_what_could_be_read(grammar, turn):
    content, calls, malformed = grammar.read(turn, TOOLS)
    content.encode()
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)
        f"{call.name}{call.arguments}{call.id}".encode()
    assert all(text.strip() in content and text in turn for text in malformed)
    if not calls:
        assert content == turn.strip()


def test_a_grammar_has_a_family_that_writes_it():
    assert WRITERS.keys() == BY_NAME.keys()


@pytest.mark.parametrize("family", WRITERS.values(), ids=lambda family: family.name)
@given(arguments=st.dictionaries(KEYS, VALUES, max_size=3))
def test_a_grammar_reads_what_the_familys_template_writes(family, arguments):
    schema = {key: {"type": "string"} for key, value in arguments.items() if isinstance(value, str)}
    tools = [{"function": {"name": "look.up", "parameters": {"type": "object", "properties": schema}}}]
    function = {"name": "look.up", "arguments": json.dumps(arguments)}
    call = {"id": "functions.look.up:0", "type": "function", "function": function}
    template = TEMPLATES[family.name]
    asked = template.text([{"role": "user", "content": "?"}], TOOLS)
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    whole = template.text([{"role": "user", "content": "?"}, turn], TOOLS, prompt=False)
    written = whole.removeprefix(asked).removesuffix("\n").removesuffix("<|im_end|>").removesuffix(family.specials[-1])
    _, read, malformed = BY_NAME[family.grammar].read(written, tools)
    assert [each.name for each in read] == ["look.up"] and not malformed
    assert json.loads(read[0].arguments) == arguments


TEMPLATES = {family.name: family.template() for family in WRITERS.values()}


@pytest.mark.parametrize("family", WRITERS.values(), ids=lambda family: family.name)
def test_a_grammar_is_found_from_a_written_call(family):
    _, (call,), _ = BY_NAME[family.grammar].read(family.call, TOOLS)
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": 2})
    assert grammar_of(family.call, "add", {"a": 1, "b": 2}) is BY_NAME[family.grammar]
    assert grammar_of(family.call, "add", {"a": 1, "b": 3}) is None
    assert grammar_of(family.call + " " + family.call, "add", {"a": 1, "b": 2}) is None
    assert grammar_of("add(a=1, b=2)", "add", {"a": 1, "b": 2}) is None


HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    "bad",
    [
        '{"name": "add", "arguments": {"a": 1}',
        '{"name": "add", "arguments": "{broken"}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
        '{"name": "add", "arguments": {"a": "\\ud800"}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": ["add"], "arguments": {}}',
        '{"arguments": {}}',
        f'{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}',
        '{"name": "add", "arguments": ' + '{"a": ' * 10**5,
        "[]",
        "",
        "add(1)",
    ],
)
def test_an_unreadable_call_is_reported_and_the_others_are_read(bad):
    turn = f"First. {HERMES_CALL}<tool_call>{bad}</tool_call>{HERMES_CALL} Last."
    content, calls, malformed = HERMES.read(turn)
    assert [call.arguments for call in calls] == ['{"a": 1}'] * 2
    assert malformed == (f"<tool_call>{bad}</tool_call>",)
    assert content == f"First. <tool_call>{bad}</tool_call> Last."


@pytest.mark.parametrize(
    ("grammar", "turn", "read"),
    [
        ("hermes", HERMES_CALL.removesuffix("</tool_call>"), [ToolCall("add", '{"a": 1}')]),
        ("hermes", '<tool_call>[{"name": "a"}, {"name": "b"}];{"name": "c"}</tool_call>', ["a", "b", "c"]),
        ("hermes", '<tool_call>{"name": "a", "arguments": "{\\"b\\": 1}"}</tool_call>', [ToolCall("a", '{"b": 1}')]),
        ("hermes", '<tool_call>{"name": "a", "id": "abcDEF123"}</tool_call>', [ToolCall("a", "{}", "abcDEF123")]),
        ("hermes", '<tool_call>{"name": "a", "id": "an id of another form"}</tool_call>', [ToolCall("a", "{}")]),
        ("llama", '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', ["a", "b"]),
        ("llama", '{"name": "Ada", "born": 1815}', []),
        ("llama", 'The call is {"name": "a", "parameters": {}}', []),
        ("mistral", '[TOOL_CALLS]a[ARGS]{"b": 1}[TOOL_CALLS]c[CALL_ID]abcDEF123[ARGS]{}', [
            ToolCall("a", '{"b": 1}'), ToolCall("c", "{}", "abcDEF123")]),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>a:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
         "<|tool_call_begin|>functions.b:4<|tool_call_argument_begin|>{}", [
            ToolCall("a", "{}", "a:3"), ToolCall("b", "{}", "functions.b:4")]),
        ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{"b": 1}<｜tool▁call▁end｜>'
         "<｜tool▁call▁begin｜>c<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", ["a", "c"]),
        ("glm", "<tool_call>add\n<arg_key>note</arg_key>\n<arg_value>17</arg_value></tool_call>", [
            ToolCall("add", '{"note": "17"}')]),
        ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>17</arg_value></tool_call>", [
            ToolCall("add", '{"a": 17}')]),
        ("qwen-xml", "<tool_call><function=add><parameter=note>\n  17\n\n</parameter></function></tool_call>", [
            ToolCall("add", '{"note": "  17\\n"}')]),
        ("qwen-xml", "<tool_call><function=nap></function></tool_call>", [ToolCall("nap", "{}")]),
        ("qwen-xml", "<tool_call><function=add><parameter=a>NaN</parameter></function></tool_call>", [
            ToolCall("add", '{"a": "NaN"}')]),
    ],
)  # fmt: skip
def test_forms_that_models_write_in_addition_to_their_templates(grammar, turn, read):
    _, calls, malformed = BY_NAME[grammar].read(turn, TOOLS)
    assert not malformed
    assert [call if isinstance(read[0], ToolCall) else call.name for call in calls] == read


@pytest.mark.parametrize("properties", [[1], None, {"a": True}, {"a": []}, {"a": {"type": ["string", "null"]}}])
def test_unusual_tool_schemas_are_accepted(properties):
    tools = [{"function": {"name": "add", "parameters": {"properties": properties}}}]
    for grammar in ("glm", "qwen-xml"):
        _, calls, malformed = BY_NAME[grammar].read(WRITERS[grammar].call, tools)
        assert [call.arguments for call in calls] == ['{"a": 1, "b": 2}'] and not malformed


LONG = 30_000


@pytest.mark.parametrize(
    "piece", [" ", "\n", "a", "{", "[", '"', "<tool_call>", "<parameter=a>", "<arg_key>", "\\", "[ARGS]"]
)
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.name)
def test_time_grows_with_the_length_of_a_turn_alone(grammar, piece):
    def seconds(length: int) -> float:
        turn = f"{WRITERS[grammar.name].call[:-12]}{piece * (length // len(piece))}"
        begun = time.thread_time()
        for start in (grammar.marker, grammar.marker + "<function=a>", grammar.marker + "a", turn):
            grammar.read(start + turn, TOOLS)
        return time.thread_time() - begun

    # Quadratic time would be 16 times as much, and seconds. A collection of garbage can be in one of the measurements.
    assert any(seconds(4 * LONG) < max(8 * seconds(LONG), 0.2) for _ in range(3))


def test_random_turns_of_a_models_length_are_read_at_once():
    draw = random.Random(3)
    for grammar in GRAMMARS:
        turn = "".join(draw.choices([piece for piece in PIECES if len(piece) < 100], k=10_000))
        begun = time.thread_time()
        grammar.read(turn, TOOLS)
        assert time.thread_time() - begun < 2
