"""Runs the demonstration: starts the stack and every role as a process of its own, watches the log, and stops it all.

The runner is an operator, not a participant: it starts and stops processes and reads the log. Nothing that the loop
needs passes through it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from rich.console import Console

from tidemill.compose.config import Act, TidemillSettings
from tidemill.compose.demo.acts import (
    MAY_END_ONE,
    MAY_END_TWO,
    REFRESH_S,
    WATCHED,
    DemoWatch,
    last_line,
    leave_one,
    play_one,
    play_two,
)
from tidemill.compose.demo.plan import CANARY, STABLE, DemoPlan
from tidemill.compose.demo.state import LoopState, OnlineState
from tidemill.compose.demo.summary import Summary, summarise
from tidemill.compose.demo.view import closing
from tidemill.compose.models_command import DIRECTORY, fetch
from tidemill.compose.options import with_address
from tidemill.compose.output import spinner
from tidemill.compose.processes import Guard, Supervisor
from tidemill.compose.stack import LocalStack, require_tools
from tidemill.consumers.operate.audit.audit import audit_log
from tidemill.consumers.operate.audit.endings import AuditRules
from tidemill.schemas.log.admin import create_topics, wait_for_broker
from tidemill.schemas.log.reader import LogReader

QUERIES = {
    Act.ONE: ("held_out_by_version", "policy_lag_histogram", "accounting"),
    Act.TWO: ("online_accounting", "feedback_to_served", "gate"),
}
"""What to look up when an act has been played."""


def run_demo(settings: TidemillSettings, console: Console) -> Summary:
    """Run the loop to its end and return what it showed. Raises RuntimeError, RoleDied, MissingTool."""
    if not settings.kafka.bootstrap:
        require_tools()
    # The broker is detached from this process, so that ending without unwinding would leave it behind.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    began = time.monotonic()
    if settings.demo.model:
        directory = fetch(settings.demo.model, DIRECTORY, console)
        settings = settings.model_copy(update={"demo": settings.demo.model_copy(update={"model": str(directory)})})
    plan = DemoPlan.of(settings)
    with Guard(plan.stack_directory) as guard, _log(settings, plan, console) as located:
        plan = plan.with_log_of(located)
        with Supervisor(
            plan.log_directory,
            plan.log_environment(),
            restarted=partial(console.print, style="yellow", highlight=False, soft_wrap=True),
            started=guard.watch,
        ) as supervisor:
            summary = _run(plan, supervisor, console, began)
    names = [name for act in plan.acts for name in QUERIES[act]]
    queries = [f"tidemill query {name} --data-dir {plan.sink_directory}" for name in names]
    queries.append(f"tidemill view {plan.directory}")
    console.print(closing(summary, queries))
    return summary


@contextlib.contextmanager
def _log(settings: TidemillSettings, plan: DemoPlan, console: Console) -> Iterator[TidemillSettings]:
    """The settings with a reachable log: the configured one, or a local stack for the length of the demonstration."""
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
    create_topics(plan.settings.kafka)
    plan.write_config()
    supervisor.start("sink", plan.arguments("sink"))
    supervisor.start("view", plan.arguments("view"))
    console.print(f"watch it in a browser: {plan.view_address}", highlight=False)
    if not plan.settings.demo.model:
        _midtrain(plan, supervisor, console)
    run_id = plan.settings.run.run_id
    with LogReader(plan.settings.kafka, WATCHED, client_id="tidemill-demo") as reader:
        online = OnlineState(run_id, frozenset({STABLE}), frozenset({CANARY}))
        watch = DemoWatch(reader, LoopState(run_id), online, time.monotonic())
        summary = _audited(plan, supervisor, console, watch, _play(plan, supervisor, console, watch))
    return replace(summary, seconds=round(time.monotonic() - began, 1))


def _audited(plan: DemoPlan, supervisor: Supervisor, console: Console, watch: DemoWatch, summary: Summary) -> Summary:
    """The summary with the verdict on the log, once every rollout that was asked for has ended."""
    settings = plan.settings
    with spinner(console, "auditing the log") as say:
        if Act.TWO in plan.acts:
            supervisor.stop("feed-online")
        deadline = time.monotonic() + settings.demo.endings_timeout_s
        while watch.state.open_groups and time.monotonic() < deadline:
            watch.listen(REFRESH_S)
            supervisor.check((*MAY_END_ONE, *MAY_END_TWO))
            say(f"{watch.state.open_groups} groups are still played")
        rules = AuditRules(
            settings.run.run_id,
            complete=True,
            last_step=len(watch.state.steps),
            horizon_us=round((settings.join.map.wait_s + settings.join.grace_s) * 1_000_000),
        )
        report = audit_log(settings.kafka, rules, lambda topic, n, of: say(f"{topic}: {n:,} of {of:,} records"))
    return replace(summary, audit_sound=report.passed, audit=report.verdict())


def _play(plan: DemoPlan, supervisor: Supervisor, console: Console, watch: DemoWatch) -> Summary:
    if plan.acts == (Act.TWO,):
        supervisor.start("stream", plan.arguments("stream"))
        online = play_two(plan, supervisor, console, watch)
        return replace(_summary(plan, watch), online=online)
    play_one(plan, supervisor, console, watch)
    summary = _summary(plan, watch)
    if Act.TWO not in plan.acts:
        return summary
    leave_one(plan, supervisor)
    return replace(summary, online=play_two(plan, supervisor, console, watch))


def _summary(plan: DemoPlan, watch: DemoWatch) -> Summary:
    """What the simulated loop showed so far."""
    run = plan.settings.run
    return summarise(watch.state, seed=run.seed, bound=run.max_policy_lag, seconds=0.0, data_dir=plan.directory)


def _midtrain(plan: DemoPlan, supervisor: Supervisor, console: Console) -> None:
    for name, text in (("documents", "writing documents"), ("midtrain", "mid-training a tiny model from nothing")):
        command = (name,) if name == "documents" else ("train", "--phase", "midtrain")
        supervisor.start(name, plan.arguments(*command))
        with spinner(console, text) as say:
            while not supervisor.ended(name):
                supervisor.check(may_end=("documents", "midtrain"))
                say(last_line(plan.log_directory / f"{name}.log"))
                time.sleep(REFRESH_S)
