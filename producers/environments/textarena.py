"""TextArena's games for one player, as `textarena:GAME`: the game's text is a user message, a turn is a move.

Invariant: a game is made and played with its own random state, so that its seed and the moves determine it. A
conversation can therefore be scored again, by playing its moves again.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, Optional, get_type_hints

from pydantic import BaseModel, ConfigDict, Field

from tidemill.producers.environments import base, find
from tidemill.schemas.chat.messages import Message
from tidemill.schemas.records import RewardComponent, Task

VIEWS = ("-raw", "-train")
"""Endings of names that show the same game in another form; here the conversation itself is the history."""
NOT_OFFERED: Mapping[str, str] = {
    "Bandit-v0": "it pays the regret, so that a worse choice earns more",
    "Bandit-v0-hard": "it pays the regret, so that a worse choice earns more",
    "Set-v0": "it counts one card that is named three times as a set",
    "Sokoban-v0-medium": "it can take minutes to make a board",
}
UNSEEN = frozenset(("GuessTheNumber", "Mastermind", "Minesweeper"))
"""Games whose first text is equal for every solution: the number of the game is added to their openings, so that
tasks have different questions."""
DEFAULTS: Mapping[str, Mapping[str, object]] = {"Countdown": {"numbers": None, "target": None}}
"""Replacements for TextArena's own defaults, with which there is only one game."""
KEPT = 64
"""Number of games at their opening that are cached, since some take seconds to make."""
PATIENCE = 10
"""Consecutive games that cannot be made after which drawing fails."""
STOPS = 8
"""Number of invalid moves after which a game that did not end scores 0."""


class TextArenaOptions(base.EnvironmentOptions):
    """Limit on the length of a game; a game adds its own options."""

    model_config = ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)

    turns: int = Field(default=64, ge=1)
    """Most turns of the policy. A game that has not ended then is scored as for a player who makes no valid move."""


class TextArenaTask(BaseModel):
    """The parameters of a game, in addition to the options."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    seed: int = Field(ge=0, lt=2**31)


class TextGame:
    """One game, from its opening to its end."""

    def __init__(self, name: str, settings: Mapping[str, object], seed: int) -> None:
        """Make the game and its opening. Raises the errors of TextArena for invalid settings."""
        self._randomness = find.OwnRandomness(seed)
        self.over = self.raised = self.stopped = False
        with self._alone():
            self._game = made_game(name, settings)
            self._game.reset(num_players=1, seed=seed)
            self.opening = self._new_text()
            """The first message to the player."""
        if kind_of(self._game.entry_point) in UNSEEN:
            self.opening += f"\n\nThis is game {seed}."

    def move(self, text: str) -> str:
        """Make a move, and return the next text for the player; empty if the game is over."""
        try:
            with self._alone():
                self.over, _ = self._game.step(text)
                return "" if self.over else self._new_text()
        except Exception:  # noqa: BLE001 - a game raises any error on a text that it cannot read
            self.over = self.raised = True
            return ""

    def stop(self) -> None:
        """End the game with invalid moves: after a few of them the game gives the reward reached."""
        self.stopped = not self.over
        for _ in range(STOPS):
            if not self.over:
                self.move("")

    def score(self) -> base.Score:
        """Return the game's own reward for the player. A game that raised, never ended or gave no number scores 0."""
        rewards, info = self._game.close()
        given = rewards[0] if self.over and not self.raised and rewards else None
        # Some games swap the reward of an invalid move and its reason.
        reward = float(given) if isinstance(given, int | float) else 0.0
        won = reward >= 1.0 and not info[0]["invalid_move"]
        invalid = info[0]["invalid_move"] and not self.stopped
        metrics = {"invalid_move": invalid, "raised": self.raised, "stopped": self.stopped}
        numbers = {name: float(value) for name, value in metrics.items()}
        return base.Score((RewardComponent("outcome", reward, 1.0),), won, numbers)

    def _new_text(self) -> str:
        """Return the messages that the player has not read yet, without repetitions of the player's own moves."""
        _, messages = self._game.get_observation()
        return "\n\n".join(text.strip() for sender, text, _ in messages if sender == -1)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with redirect_stdout(io.StringIO()), self._randomness.applied():  # games print
            yield


class TextArenaEnvironment(base.Environment):
    options: TextArenaOptions

    def __init__(self, options: TextArenaOptions, game: str) -> None:
        """Check the options. Raises TaskError for options that the game does not accept."""
        super().__init__(options)
        self._game = game
        self.version = f"textarena-{version('textarena')}"  # type: ignore[misc]  # of the instance
        own = type(options).model_fields.keys() - TextArenaOptions.model_fields.keys()
        self._settings = {name: getattr(options, name) for name in own}
        self._opened = lru_cache(KEPT)(partial(TextGame, game, self._settings))
        """Games at their opening, by seed: each rollout of a group plays a copy."""
        try:
            made_game(game, self._settings)
        except Exception as error:  # a game refuses settings with errors of any type
            raise base.TaskError(f"textarena:{game}: {error!r}") from error

    def tasks(self, query: base.TaskQuery) -> Iterator[base.TaskDraft]:
        """Yield games without end. Raises TaskError if games cannot be made with these options."""
        rng, failures = Random(f"textarena {query.seed}"), 0
        while True:
            task = TextArenaTask(seed=rng.getrandbits(31))
            try:
                game = TextGame(self._game, self._settings, task.seed)
            except Exception as error:  # a game fails to make a board with errors of any type
                failures += 1
                if failures == PATIENCE:
                    raise base.TaskError(f"textarena:{self._game} cannot make more games: {error!r}") from error
                continue
            failures = 0
            yield base.TaskDraft(task.model_dump_json(), game.opening, self.options.turns)

    async def play(self, task: Task, policy: base.Policy) -> base.Score:
        """Play until the game is over, or the turns are used up."""
        game = self._begin(task)
        messages: list[Message] = [{"role": "user", "content": game.opening}]
        for _ in range(task.max_turns):
            reply = await policy.chat(messages)
            answer = game.move(reply.content)
            if game.over:
                break
            messages += [reply.message, {"role": "user", "content": answer}]
        game.stop()
        return game.score()

    async def rescore(self, task: Task, messages: Sequence[Message]) -> base.Score:
        """Play the moves of a conversation again, and score the game."""
        game = self._begin(task)
        for message in messages:
            if message["role"] == "assistant" and not game.over:
                game.move(str(message["content"]))
        game.stop()
        return game.score()

    def _begin(self, task: Task) -> TextGame:
        return copy.deepcopy(self._opened(base.read_payload(TextArenaTask, task.payload, "game of TextArena").seed))


class TextArena(find.EnvironmentAdapter):
    """Adapter for the games of the installed TextArena."""

    def members(self) -> Iterator[find.EnvironmentListing]:
        """Yield every game, with the reason if it is not offered (several players, or needs more than the package)."""
        for name, spec in sorted(_registry().items()):
            if not name.endswith(VIEWS):
                yield find.EnvironmentListing(
                    name, f"TextArena's {kind_of(spec.entry_point)}", problem_of(name, spec.entry_point)
                )

    def member(self, name: str) -> find.EnvironmentType:
        """Return the game of a name. Raises UnknownEnvironment, ImportError."""
        registry = _registry()
        entry_point = registry[name].entry_point if name in registry else ""
        known = [each for each in registry if each == name or not each.endswith(VIEWS)]
        problem = problem_of(name, entry_point) if entry_point else ""
        find.check_member("textarena", "TextArena has no game", name, known, problem)
        make, about = partial(TextArenaEnvironment, game=name), f"TextArena's {kind_of(entry_point)}"
        return find.EnvironmentType(f"textarena:{name}", about, game_options(name), "process", False, make)


def kind_of(entry_point: str) -> str:
    """Return the folder name of a game, which is its kind."""
    return entry_point.split(".")[2]


def problem_of(name: str, entry_point: str) -> str:
    """Return why a game is not offered; empty if it is. Does not import the game: some then use the network."""
    if name.endswith(VIEWS):
        return f"it is {name.rpartition('-')[0]}, shown in another way"
    if name in NOT_OFFERED:
        return NOT_OFFERED[name]
    module = entry_point.partition(":")[0]
    import textarena

    path = Path(textarena.__path__[0], *module.split(".")[1:]).with_suffix(".py")
    if not path.is_file():
        return f"the package lacks its module {module}"
    source = path.read_text(encoding="utf-8")
    if "SinglePlayerState(" not in source:
        return "it is for several players"
    try:
        compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"its module does not compile on this Python: {error.msg}"
    if "nltk" in source:
        return "it downloads word lists when it starts"
    return "another model plays along, by an online service" if "OpenRouter" in source else ""


def game_options(name: str) -> type[TextArenaOptions]:
    """Return the options model of a game: the parameters of its class, with the defaults of its name."""
    spec = _registry()[name]
    module, _, kind = spec.entry_point.partition(":")
    make = getattr(importlib.import_module(module), kind).__init__
    hints, settings = get_type_hints(make), {}
    given = {**spec.kwargs, **DEFAULTS.get(kind_of(spec.entry_point), {})}
    for each in list(inspect.signature(make).parameters.values())[1:]:
        if each.name != "seed":
            default = given.get(each.name, each.default)
            hint = hints.get(each.name, Any)
            settings[each.name] = (Optional[hint] if default is None else hint, default)  # noqa: UP045 - a run-time type
    return find.options_model(f"{kind_of(spec.entry_point)}Options", TextArenaOptions, settings)


def made_game(name: str, settings: Mapping[str, object]) -> Any:  # noqa: ANN401 - the library has no types
    """Make the game, with the wrappers that complete a move, before its start. Raises the errors of TextArena."""
    import textarena
    from textarena.core import ActionWrapper

    game = textarena.make(f"{name}-raw", **settings)
    for wrapper in _registry()[name].default_wrappers or ():
        if issubclass(wrapper, ActionWrapper):
            game = wrapper(game)
    return game


def _registry() -> Mapping[str, Any]:
    from textarena.envs.registration import ENV_REGISTRY

    registry: Mapping[str, Any] = ENV_REGISTRY
    return registry
