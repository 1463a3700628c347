"""`tidemill replay steps|staleness` and `tidemill tune corrections`: run the trainer again over the log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.compose.cli.replay_copy import replay_app
from tidemill.compose.cli.tune_command import tune_app
from tidemill.compose.config import TidemillSettings, parse_assignments
from tidemill.compose.options import SettingsOf, TimeoutOption, with_reachable_log, with_settings
from tidemill.compose.output import CsvOption, JsonOption, Working, print_rows, working
from tidemill.trainer.choices import CORRECT_THEMSELVES
from tidemill.trainer.config import TrainerSettings

if TYPE_CHECKING:
    from tidemill.trainer.mismatch import TrainedTokens
    from tidemill.trainer.replay.steps import Halt, ReplayedStep, StepReplay

CORRECTIONS = ("name", "kind", "low", "high", "bias", "variance", "ess", "cut", "error")
SHOWN = ("reward", "online/reward", "loss", "grad_norm", "entropy", "mismatch/k3")
"""Metrics in the table of a counterfactual; the JSON document has all metrics."""


@replay_app.command("steps")
@with_settings
def steps(
    settings_of: SettingsOf,
    which: Annotated[str, typer.Argument(metavar="FROM..TO", help="Steps, both included; or one step.")],
    break_at: Annotated[
        list[int] | None,
        typer.Option("--break-at", metavar="STEP", help="Write this step's inputs and weights; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where --break-at writes.")] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", metavar="trainer.KEY=VALUE", help="A changed setting; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Take recorded optimizer steps again, from the same inputs, settings and seed: the same weights, bit for bit.

    Begins at the nearest checkpoint before the range, or at the starting model of the run, and also takes the steps in
    between. Prints each step's fingerprint next to the recorded one and stops at the first that differs, with
    status 1. Give the original --config. Nothing is published, and nothing is written to the log.

    `--break-at` stops before a step and writes its record, its groups with every token, and its starting weights (a
    Hugging Face checkpoint) below `--out`, then its metrics. `--what-if` takes the steps with other settings from the
    same start: the weights then differ, and the metrics are shown next to each other.

    A step is the same only on the kind of device and the number of ranks on which it was trained:
    `torchrun --nproc-per-node 2 -m tidemill replay steps 1..6`.

    Examples: `tidemill replay steps 1..6 --config run.toml` ·
    `tidemill replay steps 7 --break-at 7 --out step-7` ·
    `tidemill replay steps 4..9 --what-if trainer.optimizer.learning_rate=3e-5`
    """
    first, last = step_range(which)
    halts = frozenset(break_at or ())
    outside = sorted(number for number in halts if not first <= number <= last)
    if outside:
        raise ValueError(f"--break-at {outside[0]} is outside of the steps {first} to {last}")
    if bool(halts) != (out is not None):
        raise ValueError("give --break-at and --out together: the steps to write, and the directory")
    tree = parse_assignments(what_if or [])
    foreign = sorted(set(tree) - {"trainer"})
    if foreign:
        raise ValueError(f"--what-if {foreign[0]}...: only settings of `trainer` change a step")
    if "model" in tree.get("trainer", {}):
        raise ValueError("--what-if trainer.model: recorded steps are taken from the weights of their run")
    changed = settings_of(tree).trainer if tree else None
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
    if changed is not None and not as_json:
        _print_metrics(done, as_csv)
    elif as_json or as_csv:
        heads = ("step", "version", "recorded", "replayed", "same", "seconds")
        document = _document(done, changed is not None)
        rows = ([step[head] for head in heads] for step in document["steps"])
        print_rows(heads, rows, as_json=as_json, as_csv=as_csv, document=document)
    else:
        for made in done:
            recorded = "as recorded" if made.same else f"differs, recorded {made.record.fingerprint}"
            typer.echo(f"step {made.record.step}: {made.fingerprint} {recorded} ({made.seconds:.1f} s)")
        typer.echo(f"identical: {len(done) - len(differing)} of {len(done)}")
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

    Each group is judged at the version from which its step started, by its oldest rollout. After the first step that
    differs, the weights and thus the rollouts would have been different: results for later steps are about the
    recorded groups. Only reads. Status 1 if any group is judged differently.

    Example: `tidemill replay staleness --max-policy-lag 1`
    """
    settings = with_reachable_log(settings_of({}))
    from tidemill.trainer.history import read_steps
    from tidemill.trainer.replay.staleness import MOVED, judge, places_of, read_groups

    with working("judging"):
        recorded = read_steps(settings.kafka, settings.run.run_id)
        groups = read_groups(settings.kafka, places_of(recorded), timeout_s)
        judged = judge(recorded, groups, max_policy_lag)
    first = next((step.step for step in judged if step.moved), None)
    if as_json or as_csv:
        heads = ("step", "version", "bound", "trained", "stale", "max_lag", *MOVED, "unknown")
        rows = (
            (step.step, step.version, step.bound, step.trained, step.stale, step.max_lag,
             *([group.group_id for group in step.moved if group.moved == way] for way in MOVED), step.unknown)
            for step in judged
        )  # fmt: skip
        document = {"bound": max_policy_lag, "first_differing_step": first, "steps": judged}
        print_rows(heads, rows, as_json=as_json, as_csv=as_csv, document=document)
    else:
        for step in judged:
            line = f"step {step.step} from version {step.version}: {step.trained} trained, {step.stale} too stale"
            line += "" if step.max_lag is None else f", largest lag {step.max_lag}"
            for way, word in (("excluded", "out"), ("included", "in")):
                moved = ", ".join(group.group_id for group in step.moved if group.moved == way)
                line += f"; {word}: {moved}" if moved else ""
            line += f"; {step.unknown} no longer in the log" if step.unknown else ""
            typer.echo(line)
        answer = "no group is judged differently" if first is None else f"first step that differs: {first}"
        typer.echo(f"under a bound of {max_policy_lag}: {answer}")
    raise typer.Exit(0 if first is None else 1)


@tune_app.command()
@with_settings
def corrections(
    settings_of: SettingsOf,
    which: Annotated[str, typer.Argument(metavar="FROM..TO", help="Steps, both included; or one step.")],
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Find the correction between sampler and trainer that suits a run, by trying each on its recorded steps.

    Takes the steps again like `tidemill replay steps`, with the run's own settings, and computes, for each published
    correction and for the run's own, its effect on the gradients of these tokens: `bias`, the distance of the
    bounded weights from the ratios of trainer to sampler probability, as a share of the gradient; `variance`, the
    gradient's mean square, 1 with weights of 1; `ess`, the effective sample size of the weights; `cut`, the share of
    tokens whose weight is bounded or 0; `error`, bias and variance together for steps of this size. The correction
    with the smallest error is chosen, or the run's own if its error is at most 1 % larger. Nothing is published, and
    nothing is written to the log.

    The choice is valid for the mismatch of these steps: take some from the start of a run and some from its end.

    Example: `tidemill tune corrections 10..19 --config run.toml`
    """
    first, last = step_range(which)
    settings = with_reachable_log(settings_of({}))
    own = settings.trainer.correction
    from tidemill.trainer.replay.correction_trials import OWN, PUBLISHED, choose_correction, try_corrections

    if settings.trainer.objective in CORRECT_THEMSELVES:
        raise ValueError(
            f"{settings.trainer.objective} has its own correction between sampler and trainer, trainer.behaviour_cap: "
            "there is no correction to choose"
        )
    tokens: list[TrainedTokens] = []
    with open_replay(settings, last - first + 1) as opened:
        if opened is None:
            return
        replay, progress = opened
        for made in replay.run(first, last):
            if made.outcome.trained is not None:
                tokens.append(made.outcome.trained)
            progress(len(tokens), f"step {made.record.step}")
            if not made.same:
                typer.echo(f"step {made.record.step} has other weights than recorded", err=True)
    trials = try_corrections(tokens, {**PUBLISHED, OWN: own})
    rows = [list(asdict(trial).values()) for trial in trials]
    document = {"steps": [first, last], "trials": trials}
    formats = dict.fromkeys(CORRECTIONS[4:], ".4g")
    print_rows(CORRECTIONS, rows, as_json=as_json, as_csv=as_csv, formats=formats, document=document)
    best = choose_correction(trials)
    typer.echo(
        f"chosen: {best.name}: trainer.correction.kind={best.kind}, trainer.correction.low={best.low:g}, "
        f"trainer.correction.high={best.high:g} (error {best.error:.4g})",
        err=True,
    )


@contextmanager
def open_replay(settings: TidemillSettings, steps: int) -> Iterator[tuple[StepReplay, Working] | None]:
    """Yield the replay of a run's steps, and its progress; on other ranks than the first, follow it and yield None."""
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
    """Parse the first and the last step of `FROM..TO` or of one number. Raises ValueError for any other text."""
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    first = int(found[1]) if found else 0
    last = int(found[2]) if found and found[2] else first
    if not 1 <= first <= last:
        raise ValueError(f"{text!r} is no range of steps: write FROM..TO, for instance 3..7, from 1 on")
    return first, last


def _made(
    replay: StepReplay, first: int, last: int, what_if: TrainerSettings | None, halts: frozenset[int], out: Path | None
) -> Iterator[ReplayedStep]:
    """Yield the replayed steps; write those in `halts` before and after."""
    from tidemill.trainer.replay.steps import write_halt, write_metrics

    folders: dict[int, Path] = {}

    def halt(before: Halt) -> None:
        if out is not None and before.record.step in halts:
            folders[before.record.step] = write_halt(out, before)

    for made in replay.run(first, last, what_if=what_if, halt=halt):
        if made.record.step in folders:
            write_metrics(folders[made.record.step], made)
        yield made


def _print_metrics(done: Sequence[ReplayedStep], as_csv: bool) -> None:
    rows = []
    for made in done:
        known = made.record.metrics
        rate = ("learning_rate", made.record.learning_rate, made.outcome.learning_rate)
        pairs = [rate, *((name, known[name], made.outcome.metrics[name]) for name in SHOWN if name in known)]
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
