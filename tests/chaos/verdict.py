"""The checks of a run after a storm: the audit, the replay of its steps, and the same run without the storm.

The audit and the replay are the operator's commands, run in the same way as by an operator. In the deterministic mode
(`trainer.in_order`, one partition) the weights depend only on the groups and their rollouts, so that an undisturbed
trainer must make, from a copy of the two topics, the same chain of versions as the disturbed one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from tests.chaos.course import on_ranks
from tidemill.compose.config import TidemillSettings
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.admin import create_topics
from tidemill.schemas.log.client_settings import consumer_settings, producer_settings
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Manifest, TrainStep

COMMAND_S = 900.0
PREFIX = "undisturbed."
COPIED = (Topic.ROLLOUTS, Topic.GROUPS)
POLL_S = 1.0
SETTLED_S = 60.0

Say = Callable[[str], None]


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


def train_undisturbed(settings: TidemillSettings, config: Path, steps: dict[int, str], say: Say) -> Chains:
    """Train on a copy of the data that the run trained on, to the same last step.

    Args:
        config: the settings file of the run.
        steps: fingerprints that the run's own trainer recorded, by step.
    """
    copy = settings.kafka.model_copy(update={"topic_prefix": PREFIX})
    create_topics(copy)
    for topic in COPIED:
        say(f"copied {_copy(settings.kafka, copy, topic)} records of {topic}")
    store = str(config.parent / "store-undisturbed")
    done = tidemill(
        "train", "--config", str(config), "--topic-prefix", PREFIX, "--max-steps", str(max(steps)),
        "--set", f"store.root={store}", "--set", f"trainer.publish.incarnation={_incarnation(settings.kafka)}",
        "--set", "trainer.min_step_seconds=0",
    )  # fmt: skip
    with LogReader(copy, [Topic.STEPS], client_id="chaos-undisturbed") as reader:
        found = {each.record.step: each.record.fingerprint for each in reader.read_to_end()
                 if isinstance(each.record, TrainStep)}  # fmt: skip
    return Chains(steps, found, done.text)


def _incarnation(kafka: KafkaSettings) -> str:
    """Return the incarnation of the run: rollouts are trained only in the incarnation in which they were sampled."""
    with LogReader(kafka, [Topic.MANIFESTS], client_id="chaos-incarnation") as reader:
        return next(each.record.incarnation for each in reader.read_to_end() if isinstance(each.record, Manifest))


def _copy(source: KafkaSettings, target: KafkaSettings, topic: Topic) -> int:
    """Copy a topic byte by byte to the same offsets, because groups refer to rollouts by offset. Raises RuntimeError
    if the source has gaps."""
    names, copies = Names(source.topic_prefix), Names(target.topic_prefix)
    consumer = Consumer(consumer_settings(source, "chaos-copy", "chaos-copy"))
    producer = Producer(producer_settings(target, "chaos-copy"))
    copied = 0
    try:
        for partition in range(len(consumer.list_topics(names.of(topic)).topics[names.of(topic)].partitions)):
            place = TopicPartition(names.of(topic), partition, 0)
            _, end = consumer.get_watermark_offsets(place, timeout=POLL_S * 10)
            consumer.assign([place])
            expected = 0
            while expected < end:
                message = consumer.poll(POLL_S)
                if message is None or message.error():
                    continue
                if message.offset() != expected:
                    raise RuntimeError(f"{place.topic}[{partition}] has no offset {expected}")
                _, at_ms = message.timestamp()
                producer.produce(
                    copies.of(topic), message.value(), message.key(), partition, timestamp=at_ms,
                    headers=message.headers() or [],
                )  # fmt: skip
                producer.poll(0)
                expected += 1
            copied += expected
            if producer.flush(SETTLED_S):
                raise RuntimeError(f"the copy of {place.topic}[{partition}] was not acknowledged")
    finally:
        consumer.close()
    return copied
