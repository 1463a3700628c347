"""The native example: its questions, its conversation, its reward."""

import asyncio
import json
import random
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.records import build
from tidemill.compose.demo.corpus import Demonstrator
from tidemill.producers.environments.base import GenerationFailed, Reply, Split, TaskError, TaskQuery, split_of
from tidemill.producers.environments.check import ScriptedPolicy
from tidemill.producers.environments.ledger import (
    CALCULATOR,
    CEILING,
    LedgerEnvironment,
    LedgerOptions,
    LedgerTask,
    closing,
    parse_ledger,
)
from tidemill.schemas.records import Task

ENTRIES = st.lists(st.integers(-999_999, 999_999).filter(bool), min_size=1, max_size=60)
SEEDS = st.integers(0, 2**32)
LEDGER = LedgerEnvironment(LedgerOptions())


def task_of(payload, max_turns=100):
    return build(Task, task_id="t", group_id="g", payload=payload, group_size=16, max_turns=max_turns, deadline_at=1)


def ledger_task(entries, max_turns=100):
    return task_of(LedgerTask(entries=tuple(entries)).payload(), max_turns)


def played(task, policy, environment=LEDGER):
    return asyncio.run(environment.play(task, policy))


def solver(entries):
    """Return a policy that solves a ledger without a mistake."""
    return Demonstrator(LedgerTask(entries=tuple(entries)), random.Random(0), slip_rate=0.0, polite_rate=0.0)


@settings(max_examples=10)
@given(SEEDS, SEEDS, st.integers(2, 6))
def test_no_question_is_in_both_splits(train_seed, eval_seed, entries):
    environment = LedgerEnvironment(LedgerOptions(entries=entries))
    drawn = [
        {draft.asks for draft in islice(environment.tasks(TaskQuery(seed)), 100) if split_of(draft.asks) is split}
        for seed, split in ((train_seed, Split.TRAIN), (eval_seed, Split.EVAL))
    ]
    assert not drawn[0] & drawn[1] and all(drawn)


@settings(max_examples=10)
@given(SEEDS)
def test_a_query_always_draws_the_same_tasks(seed):
    drafts = list(islice(LEDGER.tasks(TaskQuery(seed)), 40))
    assert list(islice(LEDGER.tasks(TaskQuery(seed)), 40)) == drafts
    assert all(parse_ledger(draft.payload).prompt() == draft.asks for draft in drafts)


@settings(max_examples=10)
@given(SEEDS, st.integers(2, 120), st.integers(0, 4), st.integers(4, CEILING // 2))
def test_difficulty_follows_the_options(seed, entries, spare, largest):
    environment = LedgerEnvironment(LedgerOptions(entries=entries, spare_turns=spare, largest=largest))
    draft = next(environment.tasks(TaskQuery(seed)))
    ledger = parse_ledger(draft.payload)
    assert len(ledger.entries) == entries and draft.max_turns == entries + 1 + spare
    running = [sum(ledger.entries[:place]) for place in range(entries + 1)]
    assert all(0 <= balance <= CEILING for balance in running)
    assert all(1 <= abs(entry) <= largest for entry in ledger.entries)


def test_lengths_vary_when_asked_to():
    environment = LedgerEnvironment(LedgerOptions(entries=5, fewest_entries=3))
    drafts = islice(environment.tasks(TaskQuery(0)), 100)
    assert {len(parse_ledger(draft.payload).entries) for draft in drafts} == {3, 4, 5}


@pytest.mark.parametrize(
    "options",
    [{"entires": 4}, {"entries": 0}, {"entries": 100_000}, {"largest": 0}, {"largest": 26}, {"spare_turns": -1},
     {"entries": 3, "fewest_entries": 4}],
)  # fmt: skip
def test_invalid_options_are_refused(options):
    with pytest.raises(ValidationError):
        LedgerOptions(**options)


@given(ENTRIES)
def test_a_payload_reads_back_as_the_same_ledger(entries):
    ledger = LedgerTask(entries=tuple(entries))
    assert parse_ledger(ledger.payload()) == ledger and ledger.balance == sum(entries)


@pytest.mark.parametrize(
    "payload",
    ["", "{", "[]", "{}", '{"entries": []}', '{"entries": [0]}', '{"entries": [true]}', '{"entries": [1.5]}',
     '{"entries": ["1"]}', '{"entries": [1e99]}', '{"entries": [1000000]}', '{"entries": [1], "more": 1}',
     "[" * 100_000,
     json.dumps({"entries": [1] * 10_001})],
)  # fmt: skip
def test_a_payload_that_is_no_ledger_is_refused(payload):
    with pytest.raises(TaskError, match="no ledger"):
        played(task_of(payload), ScriptedPolicy(["answer 5"], 10))


def test_a_solved_episode_scores_in_full():
    policy = solver([17, -4, 9])
    score = played(ledger_task([17, -4, 9]), policy)
    assert score.success and score.total == pytest.approx(1.1)
    assert {part.name: part.value for part in score.rewards} == {"answer": 1.0, "tool_use": 1.0}
    said = [message["content"] for message in policy.conversation if message["role"] == "tool"]
    assert said == ["17", "13", "22"]


@settings(max_examples=20)
@given(ENTRIES.filter(lambda entries: len(entries) >= 49))
def test_an_episode_of_fifty_turns_can_be_solved(entries):
    policy = solver(entries)
    assert played(ledger_task(entries), policy).success
    assert sum(message["role"] == "assistant" for message in policy.conversation) >= 50


def test_a_wrong_answer_fails_but_its_tool_use_counts():
    score = played(ledger_task([5]), ScriptedPolicy(["answer 6"], 10))
    assert not score.success and score.total == pytest.approx(0.1)


def test_an_episode_without_an_answer_ends_after_its_last_turn():
    policy = ScriptedPolicy([""], 10, arguments='{"a": 0, "b": 5}')
    assert not played(ledger_task([5], max_turns=3), policy).success
    assert len(policy.requests) == 3


def test_a_polite_closing_is_read_and_scores_the_same():
    scores = [played(ledger_task([5]), ScriptedPolicy([text], 10)) for text in ("answer 5", "answer 5 thanks")]
    assert scores[0] == scores[1] and scores[0].success
    assert closing({"content": "answer 5 thanks"}) == (5, True)


def test_an_extra_turn_changes_only_its_own_component():
    tidy = played(ledger_task([5]), ScriptedPolicy(["answer 5"], 10))
    untidy = played(ledger_task([5]), ScriptedPolicy(["what?", "answer 5"], 10))
    assert tidy.rewards[0] == untidy.rewards[0]
    assert (tidy.rewards[1].value, untidy.rewards[1].value) == (1.0, 0.5)


def test_a_conversation_is_scored_again_with_the_same_score():
    policy = ScriptedPolicy(["what?", "answer 5"], 10)
    score = played(ledger_task([5]), policy)
    assert asyncio.run(LEDGER.rescore(ledger_task([5]), policy.conversation)) == score
    assert asyncio.run(LEDGER.cut_off(ledger_task([5]), policy.conversation[:2])).success is False


def test_a_generation_that_failed_is_not_caught():
    with pytest.raises(GenerationFailed):
        played(ledger_task([5], max_turns=100), ScriptedPolicy(["what?"], 2))


HOSTILE = st.one_of(
    st.text(),
    st.text(alphabet="adsubnwer 0123456789-+.\n\t\x00٣Ⅷ<|end>"),
    st.from_regex(r"(add|sub|answer) -?[0-9]{10,400}( [0-9]{1,400})?", fullmatch=True),
)


@given(st.lists(HOSTILE, min_size=1, max_size=5), st.none() | st.text(max_size=20))
def test_any_text_of_a_model_is_answered_deterministically(turns, arguments):
    outcomes = []
    for _ in range(2):
        policy = ScriptedPolicy(turns, 5, arguments)
        outcomes.append((played(ledger_task([5, -2], max_turns=5), policy), policy.conversation))
    assert outcomes[0] == outcomes[1]
    assert 0 <= outcomes[0][0].total <= 1.1 and not outcomes[0][0].fault()


@pytest.mark.parametrize(
    "text",
    ["", "answer", "answer 1 2", "answer +1", "answer 1234567890", "answer 3 please", "answer 3  thanks", "thanks",
     "answer ٣", "add 1 2; answer 3", "the answer 3"],
)  # fmt: skip
def test_texts_that_are_not_an_answer(text):
    assert closing({"content": text}) is None


def reply(name, arguments):
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return Reply({"role": "assistant", "content": "", "tool_calls": [call]}, "tool_calls")


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("add", '{"a": 2, "b": 3}', "5"),
        ("sub", '{"a": "2", "b": 3}', "-1"),
        ("mul", '{"a": 2, "b": 3}', "error: there is no tool 'mul'; there are add, sub"),
        ("add", '{"a": 2}', "error: b: Missing required argument"),
        ("add", '{"a": 2, "b": 3, "c": 4}', "error: c: Unexpected keyword argument"),
        ("add", '{"a": [], "b": 3}', "error: a: Input should be a valid integer"),
        ("add", "{", "error: arguments: Invalid JSON"),
        ("add", "[1, 2]", "error: arguments: Input should be an object"),
    ],
)
def test_every_fault_of_a_call_is_answered_in_the_conversation(name, arguments, said):
    messages, faults = CALCULATOR.answer(reply(name, arguments))
    assert messages[0]["content"].startswith(said) and messages[0]["tool_call_id"] == "c"
    assert faults == said.startswith("error")


def test_a_malformed_call_is_answered_too():
    messages, faults = CALCULATOR.answer(
        Reply({"role": "assistant", "content": "<tool_call>{"}, "stop", ("<tool_call>{",))
    )
    assert faults == 1 and messages[0]["content"].startswith("error: ") and messages[0]["role"] == "user"
