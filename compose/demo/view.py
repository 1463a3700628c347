"""The live screen of the demonstration: a `LoopState` or an `OnlineState`, drawn with rich."""

from __future__ import annotations

from collections import Counter

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tidemill.compose.demo.people import UserActivity
from tidemill.compose.demo.state import LoopState, OnlineState
from tidemill.compose.demo.summary import Percentiles, Summary, percentiles

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 60


def sparkline(values: list[float]) -> str:
    """Return the last values as a row of bars between 0 and 1."""
    steps = [min(max(value, 0.0), 1.0) for value in values[-SPARK_WIDTH:]]
    return "".join(SPARKS[round(step * (len(SPARKS) - 1))] for step in steps)


def screen(state: LoopState, *, steps: int, bound: int, elapsed_s: float, stage: str) -> RenderableType:
    held_out, groups, lag = state.held_out(), state.train_groups(), state.lag()
    learning = Table.grid(padding=(0, 2))
    rates = ", ".join(f"v{h.version} {h.rate:.2f} (n={h.rollouts})" for h in held_out[-4:]) or "waiting"
    learning.add_row("held-out success", rates, Text(sparkline([h.rate for h in held_out]), style="green"))
    tasks = ", ".join(f"{name} {count}" for name, count in sorted(state.environments.items()))
    learning.add_row("tasks", tasks, "")
    rewards = [state.mean_reward(state.steps[step]) for step in sorted(state.steps)]
    latest = f"{rewards[-1]:.2f}" if rewards else "waiting"
    learning.add_row("reward (training)", latest, Text(sparkline(rewards), style="yellow"))
    learning.add_row("optimizer step", f"{len(state.steps)} of {steps}", "")
    reasons = ", ".join(f"{k} {v}" for k, v in sorted(Counter(group.closed_by for group in groups).items()))
    learning.add_row("groups assembled", str(len(groups)), reasons)
    weights = Table.grid(padding=(0, 2))
    tokens = sum(lag.values())
    shares = "  ".join(f"{k}: {v / tokens:.0%}" for k, v in sorted(lag.items()))
    weights.add_row("policy lag", f"max {max(lag, default=0)}, bound {bound}", shares)
    newest, size = state.manifests.get(state.version), ""
    if newest is not None and newest.parent is not None:
        size = (
            f"delta {newest.delta_bytes / 1024:,.0f} KiB, {newest.n_changed / newest.n_elements:.1%} of the weights "
            f"changed at learning rate {newest.learning_rate:g}"
        )
    weights.add_row("trainer", f"v{state.version}", size)
    for replica_id, ack in sorted(state.last_ack.items()):
        pause = f"pause {ack.pause_ms:.1f} ms, {ack.status.value}, {ack.requests_in_flight} requests in flight"
        weights.add_row(replica_id, f"v{ack.serving_version}", pause)
    title = f"tidemill · {state.run_id} · {stage} · {elapsed_s:.0f} s"
    return Panel(Lines(learning, weights), title=title, border_style="cyan")


def online_screen(online: OnlineState, seen: UserActivity | None, batches: int, elapsed_s: float) -> RenderableType:
    users = Table.grid(padding=(0, 2))
    rates = seen.satisfaction if seen is not None else []
    rates_text = ", ".join(f"v{s.version} {s.rate:.2f} (n={s.answers})" for s in rates[-4:]) or "waiting"
    users.add_row("held-out users satisfied", rates_text, Text(sparkline([s.rate for s in rates]), style="green"))
    rate = f"{online.interactions_per_s:.0f} a second"
    users.add_row("interactions", str(len(online.interactions)), f"{rate}, {online.votes} votes")
    users.add_row("ended in a reward", str(online.rewarded), f"{online.corrections} corrected later")
    reasons = ", ".join(f"{reason} {count}" for reason, count in online.exclusions().items()) or "none"
    users.add_row("excluded", str(len(online.endings) - online.rewarded), reasons)
    newest = list(online.batches.values())[-1] if online.batches else None
    size = f"v{newest.version}: {len(newest.members)} members, by {newest.closed_by.value}" if newest else "filling"
    users.add_row("online batches", f"{online.learnt_batches} of {batches} learnt from", size)
    gate = Table.grid(padding=(0, 2))
    gate.add_row("gate", online.stage())
    gate.add_row("decisions", ", ".join(f"{verdict} {n}" for verdict, n in online.verdicts().items()) or "none")
    gate.add_row("on evidence", f"{online.decided_on_evidence} of {online.trials_decided} versions tried")
    gate.add_row("feedback to served", _spread(percentiles(online.to_a_share_s())))
    gate.add_row("feedback to everyone", _spread(percentiles(online.to_everyone_s())))
    for replica_id, version in sorted(online.serving.items()):
        gate.add_row(replica_id, f"v{version}")
    title = f"tidemill · {online.loop.run_id} · learning from users · {elapsed_s:.0f} s"
    return Panel(Lines(users, gate), title=title, border_style="magenta")


def _spread(seconds: Percentiles) -> str:
    return f"p50 {seconds['p50']:.1f} s, p95 {seconds['p95']:.1f} s" if seconds["p95"] else "waiting"


RESULTS = (
    ("held-out success", "{held_out_before:.3f} → {held_out_after:.3f}  (at least {held_out_rollouts} rollouts each)"),
    ("weight versions", "{versions}, fingerprints of trainer and live replicas {equal}"),
    ("policy lag", "max {max_policy_lag}, bound {policy_lag_bound}"),
    ("spanning versions", "{rollouts_spanning_versions} of {rollouts_trained} trained rollouts"),
    ("swap pause", "p50 {pause_ms[p50]:.1f} ms, p95 {pause_ms[p95]:.1f} ms"),
    ("step to served", "p50 {step_to_served_s[p50]:.2f} s, p95 {step_to_served_s[p95]:.2f} s"),
    ("delta", "p50 {kib:,.0f} KiB at learning rate {learning_rate:g}"),
    ("rollouts", "{rollouts_per_s:.1f} per second, of {trained_on}"),
    ("audit of the log", "{audit}"),
)
ONLINE_RESULTS = (
    ("users satisfied", "{satisfaction_before:.3f} → {satisfaction_after:.3f}  "
     "({satisfaction_answers} held-out answers each)"),
    ("skill meanwhile", "{held_out_before_online:.3f} → {held_out_after_online:.3f}  "
     "(at least {held_out_online_rollouts} rollouts each: within ±{held_out_online_noise:.3f} is noise)"),
    ("decided on evidence", "{decided_on_evidence} of {trials_decided} versions tried"),
    ("online batches", "{online_batches}; {promotions} versions promoted, fingerprints {online_equal}"),
    ("feedback to served", "{to_served}"),
    ("feedback to everyone", "{to_everyone}"),
    ("interactions", "{interactions} = {rewarded} rewarded, {excluded}"),
)  # fmt: skip


def closing(summary: Summary, queries: list[str]) -> RenderableType:
    equal = {True: "equal", False: "NOT EQUAL"}
    values = {
        **summary,
        "equal": equal[summary["fingerprints_equal"]],
        "kib": summary["delta_bytes"]["p50"] / 1024,
        "trained_on": ", ".join(summary["environments"]),
    }
    rows = [*RESULTS]
    if "online_batches" in summary:
        values |= {
            "online_equal": equal[summary["online_fingerprints_equal"]],
            "to_served": _spread(summary["feedback_to_served_s"]),
            "to_everyone": _spread(summary["feedback_to_everyone_s"]),
            "excluded": ", ".join(f"{reason} {count}" for reason, count in summary["exclusions"].items()),
        }
        rows += ONLINE_RESULTS
    table = Table.grid(padding=(0, 2))
    rows += [("time", "{loop_seconds:.0f} s of loop, {seconds:.0f} s in all"), ("data", "{data_dir}")]
    for name, value in rows:
        table.add_row(name, value.format(**values))
    asks = Lines(Text("\nTry next:", style="bold"), *(Text(f"  {query}") for query in queries))
    return Panel(Lines(table, asks), title=f"tidemill · {summary['run_id']}", border_style="green")
