"""The first act: the model learns in simulation, until the feeder has closed the last evaluation."""

from __future__ import annotations

import time

from rich.console import Console, RenderableType

from tidemill.compose.demo.plan import DemoPlan
from tidemill.compose.demo.state import LoopState
from tidemill.compose.demo.view import screen
from tidemill.compose.demo.watch import REFRESH_S, DemoWatch, display
from tidemill.compose.processes import Supervisor

MAY_END = ("documents", "midtrain", "feed", "train")
"""Roles that end by themselves when their work is done."""


def play(plan: DemoPlan, supervisor: Supervisor, console: Console, watch: DemoWatch) -> None:
    """Start the simulated loop and show it to its end. Raises RuntimeError, RoleDied."""
    for name, arguments in plan.loop_roles():
        supervisor.start(name, arguments)
    began, state = time.monotonic(), watch.state
    with display(
        console,
        lambda: _screen(plan, state, time.monotonic() - began),
        lambda: _line(state),
        lambda: (len(state.steps), sum(held_out.rollouts for held_out in state.held_out())),
    ) as show:
        while not supervisor.ended("feed"):
            watch.listen(REFRESH_S)
            supervisor.check(MAY_END)
            show()
            watch.give_up_when_silent(plan)
        watch.catch_up()
        show()


def leave(plan: DemoPlan, supervisor: Supervisor) -> None:
    """Stop what the second act does without: group assembly goes on."""
    for name, _ in reversed(plan.loop_roles()):
        if name != "stream":
            supervisor.stop(name)


def _screen(plan: DemoPlan, state: LoopState, elapsed_s: float) -> RenderableType:
    run = plan.settings.run
    stage = "starting" if not state.last_ack else "running" if len(state.steps) < run.max_steps else "evaluating"
    return screen(state, steps=run.max_steps, bound=run.max_policy_lag, elapsed_s=elapsed_s, stage=stage)


def _line(state: LoopState) -> str:
    held_out = state.held_out()
    newest = held_out[-1] if held_out else None
    rate = f"held-out v{newest.version} {newest.rate:.2f} (n={newest.rollouts})" if newest else ""
    reward = f"reward {state.mean_reward(state.steps[max(state.steps)]):.2f}" if state.steps else ""
    served = " ".join(f"{name} v{ack.serving_version}" for name, ack in sorted(state.last_ack.items()))
    lag = f"lag max {max(state.lag(), default=0)}"
    return f"step {len(state.steps)}  {reward}  {rate}  {lag}  trainer v{state.version}  {served}"
