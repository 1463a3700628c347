"""reasoning-gym's tasks: each offered one opens, asks and grades; hostile replies score 0."""

import asyncio
import io
import json
import random
import time
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest

from tidemill.producers.environments.base import Split, TaskError, TaskQuery, split_of
from tidemill.producers.environments.check import ScriptedPolicy, task_of
from tidemill.producers.environments.find import UnknownEnvironment, options_json
from tidemill.producers.environments.reasoning_gym import (
    EXECUTES,
    ITEMS,
    LONGEST_ANSWER,
    NOT_OFFERED,
    PATIENCE,
    READERS,
    SLOW,
    ReasoningGym,
    ReasoningGymOptions,
    draft_of,
    item_of,
    parse_item,
    task_options,
)

FAMILY = ReasoningGym()
MEMBERS = {each.name: each for each in FAMILY.members()}
OFFERED = sorted(name for name, each in MEMBERS.items() if not each.problem)
UNANSWERED = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Tasks whose items have no reference answer: many answers are right."""


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory):
    """Change to a temporary directory: codeio's programs write files into the working directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("items"))
        yield


def opened(name, **options):
    return FAMILY.member(name).open(options)


def drawn(environment, count, seed=0):
    return list(islice(environment.tasks(TaskQuery(seed)), count))


def played(environment, draft, reply):
    policy = ScriptedPolicy([reply], 1)
    return asyncio.run(environment.play(task_of(environment, "gym", draft), policy)), policy.requests[0][0]


def rescored(environment, draft, *messages):
    return asyncio.run(environment.rescore(task_of(environment, "gym", draft), messages))


def tagged(answer):
    return f"So it is <answer>{answer}</answer>."


def components(score):
    return {part.name: part.value for part in score.rewards}


def item_draft(answer, metadata=None):
    return draft_of({"question": "2 + 3 =", "answer": answer, "metadata": metadata or {}})


@cache
def plain(name):
    """Return the task with its defaults, its dataset, and two items."""
    environment = opened(name)
    dataset = environment._dataset(seed=2)
    return environment, dataset, [item_of(dataset, place) for place in range(2)]


@pytest.mark.parametrize("name", OFFERED)
def test_every_offered_task_opens_asks_and_grades(name):
    environment, dataset, (item, other) = plain(name)
    draft = draft_of(item)
    assert draft.asks == item["question"] and draft.payload != draft_of(other).payload
    right, metadata = item["answer"], item["metadata"]
    if name in UNANSWERED:
        right = metadata.get("example_correct_answer") or metadata.get("example_answer")
        right = json.dumps(metadata["possible_answer"]) if name == "graph_color" else right
    score, asked = played(environment, draft, tagged(right))
    assert not score.fault() and asked[0]["content"].startswith(draft.asks) and len(asked) == 1
    if right is not None:
        assert score.success and components(score) == {"score": 1.0, "solved": 1.0, "answered": 1.0}
    wrong, _ = played(environment, draft, tagged("xyzzy plugh"))
    assert not wrong.success and wrong.rewards[0].value < 1.0
    silent, _ = played(environment, draft, "I do not know.")
    assert components(silent) == {"score": 0.0, "solved": 0.0, "answered": 0.0} and not silent.success
    # An item's grades are the same before and after JSON; they depend only on its seed and place.
    for each in (item, other):
        kept = parse_item(draft_of(each).payload).model_dump()
        for answer in (each["answer"], "xyzzy", f"{each['answer']} "):
            assert graded(dataset, answer, kept) == graded(dataset, answer, each)
    random.seed(name)
    assert item_of(environment._dataset(seed=2), 1) == other


def graded(dataset, answer, item):
    try:
        with redirect_stdout(io.StringIO()):
            return dataset.score_answer(answer, item)
    except Exception as error:  # noqa: BLE001 - graders raise any error on a text that is no answer
        return type(error)


def test_the_list_contains_the_librarys_tasks():
    from reasoning_gym.factory import DATASETS

    assert set(MEMBERS) == set(DATASETS) and len(MEMBERS) == 106
    assert opened("chain_sum").version.startswith("reasoning-gym-0.1.")
    assert {name for name, each in MEMBERS.items() if each.problem} == set(NOT_OFFERED) <= set(DATASETS)
    assert set(DATASETS) >= EXECUTES | SLOW
    assert MEMBERS["chain_sum"].about == "Generates simple arithmetic tasks using only + and - operators"


def test_a_task_that_is_not_offered_has_a_reason():
    for name in NOT_OFFERED:
        with pytest.raises(UnknownEnvironment, match=NOT_OFFERED[name][:20]):
            FAMILY.member(name)
    with pytest.raises(UnknownEnvironment, match="no task 'chain_sums'; is it chain_sum or"):
        FAMILY.member("chain_sums")
    with pytest.raises(UnknownEnvironment, match="no task ''"):
        FAMILY.member("")


def test_graders_that_execute_or_hang_are_hosted():
    hosted = {name for name in OFFERED if FAMILY.member(name).isolation == "process"}
    assert hosted == EXECUTES | SLOW
    for name in ("countdown", "chain_sum"):
        assert opened(name).isolation == FAMILY.member(name).isolation


HOSTILE = (
    "9" * LONGEST_ANSWER,
    "1e999999999",
    "-1E99999999",
    "1/1e99999999",
    "(" * (LONGEST_ANSWER // 2) + ")" * (LONGEST_ANSWER // 2),
    "[" * LONGEST_ANSWER,
    '{"a":' * (LONGEST_ANSWER // 5),
    "1\n" * (LONGEST_ANSWER // 2),
    "A B C " * (LONGEST_ANSWER // 6),
    "\\frac{" * (LONGEST_ANSWER // 6),
    "\x00\u0663\u00b2",
    "9**9**9**9",
    "__import__('os')._exit(1)",
)


@pytest.mark.parametrize("name", [name for name in OFFERED if name not in EXECUTES | SLOW])
def test_a_hostile_answer_is_graded_within_a_second(name):
    environment, _, (item, _) = plain(name)
    draft = draft_of(item)
    for answer in HOSTILE:
        began = time.thread_time()
        score, _ = played(environment, draft, tagged(answer))
        assert time.thread_time() - began < 1.0, f"{name} takes long on {answer[:20]!r}"
        assert not score.fault() and 0 <= score.total <= 1
        assert not score.success or item["answer"] == ""  # for an equation without a solution, any text is right


def test_an_answer_is_graded_up_to_the_length_limit():
    environment = opened("chain_sum")
    draft = item_draft("0" * LONGEST_ANSWER)
    assert played(environment, draft, tagged("0" * LONGEST_ANSWER))[0].success
    score, _ = played(environment, draft, tagged("0" * (LONGEST_ANSWER + 1)))
    assert components(score) == {"score": 0.0, "solved": 0.0, "answered": 1.0}


class Grader:
    def __init__(self, gives):
        self._gives = gives

    def score_answer(self, answer, item):
        if isinstance(self._gives, Exception):
            raise self._gives
        return self._gives


@pytest.mark.parametrize(
    ("gives", "score", "solved"),
    [
        (1, 1.0, 1.0),
        (1.0000000000000002, 1.0, 0.0),
        (-3, 0.0, 0.0),
        (0.25, 0.25, 0.0),
        (float("inf"), 1.0, 0.0),
        (float("nan"), 0.0, 0.0),
        (None, 0.0, 0.0),
        (ValueError("no"), 0.0, 0.0),
        (RecursionError(), 0.0, 0.0),
    ],
)
def test_any_grade_becomes_a_score_of_0_to_1(gives, score, solved):
    environment = opened("chain_sum")
    environment._grader = Grader(gives)
    found, _ = played(environment, drawn(environment, 1)[0], tagged("7"))
    assert components(found) == {"score": score, "solved": solved, "answered": 1.0} and not found.fault()
    assert found.success is bool(solved)


def test_tasks_are_the_same_for_the_same_seed():
    for name in ("chain_sum", "gsm_symbolic", "list_functions", "acre", "pool_matrix"):
        first = drawn(plain(name)[0], ITEMS + 2, seed=3)
        random.seed(name)
        assert drawn(opened(name), ITEMS + 2, seed=3) == first and len(first) == ITEMS + 2
        assert drawn(plain(name)[0], 3, seed=4) != first[:3]
        assert len(drawn(plain(name)[0], 2, seed=2**40)) == 2


@pytest.mark.parametrize("name", ["chain_sum", "lcm", "tower_of_hanoi", "coin_flip"])
def test_no_question_is_in_both_splits(name):
    sides = {split: set() for split in Split}
    for seed in (0, 1, 1_000_000):
        for environment in (opened(name), opened(name, answer="last_line", prompt="Say it.")):
            for draft in drawn(environment, 60, seed):
                side = split_of(draft.asks)
                sides[side].add(
                    played(environment, draft, "")[1][0]["content"].removesuffix("Say it.").split("\n\nG")[0]
                )
    assert all(sides.values()) and not sides[Split.TRAIN] & sides[Split.EVAL]


def test_items_that_cannot_be_made_are_skipped(monkeypatch):
    environment, seeds = opened("chain_sum"), []
    make = environment._dataset

    class Failing:
        def __init__(self, seed):
            seeds.append(seed)
            self.seed, self._items = seed, make(seed)

        def __getitem__(self, place):
            if len(seeds) > 1 or place % 3:
                raise RuntimeError("no path")
            return self._items[place]

    monkeypatch.setattr(environment, "_dataset", Failing)
    stream = environment.tasks(TaskQuery(0))
    got = [next(stream).asks for _ in range(100)]
    assert got == [make(seeds[0])[3 * place]["question"] for place in range(100)]
    with pytest.raises(TaskError, match=r"chain_sum cannot make more items: RuntimeError\('no path'\)"):
        list(islice(stream, PATIENCE))
    assert seeds == [seeds[0] + ITEMS * chunk for chunk in range(len(seeds))] and len(seeds) == 3


@pytest.mark.parametrize(
    ("reader", "reply", "answer"),
    [
        ("tags", "<answer>5</answer>", "5"),
        ("tags", "<answer>4</answer> no, <answer> 5\n</answer> <answer>6", "5"),
        ("tags", "<answer>4 <answer>5</answer>", "5"),
        ("tags", "<answer></answer>", ""),
        ("tags", "5", None),
        ("tags", "</answer>5<answer>", None),
        ("tags", "<answer>" * 100_000, None),
        ("last_number", "7 + 5 = 12.", "12"),
        ("last_number", "12-5", "5"),
        ("last_number", "x = -5, truly", "-5"),
        ("last_number", "x=\u22125", "-5"),
        ("last_number", "it is $1,234,567.50!", "1234567.50"),
        ("last_number", "1, 2, and 3,4567", "4567"),
        ("last_number", "\\boxed{-12}", "-12"),
        ("last_number", "**12**", "12"),
        ("last_number", "none", None),
        ("last_number", "\u0663", None),
        ("last_number", "1," * 100_000, "1"),
        ("last_line", "first\n  last  \n\n", "last"),
        ("last_line", "one", "one"),
        ("last_line", " \n ", None),
    ],
)
def test_how_an_answer_is_read(reader, reply, answer):
    began = time.thread_time()
    assert READERS[reader](reply) == answer
    assert time.thread_time() - began < 1.0


def test_the_prompt_asks_for_the_format_that_is_read():
    draft = drawn(opened("chain_sum"), 1)[0]
    for options, said in (
        ({}, "\n\nGive the final answer between <answer> and </answer>."),
        ({"answer": "last_number"}, ""),
        ({"answer": "last_line"}, "\n\nGive the final answer alone on the last line."),
        ({"answer": "last_number", "prompt": "Be brief."}, "\n\nBe brief."),
        ({"prompt": ""}, ""),
    ):
        _, asked = played(opened("chain_sum", **options), draft, "7")
        assert asked == [{"role": "user", "content": draft.asks + said}]


def test_options_set_the_weights_of_the_reward():
    draft = item_draft("5")
    half = tagged("5 ")  # "5" of "5 5"
    for options, reply, total in (
        ({}, tagged("5"), 1.0),
        ({}, tagged("55"), 0.5),
        ({"score_weight": 0, "solved_weight": 2}, half, 2.0),
        ({"score_weight": 0, "solved_weight": 2}, tagged("55"), 0.0),
        ({"answered_weight": 0.25}, tagged("4"), 0.25),
        ({"answered_weight": 0.25}, "4", 0.0),
        ({"answer": "last_number"}, "2 + 3 = 5", 1.0),
    ):
        assert played(opened("chain_sum", **options), draft, reply)[0].total == total, (options, reply)


def test_a_conversation_is_graded_by_its_last_turn():
    environment = opened("chain_sum")
    (draft,) = drawn(environment, 1)
    right = tagged(parse_item(draft.payload).answer)
    asked, turn, wrong = (
        {"role": r, "content": c} for r, c in (("user", "?"), ("assistant", right), ("assistant", ""))
    )
    assert rescored(environment, draft, asked, wrong, asked, turn).success
    assert not rescored(environment, draft, asked, turn, asked, wrong).success
    assert not rescored(environment, draft, asked).success
    full = asyncio.run(environment.cut_off(task_of(environment, "gym", draft), [asked, turn, asked]))
    assert full.success


def test_options_are_those_of_the_task():
    kind = FAMILY.member("chain_sum")
    assert kind.options_model.model_fields.keys() - ReasoningGymOptions.model_fields.keys() == {
        "min_terms",
        "max_terms",
        "min_digits",
        "max_digits",
        "allow_negation",
    }
    environment = kind.open({"min_terms": "2", "max_terms": "2", "max_digits": 1, "allow_negation": "true"})
    assert (environment.options.max_terms, environment.options.allow_negation) == (2, True)
    assert {parse_item(draft.payload).metadata["num_terms"] for draft in drawn(environment, 20)} == {2}
    assert options_json(environment.options) == '{"allow_negation":true,"max_digits":1,"max_terms":2,"min_terms":2}'


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"min_terms": 9}, "chain_sum: max_terms must be >= min_terms"),
        ({"min_terms": 0}, "min_terms must be positive"),
        ({"terms": 2}, "terms: Extra inputs are not permitted; its options are answer, prompt"),
        ({"seed": 3}, "seed: Extra"),
        ({"size": 3}, "size: Extra"),
        ({"min_terms": "two"}, "min_terms: Input should be a valid integer"),
        ({"min_terms": 2.5}, "min_terms: Input should be a valid integer"),
        ({"answer": "boxed"}, "answer: Input should be 'tags', 'last_number' or 'last_line'"),
        ({"score_weight": -1}, "score_weight: Input should be greater than or equal to 0"),
        ({"score_weight": float("nan")}, "score_weight: Input should be"),
    ],
)
def test_invalid_options_are_refused(given, complaint):
    with pytest.raises(TaskError, match=complaint):
        FAMILY.member("chain_sum").open(given)


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("basic_arithmetic", {"operators": "+,-"}, {"operators": ["+", "-"]}),
        ("basic_arithmetic", {"operators": '["+"]'}, {"operators": ["+"]}),
        ("complex_arithmetic", {"operations_weights": "0.5,0.5,0,0"}, {"operations_weights": [0.5, 0.5, 0.0, 0.0]}),
        ("rearc", {"board_format_opts": '{"alphabet": ["a","b","c","d","e","f","g","h","i","j"]}'}, {}),
        ("word_sorting", {"transformation": "uppercase"}, {"transformation": "uppercase"}),
        ("time_intervals", {"min_date": "1950-01-31"}, {"min_date": "1950-01-31"}),
        ("calendar_arithmetic", {"tasks": "weekday_of_date"}, {"tasks": ["weekday_of_date"]}),
        ("aiw", {"task_types": "siblings", "task_type_weights": "1"}, {"task_types": ["siblings"]}),
        ("codeio", {"difficulty": "6"}, {"difficulty": 6}),
    ],
)
def test_options_from_the_command_line_are_read(name, given, read):
    environment = opened(name, **given)
    told = json.loads(options_json(environment.options))
    assert told.items() >= read.items() and told.keys() == given.keys()
    again = opened(name, **told)
    assert again.options == environment.options and drawn(again, 2) == drawn(environment, 2)


def test_a_list_of_one_number_like_text_is_read():
    assert FAMILY.member("arc_agi").options({"rotations": "90"}).rotations == ["90"]


def test_the_options_of_every_task_have_names_without_conflict():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # pydantic warns of a field that shadows one of its attributes
        task_options.cache_clear()
        for name in OFFERED:
            model = FAMILY.member(name).options_model
            assert not {"seed", "size"} & model.model_fields.keys()
            assert issubclass(model, ReasoningGymOptions) and options_json(model()) == "{}"


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "{",
        "[]",
        "null",
        '{"question": 1, "answer": "a", "metadata": {}}',
        '{"question": "a", "answer": "a"}',
        '{"question": "a", "answer": "a", "metadata": [1]}',
        '{"question": "a", "answer": "a", "metadata": {}, "more": 1}',
        item_draft("5").payload + "x",
        '{"a":' * 100_000,
    ],
)
def test_a_payload_of_another_kind_is_refused(payload):
    environment, draft = opened("chain_sum"), item_draft("5")
    other = replace(task_of(environment, "gym", draft), payload=payload)
    with pytest.raises(TaskError, match="payload is no item of reasoning-gym"):
        asyncio.run(environment.play(other, ScriptedPolicy(["5"], 1)))
    assert played(environment, draft, tagged("5"))[0].success


def test_tuples_and_lists_of_metadata_survive_json():
    metadata = {"a": (1, (2, [3, ()])), "b": [], "c": {"d": None}}
    draft = item_draft(None, metadata)
    assert parse_item(draft.payload).metadata == metadata
