"""`tidemill demo`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidemill.compose.demo.config import Act
from tidemill.compose.demo.summary import Summary
from tidemill.compose.options import BootstrapOption, ConfigOption, SetOption, given, settings_from

RECIPE = Path(__file__).with_name("recipe.toml")
"""The settings of the demonstration where no --config is given."""


def demo(
    seed: Annotated[int | None, typer.Option(help="Seed of the model, the tasks and the sampling.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face causal model to start from; default: one made from nothing."),
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="vLLM replicas.")] = None,
    sync: Annotated[bool | None, typer.Option("--sync/--async", help="One step's tasks at a time.")] = None,
    act: Annotated[
        Act | None, typer.Option(help="one: learn in simulation; two: learn from users; default: both.")
    ] = None,
    shuffle_rewards: Annotated[
        bool | None, typer.Option("--shuffle-rewards", help="Control run: rewards permuted within each group.")
    ] = None,
    shuffle_thumbs: Annotated[
        bool | None, typer.Option("--shuffle-thumbs", help="Control run: users' votes change places.")
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the summary as JSON.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where demonstrations keep their data.")] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    bootstrap: BootstrapOption = None,
) -> None:
    """Run the whole loop: Kafka, a tiny model made from nothing, rollouts, groups, steps, versions, a vLLM replica.

    Then users arrive: a stable and a canary replica behind a router, feedback, online batches, the gate; and the model
    learns what they like, which no simulated reward asks for.

    Example: `tidemill demo --seed 1 --json summary.json`
    """
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
    options = {"config": config or RECIPE, "assignments": assignments, "bootstrap": bootstrap}
    settings = settings_from(options, flags)
    from tidemill.compose.demo.runner import run_demo

    summary = run_demo(settings, Console())
    if as_json is not None:
        as_json.write_text(json.dumps(as_dict(summary), indent=2) + "\n", "utf-8")


def as_dict(summary: Summary) -> dict[str, object]:
    """The summary as JSON values."""
    document = {**asdict(summary), "data_dir": str(summary.data_dir)}
    online = document.pop("online")
    return {**document, **(online or {})}
