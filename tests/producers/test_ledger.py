"""The ledger's book, grammar, world and reward."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.producers.environment import Split, TaskError, TaskQuery
from tidemill.producers.ledger import LEDGER, actions
from tidemill.producers.ledger.book import Ledger, parse
from tidemill.producers.ledger.reward import LedgerReward
from tidemill.producers.ledger.world import LedgerWorld
from tidemill.producers.registry import environments
from tidemill.schemas.records import Mode, Task

ENTRIES = st.lists(st.integers(-999_999, 999_999).filter(bool), min_size=1, max_size=60)


def task_of(payload, max_turns=100):
    return Task("t", "g", "run", "ledger", payload, Mode.TRAIN, 16, max_turns, 0, 0, 1, 0)


def ledger_task(entries, max_turns=100):
    return task_of(Ledger(tuple(entries)).payload(), max_turns)


def solve(world, ledger):
    """Play the right turns; the last observation."""
    observation = None
    for before, entry in zip(ledger.running, ledger.entries, strict=False):
        operation = actions.Operation.ADD if entry > 0 else actions.Operation.SUB
        observation = world.step(actions.Call(operation, before, abs(entry)).text())
    assert observation is not None and not observation.done
    return world.step(actions.Answer(ledger.balance).text())


def test_the_registry_knows_the_ledger():
    assert environments()["ledger"] is LEDGER


@settings(deadline=None)
@given(ENTRIES)
def test_a_payload_reads_back_as_the_same_ledger(entries):
    ledger = Ledger(tuple(entries))
    assert parse(ledger.payload()) == ledger
    assert ledger.running[-1] == ledger.balance == sum(entries)


@pytest.mark.parametrize(
    "payload",
    ["", "{", "[]", "{}", '{"entries": []}', '{"entries": [0]}', '{"entries": [true]}', '{"entries": [1.5]}',
     '{"entries": ["1"]}', '{"entries": [1e99]}', '{"entries": [1000000]}', "[" * 100_000,
     json.dumps({"entries": [1] * 10_001})],
)  # fmt: skip
def test_a_payload_that_is_no_ledger_is_refused(payload):
    with pytest.raises(TaskError):
        LedgerWorld.open(task_of(payload))
    with pytest.raises(TaskError):
        LedgerReward().score(task_of(payload), ())


def test_a_solved_episode_scores_in_full():
    task = ledger_task([17, -4, 9])
    world = LedgerWorld.open(task)
    assert world.prompt() == "ledger credit 17 debit 4 credit 9"
    assert solve(world, parse(task.payload)).done
    score = LEDGER.reward.score(task, world.transcript)
    assert score.success
    assert {part.name: part.value for part in score.components} == {"answer": 1.0, "tool_use": 1.0}
    assert score.total == pytest.approx(1.1)


@settings(deadline=None)
@given(ENTRIES.filter(lambda entries: len(entries) >= 49))
def test_an_episode_of_fifty_turns_can_be_solved(entries):
    task = ledger_task(entries)
    world = LedgerWorld.open(task)
    solve(world, parse(task.payload))
    assert len(world.transcript) >= 50
    assert LEDGER.reward.score(task, world.transcript).success


def test_drawn_tasks_reach_fifty_turns():
    (draft,) = LEDGER.tasks(TaskQuery(0, 1, Split.EVAL, {"entries": 49}))
    task = task_of(draft.payload, draft.max_turns)
    world = LedgerWorld.open(task)
    assert solve(world, parse(task.payload)).done
    assert len(world.transcript) == 50


def test_a_wrong_answer_is_no_success_but_keeps_its_tool_use():
    task = ledger_task([5])
    world = LedgerWorld.open(task)
    world.step("add 0 5")
    world.step("answer 6")
    score = LEDGER.reward.score(task, world.transcript)
    assert not score.success
    assert score.total == pytest.approx(0.1)


def test_an_episode_without_an_answer_ends_with_its_turns():
    task = ledger_task([5], max_turns=3)
    world = LedgerWorld.open(task)
    assert [world.step("add 0 5").done for _ in range(3)] == [False, False, True]
    assert not LEDGER.reward.score(task, world.transcript).success
    with pytest.raises(RuntimeError):
        world.step("answer 5")


def test_a_polite_closing_is_read_and_scores_the_same():
    scores = []
    for text in ("answer 5", "answer 5 thanks"):
        world = LedgerWorld.open(ledger_task([5]))
        assert world.step(text).done
        scores.append(LEDGER.reward.score(ledger_task([5]), world.transcript))
    assert scores[0] == scores[1] and scores[0].success
    assert not actions.Answer(5).polite and actions.read("answer 5 thanks") == actions.Answer(5, polite=True)


def test_an_empty_transcript_scores_zero():
    score = LEDGER.reward.score(ledger_task([5]), ())
    assert score.total == 0
    assert not score.success


def test_one_component_changes_alone_and_the_version_names_the_weight():
    task = ledger_task([5])
    tidy, untidy = LedgerWorld.open(task), LedgerWorld.open(task)
    tidy.step("answer 5")
    untidy.step("what?")
    untidy.step("answer 5")
    first, second = (LedgerReward().score(task, world.transcript).components for world in (tidy, untidy))
    assert first[0] == second[0]
    assert (first[1].value, second[1].value) == (1.0, 0.5)
    assert LedgerReward(0.1).version != LedgerReward(0.2).version


HOSTILE = st.one_of(
    st.text(),
    st.text(alphabet="adsubnwer 0123456789-+.\n\t\x00٣Ⅷ<|end>"),
    st.from_regex(r"(add|sub|answer) -?[0-9]{10,400}( [0-9]{1,400})?", fullmatch=True),
)


@settings(deadline=None)
@given(st.lists(HOSTILE, min_size=1, max_size=5))
def test_whatever_a_model_writes_is_answered_and_deterministic(turns):
    task = ledger_task([5, -2], max_turns=5)
    first, second = LedgerWorld.open(task), LedgerWorld.open(task)
    for text in turns:
        observation = first.step(text)
        assert second.step(text) == observation
        assert observation.tool_error == (actions.read(text) is None)
        if observation.done:
            break
    assert 0 <= LEDGER.reward.score(task, first.transcript).total <= 1.1


@pytest.mark.parametrize(
    "text",
    ["", "add", "add 1", "add 1 2 3", "add  1 2", "ADD 1 2", "add ٣ ٤", "add 1e3 2", "answer", "answer 1 2",
     "answer +1", "add 1234567890 1", "answer 3 please", "answer 3  thanks", "answer thanks", "thanks", "mul 2 3",
     "add 1 2; answer 3", "<|tool|>total 3"],
)  # fmt: skip
def test_what_is_no_action_gets_the_usage(text):
    observation = LedgerWorld.open(ledger_task([5])).step(text)
    assert observation.tool_error
    assert observation.text == actions.USAGE


@settings(deadline=None)
@given(st.sampled_from(actions.Operation), st.integers(-999_999_999, 999_999_999), st.integers(0, 999_999_999))
def test_every_call_and_answer_reads_back(operation, left, right):
    call = actions.Call(operation, left, right)
    assert actions.read(call.text()) == call
    assert actions.read(f" {call.text()}\n") == call
    for polite in (False, True):
        answer = actions.Answer(left, polite)
        assert actions.read(answer.text()) == actions.read(f" {answer.text()}\n") == answer


def test_an_episode_needs_a_turn():
    with pytest.raises(ValueError, match="max_turns=0"):
        LedgerWorld.open(ledger_task([5], max_turns=0))
