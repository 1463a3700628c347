"""TextArena's games for one player, as `textarena:GAME`: what the game says is a user message, a turn is a move.

What holds: a game is made and goes on from a random state of its own, so that its seed and the moves decide it. A
conversation can therefore be scored again, by playing its moves once more.
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
"""Endings of names that show the same game in another way; here the conversation itself is the history."""
NOT_OFFERED: Mapping[str, str] = {
    "Bandit-v0": "it pays the regret, so that a worse choice earns more",
    "Bandit-v0-hard": "it pays the regret, so that a worse choice earns more",
    "Set-v0": "it counts one card that is named three times as a set",
    "Sokoban-v0-medium": "it takes up to minutes to make a board",
}
UNSEEN = frozenset(("GuessTheNumber", "Mastermind", "Minesweeper"))
"""Games that begin with the same words for every solution: their openings end with the number of the game, so
that tasks differ in what they ask."""
DEFAULTS: Mapping[str, Mapping[str, object]] = {"Countdown": {"numbers": None, "target": None}}
"""In place of TextArena's own, which leave a single game to play."""
KEPT = 64
"""Games at their opening that are kept, since some take seconds to make."""
PATIENCE = 10
"""Games in a row that cannot be made after which drawing fails."""
STOPS = 8
"""Invalid moves after which a game that did not end counts 0."""


class TextArenaOptions(base.EnvironmentOptions):
    """How long a game goes; a game adds its own options."""

    model_config = ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)

    turns: int = Field(default=64, ge=1)
    """Most turns of the policy. A game that goes on is then scored as it scores a player who makes no valid move."""


class TextArenaTask(BaseModel):
    """The parameters of a game, beside the options."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    seed: int = Field(ge=0, lt=2**31)


class TextGame:
    """One game, from its opening to its end."""

    def __init__(self, name: str, settings: Mapping[str, object], seed: int) -> None:
        """Raises what TextArena raises for settings that it cannot play."""
        self._randomness = find.OwnRandomness(seed)
        self.over = self.raised = self.stopped = False
        with self._alone():
            self._game = made_game(name, settings)
            self._game.reset(num_players=1, seed=seed)
            self.opening = self._said()
            """The first message to the player."""
        if kind_of(self._game.entry_point) in UNSEEN:
            self.opening += f"\n\nThis is game {seed}."

    def move(self, text: str) -> str:
        """Make a move, and return what the player reads next; empty when the game is over."""
        try:
            with self._alone():
                self.over, _ = self._game.step(text)
                return "" if self.over else self._said()
        except Exception:  # noqa: BLE001 - a game raises any error on a text that it cannot read
            self.over = self.raised = True
            return ""

    def stop(self) -> None:
        """End the game by invalid moves, after a few of which it says what was reached."""
        self.stopped = not self.over
        for _ in range(STOPS):
            if not self.over:
                self.move("")

    def score(self) -> base.Score:
        """The game's own reward for the player. A game that raised, never ended or gave no number counts 0."""
        rewards, info = self._game.close()
        given = rewards[0] if self.over and not self.raised and rewards else None
        # Some games mix up the reward of an invalid move and its reason.
        reward = float(given) if isinstance(given, int | float) else 0.0
        won = reward >= 1.0 and not info[0]["invalid_move"]
        invalid = info[0]["invalid_move"] and not self.stopped
        metrics = {"invalid_move": invalid, "raised": self.raised, "stopped": self.stopped}
        numbers = {name: float(value) for name, value in metrics.items()}
        return base.Score((RewardComponent("outcome", reward, 1.0),), won, numbers)

    def _said(self) -> str:
        """The messages that the player has not read yet, without those that repeat the player's own moves."""
        _, messages = self._game.get_observation()
        return "\n\n".join(text.strip() for sender, text, _ in messages if sender == -1)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with redirect_stdout(io.StringIO()), self._randomness.applied():  # games print
            yield


class TextArenaEnvironment(base.Environment):
    """One game of TextArena."""

    options: TextArenaOptions

    def __init__(self, options: TextArenaOptions, game: str) -> None:
        """Raises TaskError for options that the game refuses."""
        super().__init__(options)
        self._game = game
        self.version = f"textarena-{version('textarena')}"  # type: ignore[misc]  # of the instance
        own = type(options).model_fields.keys() - TextArenaOptions.model_fields.keys()
        self._settings = {name: getattr(options, name) for name in own}
        self._begun = lru_cache(KEPT)(partial(TextGame, game, self._settings))
        """Games at their opening, by seed: each rollout of a group plays a copy."""
        try:
            made_game(game, self._settings)
        except Exception as error:  # a game refuses settings with errors of any type
            raise base.TaskError(f"textarena:{game}: {error!r}") from error

    def tasks(self, query: base.TaskQuery) -> Iterator[base.TaskDraft]:
        """Games without end. Raises TaskError when they cannot be made with these options."""
        rng, failures = Random(f"textarena {query.seed}"), 0
        while True:
            task = TextArenaTask(seed=rng.getrandbits(31))
            try:
                game = TextGame(self._game, self._settings, task.seed)
            except Exception as error:  # a game fails to make a board with errors of any type
                failures += 1
                if failures == PATIENCE:
                    raise base.TaskError(f"textarena:{self._game} makes no more games: {error!r}") from error
                continue
            failures = 0
            yield base.TaskDraft(task.model_dump_json(), game.opening, self.options.turns)

    async def play(self, task: Task, policy: base.Policy) -> base.Score:
        """Play until the game or the turns are over."""
        game = self._begin(task)
        messages: list[Message] = [{"role": "user", "content": game.opening}]
        for _ in range(task.max_turns):
            reply = await policy.chat(messages)
            said = game.move(reply.content)
            if game.over:
                break
            messages += [reply.message, {"role": "user", "content": said}]
        game.stop()
        return game.score()

    async def rescore(self, task: Task, messages: Sequence[Message]) -> base.Score:
        """Play the moves of a conversation once more."""
        game = self._begin(task)
        for message in messages:
            if message["role"] == "assistant" and not game.over:
                game.move(str(message["content"]))
        game.stop()
        return game.score()

    def _begin(self, task: Task) -> TextGame:
        return copy.deepcopy(self._begun(base.read_payload(TextArenaTask, task.payload, "game of TextArena").seed))


class TextArena(find.EnvironmentAdapter):
    """The games of the installed TextArena."""

    def members(self) -> Iterator[find.EnvironmentListing]:
        """Every game, and why those for several players and those that need more than the package are not offered."""
        for name, spec in sorted(_registry().items()):
            if not name.endswith(VIEWS):
                yield find.EnvironmentListing(
                    name, f"TextArena's {kind_of(spec.entry_point)}", problem_of(name, spec.entry_point)
                )

    def member(self, name: str) -> find.EnvironmentType:
        """The game of a name. Raises UnknownEnvironment, ImportError."""
        registry = _registry()
        entry_point = registry[name].entry_point if name in registry else ""
        known = [each for each in registry if each == name or not each.endswith(VIEWS)]
        problem = problem_of(name, entry_point) if entry_point else ""
        find.check_member("textarena", "TextArena has no game", name, known, problem)
        make, about = partial(TextArenaEnvironment, game=name), f"TextArena's {kind_of(entry_point)}"
        return find.EnvironmentType(f"textarena:{name}", about, game_options(name), "process", False, make)


def kind_of(entry_point: str) -> str:
    """The folder of a game."""
    return entry_point.split(".")[2]


def problem_of(name: str, entry_point: str) -> str:
    """Why a game is not offered; empty when it is. The game is not imported: some reach for the network then."""
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
    """The options of a game: the parameters of its class, with the defaults of its name."""
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
    """The game before it begins, with the wrappers that complete a move. Raises what TextArena raises."""
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
