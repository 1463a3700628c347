"""The checks of a run after a storm: the audit, the replay of its steps, and the same run without the storm.

The audit and the replay are the operator's commands, run in the same way as by an operator. In the deterministic mode
(`trainer.in_order`, one partition) the weights depend only on the groups and their rollouts, so that an undisturbed
trainer must make, from a copy of the two topics, the same chain of versions as the disturbed one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.course import on_ranks
from tidemill.compose.config import TidemillSettings
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.admin import create_topics
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Manifest, TrainStep

COMMAND_S = 900.0
PREFIX = "undisturbed."


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a command."""

    status: int
    document: dict[str, Any] | None
    """The JSON that it printed; None if it printed none."""
    text: str
    """The end of its whole output."""

    @property
    def clean(self) -> bool:
        """Whether its exit status was 0."""
        return self.status == 0


def tidemill(*arguments: str, ranks: int = 1) -> Answer:
    """Run a command of the command line to its end, on `ranks` ranks."""
    command = [sys.executable, *on_ranks(ranks), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    return Answer(done.returncode, _json(done.stdout), (done.stdout + done.stderr)[-4000:])


def audit(config: Path, last: int) -> Answer:
    """Run `tidemill audit` for a run that ended with step `last`: each rollout and answer must have exactly one end."""
    return tidemill("audit", "--config", str(config), "--set", f"run.max_steps={last}", "--json", "--complete")


def steps_again(config: Path, last: int, ranks: int) -> Answer:
    """Replay every step of the run from its recorded inputs, undisturbed, on as many ranks as the trainer had."""
    return tidemill("replay", "steps", f"1..{last}", "--config", str(config), "--json", ranks=ranks)


def _json(text: str) -> dict[str, Any] | None:
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else {"answer": document}


@dataclass(frozen=True, slots=True)
class Chains:
    """Fingerprints of the weights after each step."""

    disturbed: dict[int, str]
    undisturbed: dict[int, str]
    said: str
    """The end of the undisturbed trainer's output."""

    @property
    def equal(self) -> bool:
        """Whether both made the same versions, bit for bit, and at least one."""
        return bool(self.disturbed) and self.disturbed == self.undisturbed


def train_undisturbed(settings: TidemillSettings, config: Path, steps: dict[int, str]) -> Chains:
    """Train on a copy of the data that the run trained on, to the same last step.

    Args:
        config: the settings file of the run.
        steps: fingerprints that the run's own trainer recorded, by step.
    """
    copied = tidemill("replay", "copy", "--config", str(config), "--topic", Topic.ROLLOUTS, "--topic", Topic.GROUPS,
                      "--into", PREFIX, "--yes", "--json")  # fmt: skip
    if not copied.clean or copied.document is None:
        return Chains(steps, {}, copied.text)
    copy = settings.kafka.model_copy(update={"topic_prefix": PREFIX})
    create_topics(copy)
    changes = (
        f"store.root={config.parent / 'store-undisturbed'}",
        f"trainer.publish.incarnation={_incarnation(settings.kafka)}",
        f"trainer.accept_replays={json.dumps([copied.document['replay_id']])}",
        "trainer.min_step_seconds=0",
    )
    done = tidemill(
        "train", "--config", str(config), "--topic-prefix", PREFIX, "--max-steps", str(max(steps)),
        *(part for change in changes for part in ("--set", change)),
    )  # fmt: skip
    with LogReader(copy, [Topic.STEPS], client_id="chaos-undisturbed") as reader:
        found = {each.record.step: each.record.fingerprint for each in reader.read_to_end()
                 if isinstance(each.record, TrainStep)}  # fmt: skip
    return Chains(steps, found, done.text)


def _incarnation(kafka: KafkaSettings) -> str:
    """Return the incarnation of the run: rollouts are trained only in the incarnation in which they were sampled."""
    with LogReader(kafka, [Topic.MANIFESTS], client_id="chaos-incarnation") as reader:
        return next(each.record.incarnation for each in reader.read_to_end() if isinstance(each.record, Manifest))
