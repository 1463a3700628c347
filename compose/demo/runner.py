"""Runs the demonstration: starts the stack and every role as a process of its own, watches the log, and stops it all.

The runner is an operator, not a participant: it starts and stops processes and reads the log. Nothing that the loop
needs passes through it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tidemill.compose.config import TidemillSettings
from tidemill.compose.demo.plan import DemoPlan
from tidemill.compose.demo.state import LoopState
from tidemill.compose.demo.summary import Summary, summarise
from tidemill.compose.demo.view import closing, screen
from tidemill.compose.local_log import with_address
from tidemill.compose.processes import Supervisor
from tidemill.compose.stack import LocalStack, require_tools
from tidemill.schemas.admin import create_topics, wait_for_broker
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.reader import LogReader

WATCHED = (Topic.TASKS, Topic.GROUPS, Topic.STEPS, Topic.MANIFESTS, Topic.ACKS)
REFRESH_S = 0.25
QUERIES = ("held_out_by_version", "policy_lag_histogram", "accounting")


class DemoFailed(RuntimeError):
    """The loop did not reach its end."""


@dataclass(slots=True)
class _Watch:
    """A reader of the log and the state folded from it."""

    reader: LogReader
    state: LoopState
    heard_at: float

    def listen(self, timeout_s: float) -> None:
        for located in self.reader.poll(timeout_s):
            self.heard_at = time.monotonic()
            if located.record is not None:
                self.state.observe(located.record)


def run_demo(settings: TidemillSettings, console: Console) -> Summary:
    """Run the loop to its end and return what it showed. Raises DemoFailed, RoleDied, MissingTool."""
    if not settings.kafka.bootstrap:
        require_tools()
    # The broker is detached from this process, so that ending without unwinding would leave it behind.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    began = time.monotonic()
    plan = DemoPlan.of(settings)
    with _log(settings, plan, console) as located, Supervisor(plan.directory / "logs") as supervisor:
        plan = plan.with_log_of(located)
        summary = _run(plan, supervisor, console, began)
    queries = [f"tidemill query {name} --data-dir {plan.sink_directory}" for name in QUERIES]
    console.print(closing(summary, queries))
    return summary


@contextlib.contextmanager
def _log(settings: TidemillSettings, plan: DemoPlan, console: Console) -> Iterator[TidemillSettings]:
    """The settings with a reachable log: the configured one, or a local stack for the length of the demonstration."""
    if settings.kafka.bootstrap:
        wait_for_broker(settings.kafka)
        yield settings
        return
    stack = LocalStack(settings.stack.model_copy(update={"data_dir": plan.directory / "kafka"}))
    try:
        with _spinner(console, "starting Apache Kafka") as say:
            address = stack.up(say).bootstrap
        yield settings.model_copy(update={"kafka": with_address(settings.kafka, address)})
    finally:
        stack.down()


@contextlib.contextmanager
def _spinner(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(text, total=1)
        yield lambda detail: progress.update(task, description=f"{text}: {detail}")
        progress.update(task, completed=1, description=text)


def _run(plan: DemoPlan, supervisor: Supervisor, console: Console, began: float) -> Summary:
    create_topics(plan.settings.kafka)
    plan.write_config()
    supervisor.start("sink", plan.arguments("sink"))
    if not plan.settings.demo.model:
        _midtrain(plan, supervisor, console)
    with LogReader(plan.settings.kafka, WATCHED, client_id="tidemill-demo") as reader:
        watch = _Watch(reader, LoopState(plan.settings.run.run_id), time.monotonic())
        for name, arguments in plan.loop_roles():
            supervisor.start(name, arguments)
        _follow(plan, supervisor, console, watch)
    return summarise(
        watch.state,
        seed=plan.settings.run.seed,
        bound=plan.settings.run.max_policy_lag,
        seconds=time.monotonic() - began,
        data_dir=plan.directory,
    )


def _midtrain(plan: DemoPlan, supervisor: Supervisor, console: Console) -> None:
    for name, text in (("documents", "writing documents"), ("midtrain", "mid-training a tiny model from nothing")):
        supervisor.start(name, plan.arguments(name))
        with _spinner(console, text) as say:
            while not supervisor.ended(name):
                supervisor.check(may_end=("documents", "midtrain"))
                say(_last_line(plan.directory / "logs" / f"{name}.log"))
                time.sleep(REFRESH_S)


def _last_line(log: Path) -> str:
    lines = log.read_text("utf-8", errors="replace").splitlines()
    return lines[-1][-80:] if lines else "starting"


def _follow(plan: DemoPlan, supervisor: Supervisor, console: Console, watch: _Watch) -> None:
    """Show the loop until the feeder, which issues the last evaluation, has ended."""
    began = time.monotonic()
    may_end = ("documents", "midtrain", "feed", "train")
    with _display(console) as show:
        while not supervisor.ended("feed"):
            watch.listen(REFRESH_S)
            supervisor.check(may_end)
            show(plan, watch.state, time.monotonic() - began)
            _give_up_when_silent(plan, watch)
        for located in watch.reader.read_to_end():
            if located.record is not None:
                watch.state.observe(located.record)
        show(plan, watch.state, time.monotonic() - began)


def _give_up_when_silent(plan: DemoPlan, watch: _Watch) -> None:
    silent_s = time.monotonic() - watch.heard_at
    if silent_s > plan.settings.demo.stall_timeout_s:
        logs = plan.directory / "logs"
        raise DemoFailed(f"nothing has happened in the log for {silent_s:.0f} s; the roles' own logs are in {logs}")


Show = Callable[[DemoPlan, LoopState, float], None]


@contextlib.contextmanager
def _display(console: Console) -> Iterator[Show]:
    if not console.is_terminal:
        yield _LinePerStep(console)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield lambda plan, state, elapsed_s: live.update(_screen(plan, state, elapsed_s))


def _screen(plan: DemoPlan, state: LoopState, elapsed_s: float) -> RenderableType:
    run = plan.settings.run
    stage = "starting" if not state.last_ack else "running" if len(state.steps) < run.max_steps else "evaluating"
    return screen(state, steps=run.max_steps, bound=run.max_policy_lag, elapsed_s=elapsed_s, stage=stage)


class _LinePerStep:
    """Without a terminal: one line whenever a step or an evaluation is new."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: tuple[int, int] = (0, 0)

    def __call__(self, plan: DemoPlan, state: LoopState, elapsed_s: float) -> None:
        held_out = state.held_out()
        now = (len(state.steps), sum(h.rollouts for h in held_out))
        if now == self._shown or (not state.steps and not held_out):
            return
        self._shown = now
        newest = held_out[-1] if held_out else None
        rate = f"held-out v{newest.version} {newest.rate:.2f} (n={newest.rollouts})" if newest else ""
        reward = f"reward {state.mean_reward(state.steps[max(state.steps)]):.2f}" if state.steps else ""
        served = " ".join(f"{name} v{ack.serving_version}" for name, ack in sorted(state.last_ack.items()))
        lag = f"lag max {max(state.lag(), default=0)}"
        line = f"{elapsed_s:6.0f} s  step {now[0]}  {reward}  {rate}  {lag}  trainer v{state.version}  {served}"
        self._console.print(line, highlight=False, soft_wrap=True)
