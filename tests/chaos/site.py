"""The site of a storm: a local stack of one or three brokers, the demonstration's plan, and its roles.

Each role reaches the brokers through its own link.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # its stubs re-export nothing

from tests.chaos.course import Course, assignments_of, course_of, specs_of
from tests.chaos.keeper import RoleSpec
from tests.chaos.link import Links
from tidemill.compose.config import Act, TidemillSettings
from tidemill.compose.demo.command import DEFAULT_RECIPE, RECIPES
from tidemill.compose.demo.plan import DemoPlan
from tidemill.compose.options import given, settings_from, with_address
from tidemill.compose.processes import Supervisor
from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack
from tidemill.schemas.catalogue import CATALOGUE, Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.admin import admin_client, create_topics

PARTITIONS = 2
WORKERS = 2
HEAP_MB = 256


def settings_for(
    directory: Path,
    act: Act,
    *,
    steps: int,
    seed: int,
    model: Path | None,
    changes: Sequence[str] = (),
    in_order: bool = False,
) -> TidemillSettings:
    """Return the settings of a run below `directory`; `changes` are assignments SECTION.KEY=VALUE with priority."""
    flags = given(
        run__seed=seed,
        run__max_steps=steps if act is Act.ONE else None,
        demo__act=act.value,
        demo__data_dir=directory,
        demo__model=str(model) if model else None,
        demo__workers=WORKERS,
        demo__online_batches=steps,
        kafka__partitions=1 if in_order else PARTITIONS,
        trainer__in_order=in_order or None,
    )
    return settings_from({"config": RECIPES[DEFAULT_RECIPE], "assignments": [*assignments_of(act), *changes]}, flags)


class Brokers:
    """The brokers of a stack, with methods to kill, pause and restart them. Node numbers start at 1."""

    def __init__(self, settings: StackSettings) -> None:
        self._stack = LocalStack(settings)
        self._returning: list[threading.Thread] = []
        self._failed: list[BaseException] = []
        self._pids: dict[int, int] = {}
        self.bootstrap = ""

    def up(self, say: Callable[[str], None]) -> None:
        """Start the brokers that are down, and wait until all serve."""
        status = self._stack.up(say)
        self.bootstrap = status.bootstrap
        self._pids = {node.node_id: node.pid for node in status.nodes if node.pid is not None}

    @property
    def ports(self) -> list[int]:
        """The port of each broker."""
        return [int(address.rpartition(":")[2]) for address in self.bootstrap.split(",")]

    def kill(self, node: int) -> None:
        """Send SIGKILL."""
        os.kill(self._pids[node], signal.SIGKILL)

    def bring_back(self) -> None:
        """Start the brokers that are down, in the background; `check` raises the error if that failed."""
        thread = threading.Thread(target=self._up, name="chaos-brokers")
        thread.start()
        self._returning.append(thread)

    def pause(self, node: int) -> None:
        """Send SIGSTOP."""
        os.kill(self._pids[node], signal.SIGSTOP)

    def go_on(self, node: int) -> None:
        """Send SIGCONT."""
        os.kill(self._pids[node], signal.SIGCONT)

    def check(self) -> None:
        """Raise the error of a broker that could not be restarted, if there is one."""
        if self._failed:
            raise self._failed[0]

    def settle(self) -> None:
        """Wait until every restarted broker serves. Raises the error of one that could not be restarted."""
        for thread in self._returning:
            thread.join()
        self.check()

    def down(self) -> None:
        """Stop all brokers, including paused ones."""
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
    """Run a separate stack for the duration of the block."""
    brokers = Brokers(StackSettings(data_dir=directory, brokers=count, heap_mb=HEAP_MB))
    try:
        brokers.up(say)
        yield brokers
    finally:
        brokers.down()


@dataclass(frozen=True, slots=True)
class Site:
    """A run that is ready to start."""

    plan: DemoPlan
    course: Course
    brokers: Brokers
    links: Links
    specs: tuple[RoleSpec, ...]

    @property
    def config(self) -> Path:
        """The settings file of the trainer and of most other roles."""
        return self.plan.directory / self.course.config_name

    @property
    def settings(self) -> TidemillSettings:
        """The run's settings, with the address of the brokers themselves."""
        return self.plan.settings


@contextmanager
def site_of(settings: TidemillSettings, brokers: int, say: Callable[[str], None], ranks: int = 1) -> Iterator[Site]:
    """Set up brokers, links, topics and a plan, without running roles. The trainer will have `ranks` ranks."""
    plan, course = DemoPlan.of(settings), course_of(settings)
    with brokers_in(plan.directory / "kafka", brokers, say) as stack, Links(stack.ports, course.roles) as links:
        kafka = with_address(settings.kafka, stack.bootstrap).model_copy(update={"replication_factor": brokers})
        plan = plan.with_log_of(settings.model_copy(update={"kafka": kafka}))
        _share_tasks(kafka)
        create_topics(kafka)
        plan.write_config()
        yield Site(plan, course, stack, links, specs_of(plan, course, _environments(plan, course, links), ranks))


def _share_tasks(kafka: KafkaSettings) -> None:
    """Create the topics of tasks and progress, in all modes with several partitions, so that every worker has some."""
    names = Names(kafka.topic_prefix)
    new = [
        NewTopic(names.of(topic), PARTITIONS, replication_factor=kafka.replication_factor,
                 config=CATALOGUE[topic].topic_config())
        for topic in (Topic.TASKS, Topic.PROGRESS)
    ]  # fmt: skip
    client = admin_client(kafka)
    for created in client.create_topics(new).values():
        created.result()


def _environments(plan: DemoPlan, course: Course, links: Links) -> dict[str, dict[str, str]]:
    """Return the environment variables of each role: its address of the brokers and a directory for temporary files."""
    scratch = plan.directory / "tmp"
    scratch.mkdir(exist_ok=True)
    # The engine's sockets are in another directory: the path of a socket may have 107 characters at most.
    kept = {"TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": tempfile.gettempdir()}
    return {name: {"TIDEMILL_KAFKA__BOOTSTRAP": links.bootstrap(name), **kept} for name in course.roles}


def make_model(site: Site, supervisor: Supervisor, say: Callable[[str], None]) -> None:
    """Mid-train the tiny model that the run starts from, if none was given. Raises RuntimeError."""
    if site.settings.demo.model:
        return
    for name, command in (("documents", ("documents",)), ("midtrain", ("train", "--phase", "midtrain"))):
        say(f"{name}: making the starting model")
        supervisor.start(name, site.plan.arguments(*command))
        while not supervisor.ended(name):
            time.sleep(0.2)
