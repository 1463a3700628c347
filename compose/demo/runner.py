"""Runs the demonstration: starts the stack and each role as its own process, follows the log, and stops all of them.

The runner is an operator, not a participant: it starts and stops processes and reads the log. No data that the loop
needs passes through it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial

from rich.console import Console

from tidemill.compose.config import Act, TidemillSettings
from tidemill.compose.demo.acts import MAY_END, REFRESH_S, WATCHED, DemoStage, last_line, play_one, play_two
from tidemill.compose.demo.plan import CANARY, STABLE, DemoPlan
from tidemill.compose.demo.state import LoopState, OnlineState
from tidemill.compose.demo.summary import Summary, summarise
from tidemill.compose.demo.view import closing
from tidemill.compose.models_command import DIRECTORY, fetch
from tidemill.compose.options import with_address
from tidemill.compose.output import spinner
from tidemill.compose.processes import ChildGuard, Supervisor
from tidemill.compose.stack.kafka import LocalStack, require_tools
from tidemill.consumers.operate.audit.audit import AuditReport, audit_log
from tidemill.consumers.operate.audit.endings import AuditRules
from tidemill.schemas.clock import to_us
from tidemill.schemas.log.admin import create_topics, wait_for_broker
from tidemill.schemas.log.reader import LogReader

QUERIES = {
    Act.ONE: ("held_out_by_version", "policy_lag_histogram", "accounting"),
    Act.TWO: ("online_accounting", "feedback_to_served", "gate"),
}
"""The named queries to suggest after an act."""


def run_demo(settings: TidemillSettings, console: Console) -> Summary:
    """Run the loop to its end and return its results. Raises RuntimeError, StackError."""
    if not settings.kafka.bootstrap:
        require_tools(settings.stack)
    # The broker is detached from this process, so that an exit without unwinding would leave it running.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    began = time.monotonic()
    if settings.demo.model:
        directory = fetch(settings.demo.model, DIRECTORY, console)
        settings = settings.model_copy(update={"demo": settings.demo.model_copy(update={"model": str(directory)})})
    plan = DemoPlan.of(settings)
    with ChildGuard(plan.stack_directory) as guard, _log(settings, plan, console) as located:
        plan = plan.with_log_of(located)
        with Supervisor(
            plan.log_directory,
            plan.role_environment(),
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
