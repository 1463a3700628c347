"""`tidemill trainer check`: run a trainer of any kind, kill it, and examine the versions that it published.

The trainer is run to its end, run again, and then, under another run id, killed at chosen points and restarted. It
passes if every version of both runs can be built from the log bit for bit, no version was published twice with
different weights, and the killed run ends at the same version as the other one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tidemill.compose.config import load_settings
from tidemill.compose.options import ConfigOption
from tidemill.compose.output import CsvOption, JsonOption, print_rows, working
from tidemill.compose.processes import ChildGuard
from tidemill.compose.stack.kafka import LocalStack, require_tools
from tidemill.consumers.weights.chain import Chain, read_chain
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.admin import create_topics
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import DeltaChunk, Manifest

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

    The check makes its own Kafka and store and deletes them at the end. In the command, `{bootstrap}`,
    `{topic_prefix}`, `{run_id}` and `{store}` are replaced by the place to publish to; the environment has the same as
    TIDEMILL_KAFKA__BOOTSTRAP, TIDEMILL_KAFKA__TOPIC_PREFIX, TIDEMILL_RUN__RUN_ID and TIDEMILL_STORE__ROOT. The command
    must end on its own after a few versions, and continue when it is restarted.

    Example: `tidemill trainer check -- python train.py --kafka {bootstrap} --prefix {topic_prefix} --run {run_id}
    --store {store} --steps 6`
    """
    stack = load_settings(config, {}).stack
    require_tools(stack)

    # The broker is detached from this process, so that an exit without unwinding would leave it running.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="tidemill-trainer-") as root, ChildGuard(Path(root, "kafka")) as guard:
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
    rows = [(finding.check, "passed" if finding.passed else "FAILED", finding.detail) for finding in findings]
    document = {"passed": passed, "checks": findings}
    print_rows(("check", "result", "detail"), rows, as_json=as_json, as_csv=as_csv, document=document)
    raise typer.Exit(0 if passed else 1)


LEAST_VERSIONS = 3
"""An anchor, a delta from it, and a delta from a delta."""
TAIL_LINES = 8
FETCH_TIMEOUT_S = 30.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class TrainerFinding:
    check: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class TrainerTrial:
    """One run of the trainer's command: the place to publish to, and the longest time of a start in seconds."""

    kafka: KafkaSettings
    run: RunSettings
    directory: Path
    command: Sequence[str]
    timeout_s: float
    watch: Callable[[int], None]
    """Called with the process id of each start."""

    def play(self, kill_at: type[Manifest | DeltaChunk] | None = None) -> int | None:
        """Start the command and wait for its end; return its exit status, None if it was killed.

        Args:
            kill_at: DeltaChunk: kill it at the first chunk of a version that has no manifest; Manifest: at the first
                manifest. None: do not kill it.

        Raises TimeoutError if it neither ends nor reaches that point.
        """
        deadline = time.monotonic() + self.timeout_s
        with LogReader(self.kafka, [Topic.DELTAS, Topic.MANIFESTS]) as reader:
            for _ in reader.read_to_end():
                pass
            with self._started() as process:
                while process.poll() is None:
                    if kill_at is not None:
                        found = [one.record for one in reader.poll(POLL_S) if isinstance(one.record, kill_at)]
                        if any(record.run_id == self.run.run_id for record in found):
                            return None
                    if kill_at is None:
                        time.sleep(POLL_S)
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"it did not end within {self.timeout_s:g} s; it printed:\n{self.tail()}")
                return process.returncode

    def tail(self) -> str:
        lines = (self.directory / "trainer.log").read_text("utf-8", errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    @contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        places = {
            "bootstrap": self.kafka.bootstrap,
            "topic_prefix": self.kafka.topic_prefix,
            "run_id": self.run.run_id,
            "store": str(self.directory / "store"),
        }
        environment = {
            **os.environ,
            "TIDEMILL_KAFKA__BOOTSTRAP": places["bootstrap"],
            "TIDEMILL_KAFKA__TOPIC_PREFIX": places["topic_prefix"],
            "TIDEMILL_RUN__RUN_ID": places["run_id"],
            "TIDEMILL_STORE__ROOT": places["store"],
        }
        self.directory.mkdir(exist_ok=True)
        words = list(self.command)
        for name, value in places.items():
            words = [word.replace("{" + name + "}", value) for word in words]
        with (self.directory / "trainer.log").open("ab") as log:
            process = subprocess.Popen(
                words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        try:
            self.watch(process.pid)
            yield process
        finally:
            # Its children are in its process group: all of them end with it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class TrainerFault(Exception):
    """A check failed; the checks after it have no meaning."""

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(detail)
        self.check = check


def examine(
    undisturbed: TrainerTrial, killed: TrainerTrial, kills: int, say: Callable[[str], None]
) -> list[TrainerFinding]:
    """Return the results of the checks, up to the first that fails.

    Args:
        undisturbed, killed: trials of the same command under two run ids.
        kills: the greatest number of kills of the second one; fewer if it ends earlier.
        say: called with each stage.
    """
    findings: list[TrainerFinding] = []

    def passed(check: str, detail: str) -> None:
        findings.append(TrainerFinding(check, True, detail))

    try:
        say("running the trainer to its end")
        _run_to_end("first run", undisturbed)
        first = read_chain(undisturbed.kafka, undisturbed.run)
        found = sorted(first.manifests)
        if len(found) < LEAST_VERSIONS:
            least = f"at least {LEAST_VERSIONS} are needed: an anchor and two deltas"
            raise TrainerFault("first run", f"it published versions {found}; {least}")
        passed("first run", f"{len(found)} versions, {found[0]} to {found[-1]}")
        say("verifying its versions")
        passed("versions of the first run", _verified("versions of the first run", first, undisturbed.kafka))
        say("running it again")
        _run_to_end("second start", undisturbed)
        again = read_chain(undisturbed.kafka, undisturbed.run)
        weights = {version: manifest.fingerprint for version, manifest in first.manifests.items()}
        other = [v for v in found if again.manifests[v].fingerprint != weights[v] or v in again.forks]
        if other:
            raise TrainerFault("second start", f"versions {other} were published again with other weights")
        passed("second start", f"{len(again.manifests) - len(found)} further versions, none again")
        points = {DeltaChunk: 0, Manifest: 0}
        for number in range(kills):
            say(f"kill {number + 1} of {kills}")
            before = read_chain(killed.kafka, killed.run).newest_version
            if killed.play((DeltaChunk, Manifest)[number % 2]) is not None:
                break
            after = read_chain(killed.kafka, killed.run).newest_version
            points[DeltaChunk if after == before else Manifest] += 1
        say("running it to its end after the kills")
        _run_to_end("end after kills", killed)
        chain = read_chain(killed.kafka, killed.run)
        passed("kills", f"{points[DeltaChunk]} before the manifest of a version, {points[Manifest]} after one")
        passed("versions after kills", _verified("versions after kills", chain, killed.kafka))
        if chain.newest_version != found[-1]:
            raise TrainerFault("end after kills", f"version {chain.newest_version}, and {found[-1]} without kills")
        same = sum(v in chain.manifests and chain.manifests[v].fingerprint == weights[v] for v in found)
        passed("end after kills", f"version {found[-1]}; {same} of {len(found)} versions as without kills")
    except TrainerFault as fault:
        findings.append(TrainerFinding(fault.check, False, str(fault)))
    except TimeoutError as error:
        findings.append(TrainerFinding("time", False, str(error)))
    return findings


def _run_to_end(check: str, trial: TrainerTrial) -> None:
    status = trial.play()
    if status != 0:
        raise TrainerFault(check, f"it ended with status {status}; it printed:\n{trial.tail()}")


def _verified(check: str, chain: Chain, kafka: KafkaSettings) -> str:
    from tidemill.consumers.weights.builder import open_builder, verify_chain
    from tidemill.consumers.weights.chain import default_start

    with open_builder(kafka, FETCH_TIMEOUT_S) as builder:
        report = verify_chain(chain, builder, default_start(chain))
    if report.offender is not None:
        raise TrainerFault(check, str(report.offender))
    return f"{report.versions} versions and {report.anchors} anchors, bit for bit"
