"""TextArena's games: each offered game can be played to its end, alone or with others, with a repeatable result."""

import asyncio
import random
import subprocess
import sys
from dataclasses import replace
from itertools import islice

import pytest

from tidemill.producers.environments.base import Reply, Split, TaskError, TaskQuery, split_of
from tidemill.producers.environments.check import ScriptedPolicy, task_of
from tidemill.producers.environments.find import UnknownEnvironment
from tidemill.producers.environments.textarena import NOT_OFFERED, PATIENCE, TextArena, TextGame, problem_of

FAMILY = TextArena()
MEMBERS = {each.name: each for each in FAMILY.members()}
OFFERED = sorted(name for name, each in MEMBERS.items() if not each.problem)
SLOW = {"RushHour-v0": {"difficulty": "easy"}, "Sudoku-v0-hard": {"clues": 40}}
"""Games that take seconds to make, with options that make them faster."""
ONE_GAME = ("Cryptarithm-v0", "PegJump-v0", "TowerOfHanoi-v0")
"""Games, or their beginnings, that are the same for every seed."""
GUESSES = ["[up]", "[right]", "[1 1]", "[2 2 2]", "[A C]", "[1]", "[Stand]", "[accept]", "[A+]", "[1 2 +]", "[h 0 0]"]


def opened(name, **options):
    return FAMILY.member(name).open({**SLOW.get(name, {}), **options})


def drawn(environment, count=1, seed=0):
    return list(islice(environment.tasks(TaskQuery(seed)), count))


def played(environment, draft, policy):
    return asyncio.run(environment.play(task_of(environment, "game", draft), policy))


def rescored(environment, draft, messages):
    return asyncio.run(environment.rescore(task_of(environment, "game", draft), messages))


class Mover:
    """A policy that answers by a function of the conversation, and lets other episodes run before it answers."""

    def __init__(self, move):
        self._move, self.conversation = move, []

    async def chat(self, messages, *, tools=(), max_tokens=None):
        await asyncio.sleep(0)
        random.seed()  # as any other library may
        message = {"role": "assistant", "content": self._move(messages)}
        self.conversation = [*messages, message]
        return Reply(message, "stop")


def guesser(seed):
    rng = random.Random(seed)
    return Mover(lambda messages: rng.choice(GUESSES))


@pytest.mark.parametrize("name", OFFERED)
def test_every_offered_game_plays_to_an_end_and_again(name):
    environment = opened(name)
    (draft,) = drawn(environment)
    assert drawn(environment) == [draft]
    first, again = guesser(7), guesser(7)
    score = played(environment, draft, first)
    assert not score.fault() and -1 <= score.total <= 20 and [part.name for part in score.rewards] == ["outcome"]
    assert draft.asks == first.conversation[0]["content"]
    assert [message["role"] for message in first.conversation[:3]] in (
        ["user", "assistant"],
        ["user", "assistant", "user"],
    )
    assert all(message["content"] for message in first.conversation)
    assert played(environment, draft, again) == score and again.conversation == first.conversation
    assert rescored(environment, draft, first.conversation) == score


def test_concurrent_games_have_the_same_results_as_single_ones():
    names = ("2048-v0-ultra-easy", "Minesweeper-v0-small", "Blackjack-v0", "FrozenLake-v0-random", "Mastermind-v0")
    plays = [(environment, draft) for environment in map(opened, names) for draft in drawn(environment, 4)]

    async def together():
        policies = [guesser(place) for place in range(len(plays))]
        playing = [e.play(task_of(e, "game", d), p) for (e, d), p in zip(plays, policies, strict=True)]
        return await asyncio.gather(*playing), [policy.conversation for policy in policies]

    scores, conversations = asyncio.run(together())
    for place, (environment, draft) in enumerate(plays):
        alone = guesser(place)
        assert played(environment, draft, alone) == scores[place] and alone.conversation == conversations[place]
    assert len({score.total for score in scores}) > 3


def test_a_game_does_not_change_the_global_random_generator():
    random.seed(5)
    before = random.getstate()
    environment = opened("2048-v0")
    draft = drawn(environment)[0]
    played(environment, draft, ScriptedPolicy(["[up]", "[left]"], 64))
    assert random.getstate() == before


def inner(environment, draft):
    game = environment._begin(task_of(environment, "game", draft))._game
    while hasattr(game, "env"):
        game = game.env
    return game


def by_bisection(_game):
    def move(messages):
        low, high = 1, 20
        for said, answer in zip(messages[1::2], messages[2::2], strict=True):
            tried = int(said["content"].strip("[]"))
            low, high = (tried + 1, high) if "higher" in answer["content"] else (low, tried - 1)
        return f"[{(low + high) // 2}]"

    return move


def by_towers(_game):
    def moves(count, source, target, spare):
        if count:
            yield from moves(count - 1, source, spare, target)
            yield f"[{source} {target}]"
            yield from moves(count - 1, spare, target, source)

    return in_turn(moves(3, "A", "C", "B"))


def by_filling(game):
    cells = [(row, column) for row in range(9) for column in range(9) if not game.game_board[row][column]]
    return in_turn(f"[{row + 1} {column + 1} {game.full_grid[row][column]}]" for row, column in cells)


def by_spelling(game):
    rows = enumerate(game.state.game_state["solution"])
    return in_turn(f"[{r} {c} {letter}]" for r, row in rows for c, letter in enumerate(row) if letter != ".")


def by_waiting(game):
    draws = game.state.game_state["draws"]
    return in_turn([*["[continue]"] * draws.index(max(draws)), "[accept]"])


def by_code(game):
    return in_turn(["[" + " ".join(map(str, game.state.game_state["secret_code"])) + "]"])


def by_letters(_game):
    return in_turn(f"[{letter} {digit}]" for letter, digit in zip("SENDMORY", "95671082", strict=True))


def in_turn(moves):
    moves = iter(list(moves))
    return lambda messages: next(moves)


SOLVERS = {
    "GuessTheNumber-v0": by_bisection,
    "TowerOfHanoi-v0": by_towers,
    "Sudoku-v0": by_filling,
    "Crosswords-v0": by_spelling,
    "Secretary-v0": by_waiting,
    "Mastermind-v0": by_code,
    "Cryptarithm-v0": by_letters,
}


@pytest.mark.parametrize("name", SOLVERS)
def test_a_game_that_is_won_is_a_success(name):
    environment = opened(name)
    for draft in drawn(environment, 3):
        policy = Mover(SOLVERS[name](inner(environment, draft)))
        score = played(environment, draft, policy)
        assert score.total == 1.0 and score.success is True
        assert score.metrics == {"invalid_move": 0.0, "raised": 0.0, "stopped": 0.0}
        lost = rescored(environment, draft, policy.conversation[:-1])
        assert lost.success is False and lost.total < 1.0 and lost.metrics["stopped"] == 1.0


def test_moves_without_brackets_are_completed():
    environment = opened("GuessTheNumber-v0")
    (draft,) = drawn(environment)
    secret = inner(environment, draft).state.game_state["game_number"]
    assert played(environment, draft, ScriptedPolicy([str(secret)], 64)).success


@pytest.mark.parametrize(
    "text", ["", "[" + "9" * 5_000 + "]", "x" * 100_000, "[" * 5_000, "\x00", "[²]", "[1 " + "9" * 5_000 + "]", "[]]"]
)
def test_a_hostile_move_loses(text):
    for name in ("GuessTheNumber-v0", "Minesweeper-v0", "LightsOut-v0", "2048-v0", "Countdown-v0", "Mastermind-v0"):
        environment = opened(name)
        (draft,) = drawn(environment)
        policy = ScriptedPolicy([text], 64)
        score = played(environment, draft, policy)
        assert not score.fault() and score.success is False and score.total < 1.0
        assert 1.0 in (score.metrics["invalid_move"], score.metrics["raised"]) and len(policy.requests) <= 2
    assert played(opened("Blackjack-v0"), drawn(opened("Blackjack-v0"))[0], guesser(1)).metrics["raised"] == 0.0


def test_a_move_on_which_the_game_raises_scores_0():
    environment = opened("GuessTheNumber-v0")
    (draft,) = drawn(environment)
    wrong = inner(environment, draft).state.game_state["game_number"] % 20 + 1
    score = played(environment, draft, ScriptedPolicy([f"[{wrong}]", "[" + "9" * 5_000 + "]"], 64))
    assert score.total == 0.0 and score.metrics["raised"] == 1.0


def test_turns_are_bounded_and_progress_is_scored():
    environment = opened("2048-v0-ultra-easy", turns=5)
    (draft,) = drawn(environment)
    policy = ScriptedPolicy(["[up]", "[left]", "[down]", "[right]"] * 2, 64)
    score = played(environment, draft, policy)
    assert draft.max_turns == len(policy.requests) == 5
    assert 0 < score.total < 1 and score.metrics == {"invalid_move": 0.0, "raised": 0.0, "stopped": 1.0}


def test_a_game_that_never_ends_scores_0():
    game = TextGame("2048-v0", {"target_tile": 2048, "board_size": 4}, 1)
    game._game = Endless(game._game.entry_point)
    game.stop()
    assert game.score().total == 0.0 and not game.over and not game.score().fault()


class Endless:
    def __init__(self, entry_point):
        self.entry_point = entry_point

    def step(self, text):
        return False, {}

    def get_observation(self):
        return 0, []

    def close(self):
        return None, {0: {"invalid_move": False}}


def test_no_opening_is_in_both_splits():
    for name in ("Sudoku-v0", "FrozenLake-v0", "Blackjack-v0", "GuessTheNumber-v0", "Mastermind-v0", "Minesweeper-v0"):
        sides, environment = {split: set() for split in Split}, opened(name)
        for seed in (0, 1):
            for draft in drawn(environment, 40, seed):
                policy = ScriptedPolicy([""], 64)
                played(environment, draft, policy)
                sides[split_of(draft.asks)].add(policy.conversation[0]["content"])
        assert all(sides.values()) and not sides[Split.TRAIN] & sides[Split.EVAL], name


def test_tasks_have_different_questions_unless_there_is_only_one_game():
    for name in ("Sudoku-v0", "Countdown-v0", "Minesweeper-v0", "Mastermind-v0", "GuessTheNumber-v0"):
        assert len({draft.asks for draft in drawn(opened(name), 30)}) == 30
    for name in ONE_GAME:
        assert len({draft.asks for draft in drawn(opened(name), 10)}) == 1
    assert drawn(opened("Mastermind-v0"))[0].asks.endswith("\n\nThis is game 295702312.")
    drafts, environment = drawn(opened("GuessTheNumber-v0"), 200), opened("GuessTheNumber-v0")
    assert {inner(environment, draft).state.game_state["game_number"] for draft in drafts} == set(range(1, 21))


def test_the_list_names_every_game_and_why_some_are_not_offered():
    assert len(OFFERED) == 53 and len(MEMBERS) == 238
    problems = {name: each.problem for name, each in MEMBERS.items()}
    assert problems["Chess-v0"] == "it is for several players"
    assert problems["Wordle-v0"] == "it downloads word lists when it starts"
    assert problems["TwentyQuestions-v0"] == "another model plays along, by an online service"
    assert (
        problems["Klondike-v0"].startswith("its module does not compile on this Python: ")
        or not problems["Klondike-v0"]
    )
    assert problems["UsedCar-v0-balanced"] == "the package lacks its module textarena.envs.UsedCar.env"
    assert (
        problem_of("2048-v0-train", "textarena.envs.Game2048.env:Game2048Env") == "it is 2048-v0, shown in another way"
    )
    for name in ("Chess-v0", "2048-v0-raw", *NOT_OFFERED):
        with pytest.raises(UnknownEnvironment, match=f"textarena:{name} is not offered: it "):
            FAMILY.member(name)
    with pytest.raises(UnknownEnvironment, match="no game 'Sudoku-v9'; is it Sudoku-v0"):
        FAMILY.member("Sudoku-v9")
    assert all(FAMILY.member(name).isolation == "process" for name in OFFERED)
    script = "import sys, tidemill.producers.environments.textarena; assert 'textarena' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_options_are_those_of_the_game():
    environment = opened("Minesweeper-v0", rows="4", cols=5, num_mines="3", max_turns="7", turns="9")
    (draft,) = drawn(environment)
    assert draft.max_turns == 9 and draft.asks.count(" .") == 20
    assert opened("Countdown-v0", numbers="1,2,3,4,5,6", target=100).options.numbers == [1, 2, 3, 4, 5, 6]
    assert "TARGET: 100" in drawn(opened("Countdown-v0", numbers=[1, 2, 3, 4], target=100))[0].asks


@pytest.mark.parametrize(
    ("name", "given", "complaint"),
    [
        ("Minesweeper-v0", {"mines": 3}, "mines: Extra inputs are not permitted; its options are turns, rows"),
        ("Minesweeper-v0", {"rows": "many"}, "rows: Input should be a valid integer"),
        ("Minesweeper-v0", {"turns": 0}, "turns: Input should be greater than or equal to 1"),
        ("Minesweeper-v0", {"seed": 3}, "seed: Extra"),
        ("PegJump-v0", {"initial_empty": 99}, "initial_empty must be 1-15"),
        ("Cryptarithm-v0", {"equation": "no sum"}, "textarena:Cryptarithm-v0: ValueError"),
    ],
)
def test_invalid_options_are_refused(name, given, complaint):
    with pytest.raises(TaskError, match=complaint):
        opened(name, **given)


def test_games_that_cannot_be_made_are_refused():
    environment = opened("GuessTheNumber-v0", min_number=9, max_number=3)
    with pytest.raises(TaskError, match="GuessTheNumber-v0 cannot make more games: ValueError"):
        drawn(environment)
    assert PATIENCE > 1


@pytest.mark.parametrize("payload", ["", "{", "{}", '{"seed": -1}', '{"seed": "1"}', '{"seed": 1, "more": 2}', "[1]"])
def test_a_payload_of_another_kind_is_refused(payload):
    environment = opened("PegJump-v0")
    (draft,) = drawn(environment)
    other = replace(task_of(environment, "game", draft), payload=payload)
    with pytest.raises(TaskError, match="payload is no game of TextArena"):
        asyncio.run(environment.play(other, ScriptedPolicy([""], 2)))
    assert not played(environment, draft, ScriptedPolicy([""], 2)).fault()


def test_a_full_context_is_scored_by_playing_the_moves_again():
    environment = opened("2048-v0-ultra-easy")
    (draft,) = drawn(environment)
    policy = ScriptedPolicy(["[up]", "[left]"] * 3, 64)
    played(environment, draft, policy)
    task = task_of(environment, "game", draft)
    score = asyncio.run(environment.cut_off(task, policy.conversation))
    assert score == rescored(environment, draft, policy.conversation) and 0 < score.total < 1
