"""`tidemill replay steps` and `tidemill replay staleness`: the trainer, run again over the log."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.compose.config import TidemillSettings, parse_assignments
from tidemill.compose.options import SettingsOf, with_reachable_log, with_settings
from tidemill.compose.progress import Working, working
from tidemill.compose.replay import replay_app
from tidemill.compose.replay.diff import TimeoutOption
from tidemill.compose.rows import CsvOption, JsonOption, print_rows

if TYPE_CHECKING:
    from tidemill.trainer.config import TrainerSettings
    from tidemill.trainer.replay.staleness import JudgedStep
    from tidemill.trainer.replay.steps import Halt, ReplayedStep, StepReplay

SHOWN = ("reward", "online/reward", "loss", "grad_norm", "entropy", "mismatch/k3")
"""Metrics that the table of a counterfactual shows; the JSON document has all of them."""


@replay_app.command("steps")
@with_settings
def steps(
    settings_of: SettingsOf,
    which: Annotated[str, typer.Argument(metavar="FROM..TO", help="Steps, both included; or one step.")],
    break_at: Annotated[
        list[int] | None,
        typer.Option("--break-at", metavar="STEP", help="Write down this step's inputs and weights; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where --break-at writes.")] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", metavar="trainer.KEY=VALUE", help="A changed setting; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Make recorded optimizer steps again, from the same inputs, settings and seed: the same weights, bit for bit.

    Begins at the nearest checkpoint before the range, or at the model that the run started from, and makes the steps in
    between as well. Prints each step's fingerprint beside the recorded one and stops at the first that differs, with
    status 1. Give the original --config. Nothing is published, and nothing is written to the log.

    `--break-at` stops before a step and writes its record, its groups with every token, and the weights that it starts
    from (a Hugging Face checkpoint) below `--out`, then its metrics. `--what-if` makes the steps with other settings
    from the same start: the weights are then other ones, and the metrics are shown side by side.

    A step is the same on the kind of device and the number of ranks that it was trained on:
    `torchrun --nproc-per-node 2 -m tidemill replay steps 1..6`.

    Examples: `tidemill replay steps 1..6 --config run.toml` ·
    `tidemill replay steps 7 --break-at 7 --out step-7` ·
    `tidemill replay steps 4..9 --what-if trainer.optimizer.learning_rate=3e-5`
    """
    first, last = step_range(which)
    halts = _halts(break_at or [], out, first, last)
    changed = _counterfactual(settings_of, what_if or [])
    settings = with_reachable_log(settings_of({}))
    done: list[ReplayedStep] = []
    with open_replay(settings, last - first + 1) as opened:
        if opened is None:
            return
        replay, progress = opened
        for made in _made(replay, first, last, changed, halts, out):
            done.append(made)
            progress(len(done), f"step {made.record.step}")
            if not made.same and changed is None:
                break
    differing = [made.record.step for made in done if not made.same]
    if as_json:
        typer.echo(json.dumps(_document(done, changed is not None), indent=2))
    elif changed is not None:
        _print_metrics(done, as_csv)
    elif as_csv:
        heads = ("step", "version", "recorded", "replayed", "same", "seconds")
        print_rows(heads, ([step[head] for head in heads] for step in _document(done, False)["steps"]), as_csv=True)
    else:
        typer.echo("\n".join(_fingerprint_lines(done, differing)))
    raise typer.Exit(1 if differing and changed is None else 0)


@replay_app.command("staleness")
@with_settings
def staleness(
    settings_of: SettingsOf,
    max_policy_lag: Annotated[
        int, typer.Option("--max-policy-lag", min=0, help="The bound on policy lag, in versions.")
    ],
    timeout_s: TimeoutOption = 600.0,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Show which groups of the recorded steps a different bound on policy lag would have excluded or included.

    Each group is judged at the version that its step started from, by its oldest rollout. Past the first step that
    differs the weights would have been others, and so would the rollouts: what is said of later steps is of the groups
    as they are. Only reads. Status 1 when any group is judged otherwise.

    Example: `tidemill replay staleness --max-policy-lag 1`
    """
    settings = with_reachable_log(settings_of({}))
    from tidemill.trainer.history import read_steps
    from tidemill.trainer.replay.staleness import Moved, judge, places_of, read_groups

    with working("judging"):
        recorded = read_steps(settings.kafka, settings.run.run_id)
        groups = read_groups(settings.kafka, places_of(recorded), timeout_s)
        judged = judge(recorded, groups, max_policy_lag)
    first = next((step.step for step in judged if step.moved), None)
    if as_json:
        document = {"bound": max_policy_lag, "first_differing_step": first, "steps": [asdict(step) for step in judged]}
        typer.echo(json.dumps(document, indent=2))
    elif as_csv:
        heads = ("step", "version", "bound", "trained", "stale", "max_lag", *Moved, "unknown")
        rows = (
            (step.step, step.version, step.bound, step.trained, step.stale, step.max_lag,
             *([group.group_id for group in step.moved if group.moved is way] for way in Moved), step.unknown)
            for step in judged
        )  # fmt: skip
        print_rows(heads, rows, as_csv=True)
    else:
        typer.echo("\n".join(_staleness_lines(judged, max_policy_lag, first)))
    raise typer.Exit(0 if first is None else 1)


@contextmanager
def open_replay(settings: TidemillSettings, steps: int) -> Iterator[tuple[StepReplay, Working] | None]:
    """The replay of a run's steps, and its progress; None on a rank behind the first, which has followed to the end."""
    from tidemill.trainer.job import open_job
    from tidemill.trainer.replay.steps import StepReplay, follow_replay

    run, store, trainer = settings.run, settings.store, settings.trainer
    with open_job(trainer.ranks_timeout_s) as job:
        job.require_same({"run": run, "store": store, "trainer": trainer})
        if not job.ranks.is_first:
            follow_replay(run, store, trainer, job)
            yield None
            return
        with working("replaying", steps) as progress, StepReplay(settings.kafka, run, store, trainer, job) as replay:
            yield replay, progress


def step_range(text: str) -> tuple[int, int]:
    """The first and the last step of `FROM..TO` or of one number. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    first = int(found[1]) if found else 0
    last = int(found[2]) if found and found[2] else first
    if not 1 <= first <= last:
        raise ValueError(f"{text!r} is no range of steps: write FROM..TO, for instance 3..7, from 1 on")
    return first, last


def _halts(numbers: Sequence[int], out: Path | None, first: int, last: int) -> frozenset[int]:
    outside = sorted(number for number in numbers if not first <= number <= last)
    if outside:
        raise ValueError(f"--break-at {outside[0]} is outside of the steps {first} to {last}")
    if bool(numbers) != (out is not None):
        raise ValueError("--break-at and --out go together: which steps to write down, and where")
    return frozenset(numbers)


def _counterfactual(
    settings_of: Callable[[dict[str, Any]], TidemillSettings], assignments: list[str]
) -> TrainerSettings | None:
    tree = parse_assignments(assignments)
    foreign = sorted(set(tree) - {"trainer"})
    if foreign:
        raise ValueError(f"--what-if {foreign[0]}...: a step has no other settings than those of `trainer`")
    return settings_of(tree).trainer if tree else None


def _made(
    replay: StepReplay,
    first: int,
    last: int,
    what_if: TrainerSettings | None,
    halts: frozenset[int],
    out: Path | None,
) -> Iterator[ReplayedStep]:
    """The replayed steps; those to break at are written down before and after."""
    from tidemill.trainer.replay.steps import write_halt, write_metrics

    folders: dict[int, Path] = {}

    def halt(before: Halt) -> None:
        if out is not None and before.record.step in halts:
            folders[before.record.step] = write_halt(out, before)

    for made in replay.run(first, last, what_if=what_if, halt=halt):
        if made.record.step in folders:
            write_metrics(folders[made.record.step], made)
        yield made


def _fingerprint_lines(done: Sequence[ReplayedStep], differing: Sequence[int]) -> list[str]:
    lines = [
        f"step {made.record.step}: {made.fingerprint} "
        + ("as recorded" if made.same else f"differs, recorded {made.record.fingerprint}")
        + f" ({made.seconds:.1f} s)"
        for made in done
    ]
    return [*lines, f"identical: {len(done) - len(differing)} of {len(done)}"]


def _print_metrics(done: Sequence[ReplayedStep], as_csv: bool) -> None:
    rows = []
    for made in done:
        known = made.record.metrics
        rate = ("learning_rate", made.record.learning_rate, made.learning_rate)
        pairs = [rate, *((name, known[name], made.metrics[name]) for name in SHOWN if name in known)]
        rows += [(made.record.step, name, there, here, here - there) for name, there, here in pairs]
    heads = ("step", "metric", "recorded", "what_if", "difference")
    print_rows(heads, rows, as_csv=as_csv, formats={"recorded": ".6g", "what_if": ".6g", "difference": "+.3g"})


def _document(done: Sequence[ReplayedStep], what_if: bool) -> dict[str, Any]:
    return {
        "what_if": what_if,
        "identical": sum(made.same for made in done),
        "total": len(done),
        "first_differing_step": next((made.record.step for made in done if not made.same), None),
        "steps": [
            {
                "step": made.record.step,
                "version": made.record.version,
                "recorded": made.record.fingerprint,
                "replayed": made.fingerprint,
                "same": made.same,
                "seconds": round(made.seconds, 3),
                "metrics": {
                    name: {"recorded": there, "replayed": here} for name, (there, here) in made.metric_changes().items()
                },
            }
            for made in done
        ],
    }


def _staleness_lines(judged: Sequence[JudgedStep], bound: int, first: int | None) -> list[str]:
    lines = []
    for step in judged:
        out = [moved.group_id for moved in step.moved if moved.moved == "excluded"]
        back = [moved.group_id for moved in step.moved if moved.moved == "included"]
        told = f"step {step.step} from version {step.version}: {step.trained} trained, {step.stale} too stale"
        told += "" if step.max_lag is None else f", largest lag {step.max_lag}"
        told += f"; out: {', '.join(out)}" if out else ""
        told += f"; in: {', '.join(back)}" if back else ""
        told += f"; {step.unknown} no longer in the log" if step.unknown else ""
        lines.append(told)
    answer = "no group is judged otherwise" if first is None else f"first step that differs: {first}"
    return [*lines, f"under a bound of {bound}: {answer}"]
