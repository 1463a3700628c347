"""`tidemill trainer`: check a trainer of your own."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tidemill.compose.config import load_settings
from tidemill.compose.guard import Guard
from tidemill.compose.options import ConfigOption
from tidemill.compose.progress import working
from tidemill.compose.rows import CsvOption, JsonOption, print_rows
from tidemill.compose.stack import LocalStack, require_tools
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.admin import create_topics

trainer_app = typer.Typer(no_args_is_help=True, help="Check a trainer of your own.")


@trainer_app.callback()
def _several() -> None:
    """Check a trainer of your own."""


@trainer_app.command(context_settings={"ignore_unknown_options": True})
def check(
    command: Annotated[list[str], typer.Argument(help="The trainer's command, after `--`.", metavar="COMMAND")],
    kills: Annotated[int, typer.Option(min=0, help="How often the trainer is killed.")] = 6,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one start may take.")] = 600.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Run a trainer of your own, kill it, and check what it published; exit status 1 if a check fails.

    A Kafka and a store are made for it and removed at the end. In the command, `{bootstrap}`, `{topic_prefix}`,
    `{run_id}` and `{store}` are replaced by where it has to publish; the environment has the same as
    TIDEMILL_KAFKA__BOOTSTRAP, TIDEMILL_KAFKA__TOPIC_PREFIX, TIDEMILL_RUN__RUN_ID and TIDEMILL_STORE__ROOT. The command
    must end by itself after a few versions, and continue when it is started again.

    Example: `tidemill trainer check -- python train.py --kafka {bootstrap} --prefix {topic_prefix} --run {run_id}
    --store {store} --steps 6`
    """
    stack = load_settings(config, {}).stack
    require_tools()
    from tidemill.compose.trainer_check import TrainerTrial, examine

    # The broker is detached from this process, so that ending without unwinding would leave it behind.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="tidemill-trainer-") as root, Guard(Path(root, "kafka")) as guard:
        broker = LocalStack(stack.model_copy(update={"data_dir": Path(root, "kafka")}))
        try:
            with working("checking the trainer") as progress:
                progress.say("starting Apache Kafka")
                kafka = KafkaSettings(bootstrap=broker.up().bootstrap, topic_prefix="check.")
                create_topics(kafka)
                undisturbed, killed = (
                    TrainerTrial(kafka, RunSettings(run_id=name), Path(root, name), command, timeout_s, guard.watch)
                    for name in ("undisturbed", "killed")
                )
                findings = examine(undisturbed, killed, kills, progress.say)
        finally:
            broker.down()
    passed = all(finding.passed for finding in findings)
    if as_json:
        typer.echo(json.dumps({"passed": passed, "checks": [asdict(finding) for finding in findings]}, indent=2))
    else:
        rows = [(finding.check, "passed" if finding.passed else "FAILED", finding.detail) for finding in findings]
        print_rows(("check", "result", "detail"), rows, as_csv=as_csv)
    raise typer.Exit(0 if passed else 1)
