"""Where a storm is let loose: a local stack of one or three brokers, the demonstration's plan, and its roles.

The roles, their arguments and their settings are the demonstration's own; only sizes are changed, so that a step is
quick, and each role reaches the brokers by a link of its own.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # its stubs re-export nothing

from tests.chaos.keeper import RoleSpec
from tests.chaos.link import Links
from tests.chaos.tally import SINK, STREAM
from tidemill.compose.config import TidemillSettings
from tidemill.compose.demo.command import RECIPE
from tidemill.compose.demo.plan import CONFIG_NAME, DemoPlan
from tidemill.compose.local_log import with_address
from tidemill.compose.options import given, settings_from
from tidemill.compose.processes import Supervisor
from tidemill.compose.stack import LocalStack, StackSettings
from tidemill.schemas.admin import admin_client, create_topics
from tidemill.schemas.catalogue import CATALOGUE, Names, Topic
from tidemill.schemas.config import KafkaSettings

WORKERS = 2
PARTITIONS = 2
SETTINGS = (
    "sink.http_port=0",
    "run.groups_per_step=4",
    "run.max_policy_lag=4",
    "run.skip_no_signal=false",
    "feed.group_size=8",
    "feed.eval_tasks=4",
    "feed.eval_group_size=2",
    "feed.eval_every=0",
    "feed.deadline_s=90",
    "rollout.episode_timeout_s=60",
    "trainer.checkpoint_every=3",
    "trainer.publish.anchor_every=3",
    f"stream.instance={STREAM}",
    "corpus.documents=3000",
    "midtrain.steps=80",
)
"""A run whose steps take seconds, and whose checkpoints and anchors are written often enough to be hit."""
HEAP_MB = 256


def settings_for(
    directory: Path, *, steps: int, seed: int, model: Path | None, changes: Sequence[str] = (), in_order: bool = False
) -> TidemillSettings:
    """Settings of a run below `directory`; `changes` are assignments SECTION.KEY=VALUE that win."""
    flags = given(
        run__seed=seed,
        run__max_steps=steps,
        demo__act="one",
        demo__data_dir=directory,
        demo__model=str(model) if model else None,
        demo__workers=WORKERS,
        kafka__partitions=1 if in_order else PARTITIONS,
        trainer__in_order=in_order or None,
    )
    return settings_from({"config": RECIPE, "assignments": [*SETTINGS, *changes]}, flags)


class Brokers:
    """The brokers of a stack, to kill, pause and bring back. Node numbers count from 1."""

    def __init__(self, settings: StackSettings) -> None:
        self._stack = LocalStack(settings)
        self._returning: list[threading.Thread] = []
        self._failed: list[BaseException] = []
        self._pids: dict[int, int] = {}
        self.bootstrap = ""

    def up(self, say: Callable[[str], None]) -> None:
        """Start what is down, and wait until all serve."""
        status = self._stack.up(say)
        self.bootstrap = status.bootstrap
        self._pids = {node.node_id: node.pid for node in status.nodes if node.pid is not None}

    @property
    def ports(self) -> list[int]:
        """One a broker."""
        return [int(address.rpartition(":")[2]) for address in self.bootstrap.split(",")]

    def kill(self, node: int) -> None:
        """SIGKILL."""
        os.kill(self._pids[node], signal.SIGKILL)

    def bring_back(self) -> None:
        """Start what is down, beside what else goes on; `check` tells when that failed."""
        thread = threading.Thread(target=self._up, name="chaos-brokers")
        thread.start()
        self._returning.append(thread)

    def pause(self, node: int) -> None:
        """SIGSTOP."""
        os.kill(self._pids[node], signal.SIGSTOP)

    def go_on(self, node: int) -> None:
        """SIGCONT."""
        os.kill(self._pids[node], signal.SIGCONT)

    def check(self) -> None:
        """Raise what kept a broker from coming back."""
        if self._failed:
            raise self._failed[0]

    def settle(self) -> None:
        """Wait until every broker that was brought back serves. Raises what kept one from it."""
        for thread in self._returning:
            thread.join()
        self.check()

    def down(self) -> None:
        """Stop them all, paused ones too."""
        for thread in self._returning:
            thread.join()
        for node in self._stack.status().nodes:
            if node.pid is not None:
                os.kill(node.pid, signal.SIGCONT)
        self._stack.down()

    def _up(self) -> None:
        try:
            self.up(lambda _: None)
        except Exception as error:  # noqa: BLE001 - whatever it was, the storm's own thread is to raise it
            self._failed.append(error)


@contextmanager
def brokers_in(directory: Path, count: int, say: Callable[[str], None]) -> Iterator[Brokers]:
    """A stack of its own for the length of the block."""
    brokers = Brokers(StackSettings(data_dir=directory, brokers=count, heap_mb=HEAP_MB))
    try:
        brokers.up(say)
        yield brokers
    finally:
        brokers.down()


@dataclass(frozen=True, slots=True)
class Site:
    """A run that is ready to begin."""

    plan: DemoPlan
    brokers: Brokers
    links: Links
    specs: tuple[RoleSpec, ...]

    @property
    def config(self) -> Path:
        """The settings file of every role."""
        return self.plan.directory / CONFIG_NAME

    @property
    def settings(self) -> TidemillSettings:
        """The run's settings, with the brokers' own address."""
        return self.plan.settings


def role_names(settings: TidemillSettings) -> list[str]:
    """Every role of the loop, the sink included."""
    replicas = [f"replica-{n}" for n in range(settings.demo.replicas)]
    workers = [f"rollout-{n}" for n in range(settings.demo.workers)]
    return ["feed", *workers, STREAM, "train", *replicas, SINK]


@contextmanager
def site_of(settings: TidemillSettings, brokers: int, say: Callable[[str], None]) -> Iterator[Site]:
    """Brokers, links and a plan; the topics are there, no role runs."""
    plan = DemoPlan.of(settings)
    names = role_names(settings)
    with brokers_in(plan.directory / "kafka", brokers, say) as stack, Links(stack.ports, names) as links:
        kafka = with_address(settings.kafka, stack.bootstrap).model_copy(update={"replication_factor": brokers})
        plan = plan.with_log_of(settings.model_copy(update={"kafka": kafka}))
        _share_tasks(kafka)
        create_topics(kafka)
        plan.write_config()
        yield Site(plan, stack, links, tuple(_spec(plan, links, name) for name in names))


def _share_tasks(kafka: KafkaSettings) -> None:
    """Tasks, and what became of them, in several partitions whatever the others have: every worker is to have some."""
    names = Names(kafka.topic_prefix)
    new = [
        NewTopic(names.of(topic), PARTITIONS, replication_factor=kafka.replication_factor,
                 config=CATALOGUE[topic].topic_config())
        for topic in (Topic.TASKS, Topic.PROGRESS)
    ]  # fmt: skip
    client = admin_client(kafka)
    for created in client.create_topics(new).values():
        created.result()


def _spec(plan: DemoPlan, links: Links, name: str) -> RoleSpec:
    arguments = {**dict(plan.loop_roles()), SINK: plan.arguments("sink")}[name]
    scratch = plan.directory / "tmp"
    scratch.mkdir(exist_ok=True)
    environment = {"TIDEMILL_KAFKA__BOOTSTRAP": links.bootstrap(name), "TMPDIR": str(scratch)}
    return RoleSpec(name, arguments, environment)


def make_model(site: Site, supervisor: Supervisor, say: Callable[[str], None]) -> None:
    """Mid-train the tiny model that the run starts from, where none was given. Raises RoleDied."""
    if site.settings.demo.model:
        return
    for name, command in (("documents", ("documents",)), ("midtrain", ("train", "--phase", "midtrain"))):
        say(f"{name}: making the starting model")
        supervisor.start(name, site.plan.arguments(*command))
        while not supervisor.ended(name):
            time.sleep(0.2)
