"""`tidemill demo`: starts the stack and each role as its own process, follows the log, and stops all of them.

The command is an operator, not a participant: it starts and stops processes and reads the log. No data that the loop
needs passes through it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tidemill.compose.config import Act, TidemillSettings
from tidemill.compose.demo.acts import MAY_END, REFRESH_S, WATCHED, DemoStage, last_line, play_one, play_two
from tidemill.compose.demo.plan import CANARY, STABLE, DemoPlan
from tidemill.compose.demo.state import LoopState, OnlineState
from tidemill.compose.demo.summary import Summary, summarise
from tidemill.compose.demo.view import closing
from tidemill.compose.models_command import DIRECTORY, fetch
from tidemill.compose.options import (
    BootstrapOption,
    ConfigOption,
    SetOption,
    given,
    key_values,
    settings_from,
    with_address,
)
from tidemill.compose.output import as_json_text, spinner
from tidemill.compose.processes import ChildGuard, Supervisor
from tidemill.compose.stack.kafka import LocalStack, require_tools
from tidemill.producers.environments.find import environment_type, is_foreign
from tidemill.schemas.chat.format import load_chat_format
from tidemill.schemas.clock import to_us
from tidemill.schemas.config import EnvironmentEntry
from tidemill.schemas.log.admin import create_topics, wait_for_broker
from tidemill.schemas.log.reader import LogReader

if TYPE_CHECKING:
    from tidemill.consumers.operate.audit.audit import AuditReport

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
    seed: Annotated[int | None, typer.Option(help="Seed of the first model and the tasks; sampling has none.")] = None,
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
    if as_json is not None and not as_json.parent.is_dir():
        raise typer.BadParameter(f"--json {as_json}: there is no directory {as_json.parent}")
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
    for entry in settings.run.environments:
        if not is_foreign(entry.name):
            environment_type(entry.name).options(entry.options)


QUERIES = {
    Act.ONE: ("held_out_by_version", "policy_lag_histogram", "accounting"),
    Act.TWO: ("online_accounting", "feedback_to_served", "gate"),
}
"""The named queries to suggest after an act."""


def run_demo(settings: TidemillSettings, console: Console) -> Summary:
    """Run the loop to its end and return its results.

    Raises RuntimeError, StackError, and as `load_chat_format` for a model without a usable chat template.
    """
    if not settings.kafka.bootstrap:
        require_tools(settings.stack)
    began = time.monotonic()
    if settings.demo.model:
        directory = fetch(settings.demo.model, DIRECTORY, console)
        load_chat_format(str(directory), settings.chat)  # before any role starts, and ends for this reason
        settings = settings.model_copy(update={"demo": settings.demo.model_copy(update={"model": str(directory)})})
    # The broker is detached from this process, so that an exit without unwinding would leave it running.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    plan = DemoPlan.of(settings)
    with ChildGuard(plan.stack_directory) as guard, _log(settings, plan, console) as located:
        plan = plan.with_log_of(located)
        with Supervisor(
            plan.log_directory,
            plan.role_environment(),
            restarted=partial(console.print, style="yellow", highlight=False, soft_wrap=True),
            started=guard.watch,
        ) as supervisor:
            try:
                summary = _run(plan, supervisor, console, began)
            except (KeyboardInterrupt, SystemExit):
                console.print("stopping the roles, which may take half a minute", style="yellow")
                raise
    names = [name for act in plan.acts for name in QUERIES[act]]
    queries = [f"tidemill query {name} --data-dir {plan.sink_directory}" for name in names]
    queries.append(f"tidemill view {plan.directory}")
    console.print(closing(summary, queries))
    return summary


@contextlib.contextmanager
def _log(settings: TidemillSettings, plan: DemoPlan, console: Console) -> Iterator[TidemillSettings]:
    """Yield settings with a reachable log: the configured one, or a local stack for the time of the demonstration."""
    if settings.kafka.bootstrap:
        wait_for_broker(settings.kafka)
        yield settings
        return
    stack = LocalStack(settings.stack.model_copy(update={"data_dir": plan.stack_directory}))
    try:
        with spinner(console, "starting Apache Kafka") as say:
            address = stack.up(say).bootstrap
        yield settings.model_copy(update={"kafka": with_address(settings.kafka, address)})
    finally:
        stack.down()


def _run(plan: DemoPlan, supervisor: Supervisor, console: Console, began: float) -> Summary:
    settings, run = plan.settings, plan.settings.run
    create_topics(settings.kafka)
    plan.write_config()
    supervisor.start("sink", plan.arguments("sink"))
    supervisor.start("view", plan.arguments("view"))
    console.print(f"watch it in a browser: {plan.view_address}", highlight=False)
    midtraining = (
        ("documents", "writing documents", ["documents"]),
        ("midtrain", "mid-training a tiny model from nothing", ["train", "--phase", "midtrain"]),
    )
    for name, text, command in midtraining if not settings.demo.model else ():
        supervisor.start(name, plan.arguments(*command))
        with spinner(console, text) as say:
            while not supervisor.ended(name):
                supervisor.check(MAY_END)
                say(last_line(plan.log_directory / f"{name}.log"))
                time.sleep(REFRESH_S)
    with LogReader(settings.kafka, WATCHED, client_id="tidemill-demo") as reader:
        state = LoopState(run.run_id)
        online = OnlineState(state, frozenset({STABLE}), frozenset({CANARY}))
        stage = DemoStage(plan, supervisor, console, reader, online, time.monotonic())
        figures = partial(summarise, state, seed=run.seed, bound=run.max_policy_lag, data_dir=plan.directory)
        summary: Summary = {}
        users: Summary = {}
        if Act.ONE in plan.acts:
            play_one(stage)
            # The figures of the simulated loop belong to the first act.
            summary = figures()
        else:
            supervisor.start("stream", plan.arguments("stream"))
        if Act.TWO in plan.acts:
            if summary:
                # Stop the roles that the second act does not need; group assembly continues.
                for name, _ in reversed(plan.loop_roles()):
                    if name != "stream":
                        supervisor.stop(name)
            users = play_two(stage)
        summary = summary or figures()
        report = _audit(stage)
    ended = {"audit_sound": report.passed, "audit": report.verdict(), "seconds": round(time.monotonic() - began, 1)}
    return {**summary, **users, **ended}


def _audit(stage: DemoStage) -> AuditReport:
    """Return the audit of the log, after every requested rollout has ended."""
    from tidemill.consumers.operate.audit.audit import audit_log
    from tidemill.consumers.operate.audit.endings import AuditRules

    settings, state = stage.plan.settings, stage.state
    with spinner(stage.console, "auditing the log") as say:
        if Act.TWO in stage.plan.acts:
            stage.supervisor.stop("feed-online")
        deadline = time.monotonic() + settings.demo.endings_timeout_s
        while state.open_groups and time.monotonic() < deadline:
            stage.listen()
            say(f"{state.open_groups} groups are still played")
        rules = AuditRules(
            settings.run.run_id,
            complete=True,
            last_step=len(state.steps),
            horizon_us=to_us(settings.join.map.wait_s + settings.join.grace_s),
        )
        return audit_log(settings.kafka, rules, lambda topic, n, of: say(f"{topic}: {n:,} of {of:,} records"))
