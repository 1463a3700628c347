"""`tidemill demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidemill.compose.config import Act, TidemillSettings
from tidemill.compose.options import BootstrapOption, ConfigOption, SetOption, given, key_values, settings_from
from tidemill.compose.output import as_json_text
from tidemill.schemas.config import EnvironmentEntry

RECIPES = {path.stem: path for path in sorted(Path(__file__).with_name("recipes").glob("*.toml"))}
"""Settings of demonstrations, by name."""
DEFAULT_RECIPE = "ledger"


def demo(
    recipe: Annotated[
        str, typer.Option(help=f"Settings to start from: {', '.join(RECIPES)}.", metavar="NAME")
    ] = DEFAULT_RECIPE,
    environment: Annotated[
        str | None, typer.Option(help="Environment to learn, instead of the recipe's (`tidemill env list`).")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="An option of the environment; may be repeated."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the model, the tasks and the sampling.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model to start from: a directory, smollm2, or a name on the hub. Default: the recipe's."),
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="vLLM replicas.")] = None,
    sync: Annotated[bool | None, typer.Option("--sync/--async", help="Issue only one step's tasks at a time.")] = None,
    act: Annotated[
        Act | None, typer.Option(help="one: learn in simulation; two: learn from users; default: both.")
    ] = None,
    shuffle_rewards: Annotated[
        bool | None, typer.Option("--shuffle-rewards", help="Control run: rewards permuted within each group.")
    ] = None,
    shuffle_thumbs: Annotated[
        bool | None, typer.Option("--shuffle-thumbs", help="Control run: users' votes are exchanged between answers.")
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the summary as JSON.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where demonstrations keep their data.")] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    bootstrap: BootstrapOption = None,
) -> None:
    """Run the whole loop: Kafka, rollouts, groups, steps, versions, a vLLM replica. You see the model improve.

    The recipe `ledger` trains a tiny model with random initial weights. Then simulated users come: with a stable and a
    canary replica behind a router, feedback, online batches and the gate, the model learns a preference of the users
    that the simulated reward does not measure. The recipe `smollm2` takes a pre-trained model and a task of
    reasoning-gym.

    Examples: `tidemill demo --seed 1 --json summary.json`, `tidemill demo --recipe smollm2 --environment
    reasoning_gym:gcd --option max_value=30 --steps 20`
    """
    if recipe not in RECIPES:
        raise typer.BadParameter(f"there is no recipe {recipe!r}: there are {', '.join(RECIPES)}")
    flags = given(
        run__seed=seed,
        run__max_steps=steps,
        demo__model=model,
        demo__replicas=replicas,
        demo__data_dir=data_dir,
        demo__act=act,
        users__shuffle_thumbs=shuffle_thumbs,
        feed__sync=sync,
        stream__shuffle_rewards=shuffle_rewards,
    )
    options = {"config": config or RECIPES[recipe], "assignments": assignments, "bootstrap": bootstrap}
    settings = settings_from(options, flags)
    if environment is not None or option:
        settings = with_environment(settings, environment, key_values(option or []))
    check_environments(settings)
    from tidemill.compose.demo.runner import run_demo

    summary = run_demo(settings, Console())
    if as_json is not None:
        as_json.write_text(as_json_text(summary) + "\n", "utf-8")
    if not summary["audit_sound"]:
        raise typer.Exit(1)


def with_environment(settings: TidemillSettings, name: str | None, options: dict[str, str]) -> TidemillSettings:
    """Return the settings with one environment in place of their own, or with other options of their environment.

    A new environment gets those of the recipe's options (`demo.options`) that it knows. Raises UnknownEnvironment,
    TaskError.
    """
    from tidemill.producers.environments.find import environment_type

    entry = settings.run.environments[0]
    given_options = {**entry.options, **options}
    if name is not None:
        known = environment_type(name).options_model.model_fields
        shared = {key: value for key, value in settings.demo.options.items() if key in known}
        entry, given_options = EnvironmentEntry(name=name), {**shared, **options}
    changed = entry.model_copy(update={"options": given_options})
    return settings.model_copy(update={"run": settings.run.model_copy(update={"environments": [changed]})})


def check_environments(settings: TidemillSettings) -> None:
    """Refuse an environment that is not installed, or wrong options, before any process starts.

    Only its roles import a `package.module:object`. Raises UnknownEnvironment, TaskError.
    """
    from tidemill.producers.environments.find import environment_type, is_foreign

    for entry in settings.run.environments:
        if not is_foreign(entry.name):
            environment_type(entry.name).options(entry.options)
