"""`tidemill tune corrections`."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.compose.local_log import with_reachable_log
from tidemill.compose.options import with_settings
from tidemill.compose.progress import working
from tidemill.compose.replay.stage import SettingsOf
from tidemill.compose.replay.steps import step_range
from tidemill.compose.rows import CsvOption, JsonOption, print_rows

if TYPE_CHECKING:
    from tidemill.trainer.mismatch import TrainedTokens

HEADS = ("name", "kind", "low", "high", "bias", "variance", "ess", "cut", "error")


@with_settings
def corrections(
    settings_of: SettingsOf,
    which: Annotated[str, typer.Argument(metavar="FROM..TO", help="Steps, both included; or one step.")],
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Find the correction between sampler and trainer that suits a run, by trying each on its recorded steps.

    Makes the steps again as `tidemill replay steps` does, with the run's own settings, and computes for each published
    correction, and for the run's own, what it would have done to the gradients of these tokens: `bias`, how far the
    bounded weights are from the ratios of trainer to sampler probability, as a share of the gradient; `variance`, the
    gradient's mean square, 1 with weights of 1; `ess`, the effective sample size of the weights; `cut`, the share of
    tokens whose weight is bounded or 0; `error`, bias and variance together for steps of this size. The smallest error
    is chosen. Nothing is published, and nothing is written to the log.

    The choice is right for the mismatch of these steps: take some from the beginning of a run and some from its end.

    Example: `tidemill tune corrections 10..19 --config run.toml`
    """
    first, last = step_range(which)
    settings = with_reachable_log(settings_of({}))
    own = settings.trainer.correction
    from tidemill.trainer.choices import CORRECT_THEMSELVES
    from tidemill.trainer.job import open_job
    from tidemill.trainer.replay.correction_trials import PUBLISHED, PublishedCorrection, try_corrections
    from tidemill.trainer.replay.steps import StepReplay, follow_replay

    if settings.trainer.objective in CORRECT_THEMSELVES:
        raise ValueError(
            f"{settings.trainer.objective} holds its own weight between sampler and trainer, trainer.behaviour_cap: "
            "there is no correction to choose"
        )
    tokens: list[TrainedTokens] = []
    with ExitStack() as stack:
        job = stack.enter_context(open_job(settings.trainer.ranks_timeout_s))
        job.require_same({"run": settings.run, "store": settings.store, "trainer": settings.trainer})
        if not job.ranks.is_first:
            follow_replay(settings.run, settings.store, settings.trainer, job)
            return
        progress = stack.enter_context(working("replaying", last - first + 1))
        replay = stack.enter_context(StepReplay(settings.kafka, settings.run, settings.store, settings.trainer, job))
        for made in replay.run(first, last):
            if made.trained is not None:
                tokens.append(made.trained)
            progress(len(tokens), f"step {made.record.step}")
            if not made.same:
                typer.echo(f"step {made.record.step} comes out with other weights than recorded", err=True)
    candidates = (*PUBLISHED, PublishedCorrection("this run", own.kind, own.low, own.high))
    trials = try_corrections(tokens, candidates)
    if as_json:
        typer.echo(json.dumps({"steps": [first, last], "trials": [asdict(trial) for trial in trials]}, indent=2))
    else:
        rows = [list(asdict(trial).values()) for trial in trials]
        print_rows(HEADS, rows, as_csv=as_csv, formats=dict.fromkeys(HEADS[4:], ".4g"))
    best = trials[0]
    typer.echo(
        f"chosen: {best.name}: trainer.correction.kind={best.kind}, trainer.correction.low={best.low:g}, "
        f"trainer.correction.high={best.high:g} (error {best.error:.4g})",
        err=True,
    )
