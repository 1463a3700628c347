import json
from types import MappingProxyType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidemill.schemas.chat.messages import (
    MOST_LEVELS,
    NO_TOOLS,
    ROLES,
    BadMessage,
    checked_messages,
    checked_tools,
    identity,
)

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800") | st.binary()
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=4)
CALLS = st.fixed_dictionaries({}, optional={"id": TREES, "function": st.dictionaries(
    st.sampled_from(["name", "arguments"]), TREES)})  # fmt: skip
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from([*ROLES, "developer"]) | TREES},
    optional={
        "content": TREES | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TREES})),
        "tool_calls": TREES | st.lists(CALLS),
        "tool_call_id": TREES,
        "reasoning_content": TREES,
        "name": TREES,
        "audio": TREES,
    },
)
TOOLS = st.fixed_dictionaries({"type": st.just("function"), "function": st.fixed_dictionaries(
    {"name": st.text("abc", min_size=1) | TREES}, optional={"description": TREES, "parameters": TREES})})  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(TREES | st.lists(TREES | MESSAGES))
def test_any_tree_is_refused_by_name_or_checked(tree):
    try:
        messages = checked_messages(tree)
    except BadMessage:
        return
    for message in messages:
        assert message["role"] in ROLES and isinstance(message["content"], str)
        assert message.keys() <= {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"}
        for call in message.get("tool_calls", ()):
            assert isinstance(call["id"], str) and isinstance(call["function"]["name"], str)
            assert isinstance(call["function"]["arguments"], str)
        hash(identity(message))
    json.dumps(messages, ensure_ascii=False).encode()
    assert checked_messages(messages) == messages


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(TREES | st.lists(TREES | TOOLS))
def test_any_tree_of_tools_is_refused_by_name_or_checked(tree):
    try:
        tools = checked_tools(tree)
    except BadMessage:
        return
    assert all(isinstance(tool["function"]["parameters"], dict) for tool in tools)
    assert checked_tools(json.loads(tools.identity or "[]")) == tools
    assert checked_tools(tools) is (tools or NO_TOOLS)


def nested(levels: int, inner: object = 0) -> object:
    for _ in range(levels):
        inner = [inner]
    return inner


def user(content: object) -> dict:
    return {"role": "user", "content": content}


def assistant(arguments: object, **call: object) -> dict:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function, **call}]}


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([], "at least one"),
        ({}, "at least one"),
        ("hello", "at least one"),
        ([user("hello"), 3], r"messages\[1\] is not an object"),
        ([{"content": "hello"}], r"messages\[0\].role must be one of system, user"),
        ([{"role": nested(10**5)}], r"messages\[0\].role must be one of"),
        ([user({"text": "hello"})], r"messages\[0\].content must be a text or a list of text parts"),
        ([user([{"type": "image_url"}])], "reads only text"),
        ([user("\ud800")], "half of a surrogate pair"),
        ([user([{"type": "text", "text": "\udfff"}])], "half of a surrogate pair"),
        ([assistant("{}", function=None)], r"tool_calls\[0\] must be an object with a `function`"),
        ([assistant({1, 2})], r"tool_calls\[0\].function.arguments is not JSON"),
        ([assistant({"a": float("nan")})], "arguments is not JSON"),
        ([assistant(nested(10**5))], "arguments is not JSON"),
        ([assistant("{}", id=3)], r"tool_calls\[0\].id must be a text"),
        ([{"role": "assistant", "tool_calls": "add"}], "tool_calls must be a list"),
        ([{"role": "tool", "content": "3", "tool_call_id": None}], "tool_call_id must be a text"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_place_and_fault(messages, fault):
    with pytest.raises(BadMessage, match=fault):
        checked_messages(messages)
    assert checked_messages([user("the next one")]) == [user("the next one")]


def tool(name: object = "add", **function: object) -> dict:
    return {"type": "function", "function": {"name": name, **function}}


@pytest.mark.parametrize(
    ("tools", "fault"),
    [
        ("add", "must be a list"),
        (b"add", "must be a list"),
        ([tool(), tool()], "names 'add' twice"),
        ([tool("a b")], r"tools\[0\].function.name must be 1 to 64"),
        ([tool("add\n")], "must be 1 to 64"),
        ([tool("a" * 65)], "must be 1 to 64"),
        ([{"name": "add"}], r"tools\[0\] must be"),
        ([tool(parameters=[])], "must be a JSON schema"),
        ([tool(parameters={"a": {1}})], "parameters is not JSON"),
        ([tool(parameters={"a": float("inf")})], "parameters is not JSON"),
        ([tool(parameters={"a": nested(MOST_LEVELS)})], f"more than {MOST_LEVELS} levels"),
        ([tool(parameters={"a": nested(10**5)})], "parameters is not JSON"),
        ([tool(description=3)], "description must be a text"),
        ([tool(description="\ud800")], "half of a surrogate pair"),
    ],
)
def test_tools_that_cannot_be_shown_are_refused_by_place_and_fault(tools, fault):
    with pytest.raises(BadMessage, match=fault):
        checked_tools(tools)


def test_messages_are_reduced_to_what_a_template_reads():
    given_messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "id": 7},
        MappingProxyType({"role": "user", "content": None, "name": "miller"}),
        {**assistant({"a": "é"}), "refusal": None, "audio": None, "reasoning_content": "hm"},
        {"role": "tool", "content": "3", "tool_call_id": "1", "artifact": {}},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}}
    assert checked_messages(given_messages) == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "", "name": "miller"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    "arguments", ['{"b":[1,2],"a":"\\u00e9"}', '{ "a": "é", "b": [1, 2] }', {"a": "é", "b": [1, 2]}]
)
def test_a_call_is_the_same_in_any_json_style(arguments):
    said, sent_back = checked_messages([assistant('{"a": "é", "b": [1, 2]}'), assistant(arguments)])
    assert identity(said) == identity(sent_back)


@pytest.mark.parametrize(
    "other",
    [
        assistant('{"a": 2}'),
        assistant("{broken"),
        assistant('{"a": 1}', id="2"),
        {**assistant('{"a": 1}'), "content": "."},
        {"role": "assistant", "content": ""},
    ],
)
def test_messages_that_say_something_else_are_not_the_same(other):
    said, different = checked_messages([assistant('{"a": 1}'), other])
    assert identity(said) != identity(different)
    assert identity(said) == identity({**said, "reasoning_content": "thoughts are not compared"})


def test_checked_tools_are_a_copy_in_the_order_given():
    parameters = {"type": "object", "properties": {"b": {}, "a": {}}}
    tools = checked_tools([tool("z", parameters=parameters), tool("a")])
    parameters["properties"]["c"] = {}
    assert [each["function"]["name"] for each in tools] == ["z", "a"]
    assert list(tools[0]["function"]["parameters"]["properties"]) == ["b", "a"]
    assert tools[1]["function"] == {"name": "a", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert tools.identity != checked_tools([tool("a"), tool("z", parameters=parameters)]).identity
    assert checked_tools(None) is NO_TOOLS and NO_TOOLS.identity == ""
