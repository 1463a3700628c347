"""Both acts of the demonstration, and their common parts: the reader of the log with the states folded from it, and
the display.

In the first act the model learns in simulation, until the feeder has closed the last evaluation. In the second act
users arrive, and it learns their preferences. There, the command is still an operator: it starts and stops processes,
and takes the one decision of a person: the first version that users get. The gate takes all later decisions.
"""

from __future__ import annotations

import contextlib
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live

from tidemill.compose.config import TidemillSettings
from tidemill.compose.demo.people import Satisfaction, UserActivity
from tidemill.compose.demo.plan import CANARY, STABLE, DemoPlan, RoleArguments
from tidemill.compose.demo.state import LoopState, OnlineState
from tidemill.compose.demo.summary import Summary, summarise_online
from tidemill.compose.demo.view import online_screen, screen
from tidemill.compose.output import spinner
from tidemill.compose.processes import Supervisor
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import GateDecision, GateVerdict

WATCHED = (
    Topic.TASKS,
    Topic.GROUPS,
    Topic.STEPS,
    Topic.MANIFESTS,
    Topic.ACKS,
    Topic.INTERACTIONS,
    Topic.FEEDBACK,
    Topic.OUTCOMES,
    Topic.ONLINE_BATCHES,
    Topic.GATE,
)
REFRESH_S = 0.25


BEFORE = "users-before"
AFTER = "users-after"
MAY_END = ("documents", "midtrain", "feed", "train", "train-online", "feed-online", BEFORE, AFTER)
"""Roles that end on their own when their work is done."""


@dataclass(slots=True)
class DemoStage:
    """The environment of the acts: their processes, a reader of the log, and the states folded from it."""

    plan: DemoPlan
    supervisor: Supervisor
    console: Console
    reader: LogReader
    online: OnlineState
    heard_at: float
    """The time of the last record, on the monotonic clock."""

    def take(self, found: Iterable[ConsumedRecord]) -> None:
        for located in found:
            self.heard_at = time.monotonic()
            if located.record is not None:
                self.online.observe(located.record)

    @property
    def state(self) -> LoopState:
        return self.online.loop

    def start_product(self, role: RoleArguments) -> None:
        """Start a process of the product, which needs its keys."""
        self.supervisor.start(*role, self.plan.product_environment())

    def listen(self) -> None:
        """Read the log for a moment, and check the roles. Raises RuntimeError if one has failed."""
        self.take(self.reader.poll(REFRESH_S))
        self.supervisor.check(MAY_END)

    def play(self, show: Callable[[], None], done: Callable[[], bool]) -> None:
        """Show the log until `done`. Raises RuntimeError if no record comes for too long, or as `listen`."""
        while not done():
            self.listen()
            show()
            silent_s = time.monotonic() - self.heard_at
            if silent_s > self.plan.settings.demo.stall_timeout_s:
                logs = self.plan.log_directory
                raise RuntimeError(
                    f"the log has received no record for {silent_s:.0f} s; the roles' own logs are in {logs}"
                )

    def wait(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Follow the log until `done`. Raises RuntimeError after the timeout, or as `listen`."""
        deadline = time.monotonic() + timeout_s
        while not done():
            self.listen()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{what}: not within {timeout_s:.0f} s; the roles' logs are in {self.plan.log_directory}"
                )

    def report(self, name: str) -> UserActivity | None:
        """Return the newest report of users."""
        return newest_report(self.plan.log_directory / f"{name}.log")


def last_line(log: Path) -> str:
    lines = log.read_text("utf-8", errors="replace").splitlines()
    return lines[-1][-80:] if lines else "starting"


@contextlib.contextmanager
def display(
    console: Console, screen: Callable[[], RenderableType], line: Callable[[], str], news: Callable[[], object]
) -> Iterator[Callable[[], None]]:
    """Yield a function that shows the progress: a live screen on a terminal, otherwise a line when `news` changes."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            yield lambda: live.update(screen())
        return
    began, known = time.monotonic(), news()

    def show() -> None:
        nonlocal known
        now = news()
        if now != known:
            known = now
            console.print(f"{time.monotonic() - began:6.0f} s  {line()}", highlight=False, soft_wrap=True)

    yield show


def play_one(stage: DemoStage) -> None:
    """Start the simulated loop and show it to its end. Raises RuntimeError."""
    run, state = stage.plan.settings.run, stage.state
    for role in stage.plan.loop_roles():
        stage.supervisor.start(*role)
    began = time.monotonic()

    def picture() -> RenderableType:
        doing = "starting" if not state.last_ack else "running" if len(state.steps) < run.max_steps else "evaluating"
        elapsed_s = time.monotonic() - began
        return screen(state, steps=run.max_steps, bound=run.max_policy_lag, elapsed_s=elapsed_s, stage=doing)

    def line() -> str:
        held_out = state.held_out()
        newest = held_out[-1] if held_out else None
        rate = f"held-out v{newest.version} {newest.rate:.2f} (n={newest.rollouts})" if newest else ""
        reward = f"reward {state.mean_reward(state.steps[max(state.steps)]):.2f}" if state.steps else ""
        served = " ".join(f"{name} v{ack.serving_version}" for name, ack in sorted(state.last_ack.items()))
        lag = f"lag max {max(state.lag(), default=0)}"
        return f"step {len(state.steps)}  {reward}  {rate}  {lag}  trainer v{state.version}  {served}"

    def news() -> object:
        return len(state.steps), sum(held_out.rollouts for held_out in state.held_out())

    with display(stage.console, picture, line, news) as show:
        stage.play(show, lambda: stage.supervisor.ended("feed"))
        stage.take(stage.reader.read_to_end())
        show()


PROBE_TIMEOUT_S = 2.0
OPERATOR = "demonstration"


def play_two(stage: DemoStage) -> Summary:
    """Play the act to its end; return its results, users' opinions included. Raises RuntimeError."""
    plan, online = stage.plan, stage.online
    _open(stage)
    first = online.branch.served[-1]
    before = _measure(stage, BEFORE, "measuring how satisfied held-out users are")
    seconds = _let_users_in(stage)
    after = _measure(stage, AFTER, "measuring how satisfied they are now")
    with spinner(stage.console, "waiting until every interaction has ended") as say:

        def ended() -> bool:
            say(f"{len(online.endings)} of {len(online.interactions)}")
            return len(online.endings) == len(online.interactions)

        stage.wait(ended, plan.settings.demo.endings_timeout_s, "interactions without an ending")
    return summarise_online(
        online,
        before=rate_of(before, first),
        after=rate_of(after, online.branch.served[-1]),
        thumbs_shuffled=plan.settings.users.shuffle_thumbs,
        seconds=seconds,
    )


def _open(stage: DemoStage) -> None:
    """Start all processes except the users."""
    plan, online, limit_s = stage.plan, stage.online, stage.plan.settings.demo.start_timeout_s

    def serves(replica: str) -> bool:
        return bool(online.branch.served) and online.serving.get(replica, -1) >= online.branch.served[0]

    def is_up() -> bool:
        try:
            with urllib.request.urlopen(f"{plan.router_address}/healthz", timeout=PROBE_TIMEOUT_S) as answer:
                return int(answer.status) == HTTPStatus.OK
        except (urllib.error.URLError, OSError):
            return False

    with spinner(stage.console, "starting a stable and a canary replica, the router, the join and the gate") as say:
        known = stage.state.version
        if known >= 0:
            promote_first(plan.settings, known, OPERATOR)
        for role in plan.online_roles():
            stage.supervisor.start(*role)
        stage.wait(lambda: stage.state.version >= 0, limit_s, "the trainer has published no version")
        if known < 0:
            promote_first(plan.settings, stage.state.version, OPERATOR)
        stage.start_product(plan.router_role())
        for replica in (STABLE, CANARY):
            say(f"waiting for {replica}")
            stage.wait(partial(serves, replica), limit_s, f"{replica} does not serve")
        say("waiting for the router")
        stage.wait(is_up, limit_s, "the router does not answer")


def _measure(stage: DemoStage, name: str, text: str) -> UserActivity | None:
    stage.start_product(stage.plan.measuring_role(name))
    with spinner(stage.console, text) as say:

        def ended() -> bool:
            say(last_line(stage.plan.log_directory / f"{name}.log"))
            return stage.supervisor.ended(name)

        stage.wait(ended, stage.plan.settings.demo.start_timeout_s, text)
    return stage.report(name)


def _let_users_in(stage: DemoStage) -> float:
    """Let all users use the product until enough was learnt from them; return how long that took, in seconds."""
    demo, online = stage.plan.settings.demo, stage.online
    began = time.monotonic()
    stage.start_product(stage.plan.users_role())

    def elapsed_s() -> float:
        return time.monotonic() - began

    def done() -> bool:
        """Return whether the time is up, or every batch was learnt from and the gate decided about the last version."""
        learnt = online.learnt_batches >= demo.online_batches and online.decided(online.learnt_versions[-1])
        return learnt or elapsed_s() >= demo.online_limit_s

    def line() -> str:
        seen = stage.report("users")
        rates = " ".join(f"v{s.version} {s.rate:.2f} (n={s.answers})" for s in (seen.satisfaction if seen else [])[-3:])
        served = " ".join(f"{name} v{version}" for name, version in sorted(online.serving.items()))
        return (
            f"batch {online.learnt_batches}  satisfied {rates or '-'}  {len(online.interactions)} interactions  "
            f"{online.votes} votes  gate: {online.stage()}  {served}"
        )

    def picture() -> RenderableType:
        return online_screen(online, stage.report("users"), demo.online_batches, elapsed_s())

    with display(stage.console, picture, line, lambda: (online.learnt_batches, len(online.decisions))) as show:
        stage.play(show, done)
    stage.supervisor.stop("users")
    return elapsed_s()


def promote_first(settings: TidemillSettings, version: int, decided_by: str) -> None:
    """Promote `version` for all users. Raises DeliveryError if the log refuses."""
    run = settings.run
    decision = GateDecision(
        run_id=run.run_id,
        branch=run.branch,
        verdict=GateVerdict.PROMOTE,
        version=version,
        reason="the version that users meet first",
        decided_by=decided_by,
        numbers={},
        at=now_us(),
    )
    with RecordProducer(settings.kafka, "tidemill-demo") as producer:
        producer.send_acked(Topic.GATE, [(run.branch, decision)])


def newest_report(log: Path) -> UserActivity | None:
    """Return the last whole report in a log of `tidemill users simulate --json`; None before the first."""
    if not log.exists():
        return None
    whole = [line for line in log.read_text("utf-8", errors="replace").splitlines(keepends=True) if line.endswith("\n")]
    newest = next((line for line in reversed(whole) if line.startswith("{")), None)
    return None if newest is None else msgspec.json.decode(newest, type=UserActivity)


def rate_of(seen: UserActivity | None, version: int | None) -> Satisfaction | None:
    """Return how satisfied held-out users were with a version; None if they were not asked about it."""
    found = seen.satisfaction if seen is not None else []
    return next((each for each in found if each.version == version), None)
