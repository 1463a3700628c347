"""The second act: users arrive, and the model learns what they like.

The runner is still an operator: it starts and stops processes, and takes the one decision that is a person's, which
version users meet first. Everything after that is the gate's.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path

from rich.console import Console

from tidemill.compose.config import TidemillSettings
from tidemill.compose.demo.plan import CANARY, STABLE, DemoPlan, RoleArguments
from tidemill.compose.demo.simulated_users.conversation import Satisfaction
from tidemill.compose.demo.simulated_users.crowd import Seen
from tidemill.compose.demo.summary import OnlineSummary, summarise_online
from tidemill.compose.demo.view import online_screen
from tidemill.compose.demo.watch import REFRESH_S, DemoWatch, display, last_line
from tidemill.compose.processes import Supervisor
from tidemill.compose.progress import spinner
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import GateDecision, GateVerdict

BEFORE = "users-before"
AFTER = "users-after"
MAY_END = ("documents", "midtrain", "train-online", "feed-online", BEFORE, AFTER)
"""Roles that end by themselves when their work is done."""
PROBE_TIMEOUT_S = 2.0
OPERATOR = "demonstration"


@dataclass(frozen=True, slots=True)
class _Stage:
    """Where the act is played."""

    plan: DemoPlan
    supervisor: Supervisor
    console: Console
    watch: DemoWatch

    def start(self, role: RoleArguments) -> None:
        name, arguments = role
        self.supervisor.start(name, arguments)

    def start_product(self, role: RoleArguments) -> None:
        """Start a process of the product's side, which needs its keys."""
        name, arguments = role
        self.supervisor.start(name, arguments, self.plan.product_environment())

    def wait(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Watch the log until `done`. Raises RuntimeError in the end, RoleDied."""
        deadline = time.monotonic() + timeout_s
        while not done():
            self.watch.listen(REFRESH_S)
            self.supervisor.check(MAY_END)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{what}: not within {timeout_s:.0f} s; the roles' logs are in {self.plan.log_directory}"
                )

    def report(self, name: str) -> Seen | None:
        """What users said last."""
        return newest_report(self.plan.log_directory / f"{name}.log")


def play(plan: DemoPlan, supervisor: Supervisor, console: Console, watch: DemoWatch) -> OnlineSummary:
    """Play the act to its end; what it showed, users' opinions included. Raises RuntimeError, RoleDied."""
    stage = _Stage(plan, supervisor, console, watch)
    first = _open(stage)
    before = _measure(stage, BEFORE, "measuring how satisfied held-out users are")
    seconds = _let_users_in(stage)
    after = _measure(stage, AFTER, "measuring how satisfied they are now")
    _wait_for_endings(stage)
    return summarise_online(
        watch.state,
        watch.online,
        before=rate_of(before, first),
        after=rate_of(after, watch.online.branch.served[-1]),
        thumbs_shuffled=plan.settings.users.shuffle_thumbs,
        seconds=seconds,
    )


def _open(stage: _Stage) -> int:
    """Start everything but the users; the version that they meet first."""
    plan, online, limit_s = stage.plan, stage.watch.online, stage.plan.settings.demo.start_timeout_s
    with spinner(stage.console, "starting a stable and a canary replica, the router, the join and the gate") as say:
        known = stage.watch.state.version
        if known >= 0:
            promote_first(plan.settings, known, OPERATOR)
        for role in plan.online_roles():
            stage.start(role)
        stage.wait(lambda: stage.watch.state.version >= 0, limit_s, "the trainer has published no version")
        if known < 0:
            promote_first(plan.settings, stage.watch.state.version, OPERATOR)
        stage.start_product(plan.router_role())
        for replica in (STABLE, CANARY):
            say(f"waiting for {replica}")
            stage.wait(partial(_serves, stage, replica), limit_s, f"{replica} does not serve")
        say("waiting for the router")
        stage.wait(lambda: _is_up(f"{plan.router_address}/healthz"), limit_s, "the router does not answer")
    return online.branch.served[-1]


def _serves(stage: _Stage, replica: str) -> bool:
    online = stage.watch.online
    return bool(online.branch.served) and online.serving.get(replica, -1) >= online.branch.served[0]


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S) as answer:
            return int(answer.status) == HTTPStatus.OK
    except (urllib.error.URLError, OSError):
        return False


def _measure(stage: _Stage, name: str, text: str) -> Seen | None:
    stage.start_product(stage.plan.measuring_role(name))
    with spinner(stage.console, text) as say:

        def ended() -> bool:
            say(last_line(stage.plan.log_directory / f"{name}.log"))
            return stage.supervisor.ended(name)

        stage.wait(ended, stage.plan.settings.demo.start_timeout_s, text)
    return stage.report(name)


def _let_users_in(stage: _Stage) -> float:
    """Let everyone use the product until enough was learnt from them; how long they were there, in seconds."""
    plan, watch = stage.plan, stage.watch
    began = time.monotonic()
    stage.start_product(plan.users_role())

    def elapsed_s() -> float:
        return time.monotonic() - began

    with display(
        stage.console,
        lambda: online_screen(watch.online, stage.report("users"), plan.settings.demo.online_batches, elapsed_s()),
        lambda: _line(stage),
        lambda: (watch.online.learnt_batches, len(watch.online.decisions)),
    ) as show:
        while not _enough(stage) and elapsed_s() < plan.settings.demo.online_limit_s:
            watch.listen(REFRESH_S)
            stage.supervisor.check(MAY_END)
            watch.give_up_when_silent(plan)
            show()
    stage.supervisor.stop("users")
    return elapsed_s()


def _enough(stage: _Stage) -> bool:
    """Whether every batch was learnt from and the gate has decided about what came of the last one."""
    online = stage.watch.online
    if online.learnt_batches < stage.plan.settings.demo.online_batches:
        return False
    return online.decided(online.learnt_versions[-1])


def _wait_for_endings(stage: _Stage) -> None:
    online, limit_s = stage.watch.online, stage.plan.settings.demo.endings_timeout_s
    with spinner(stage.console, "waiting until every interaction has ended") as say:

        def ended() -> bool:
            say(f"{len(online.endings)} of {len(online.interactions)}")
            return len(online.endings) == len(online.interactions)

        stage.wait(ended, limit_s, "interactions without an ending")


def _line(stage: _Stage) -> str:
    online = stage.watch.online
    seen = stage.report("users")
    rates = " ".join(f"v{s.version} {s.rate:.2f} (n={s.answers})" for s in (seen.satisfaction if seen else [])[-3:])
    served = " ".join(f"{name} v{version}" for name, version in sorted(online.serving.items()))
    return (
        f"batch {online.learnt_batches}  satisfied {rates or '-'}  {len(online.interactions)} interactions  "
        f"{online.votes} votes  gate: {online.stage()}  {served}"
    )


def promote_first(settings: TidemillSettings, version: int, decided_by: str) -> None:
    """Give everyone `version`. Raises DeliveryError when the log refuses."""
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


def newest_report(log: Path) -> Seen | None:
    """The last whole report in a log of `tidemill users simulate --json`; None before the first."""
    if not log.exists():
        return None
    whole = [line for line in log.read_text("utf-8", errors="replace").splitlines(keepends=True) if line.endswith("\n")]
    newest = next((line for line in reversed(whole) if line.startswith("{")), None)
    if newest is None:
        return None
    document = json.loads(newest)
    return Seen(**document | {"satisfaction": [Satisfaction(**each) for each in document["satisfaction"]]})


def rate_of(seen: Seen | None, version: int | None) -> Satisfaction | None:
    """How satisfied held-out users were with a version; None where they were not asked about it."""
    found = seen.satisfaction if seen is not None else []
    return next((each for each in found if each.version == version), None)
