"""Kills each broker of a stack in turn, then pauses each, while a producer, a consumer and group assembly work.

Every record is acknowledged by the log (`acks=all`, two replicas at least) before the next is sent, so that the longest
gap between two acknowledgements is the stall that a writer sees. Then the log is read: each acknowledged record must be
there once, the consumer must have received it, and every group must be complete.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli_w
from confluent_kafka import KafkaException

from tests.chaos.site import Brokers, brokers_in
from tests.chaos.storm import FaultKind
from tests.streams.stream_support import RUN_ID, rollout
from tests.waiting import until
from tidemill.compose.processes import Supervisor
from tidemill.producers.rollout.intake import REBALANCING
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.admin import admin_client, create_topics
from tidemill.schemas.log.group import GroupConsumer
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import CloseReason, Group, Rollout

GROUP_SIZE = 4
PARTITIONS = 6
STEADY_S = 4.0
"""Undisturbed time before each kill."""
DOWN_S = 15.0
"""How long each broker is down."""
IN_SYNC_S = 90.0
ASSEMBLED_S = 120.0
POLL_S = 0.2
KINDS = (FaultKind.BROKER_KILL, FaultKind.BROKER_PAUSE)
OFFENCES = ("lost", "twice", "not_consumed", "groups_missing", "groups_wrong")
QUIET = {"log_level": "0"}
"""The clients' logs are off, because their brokers are killed on purpose."""

Say = Callable[[str], None]


@dataclass(slots=True)
class Load:
    """A producer and a consumer, each on its own thread."""

    kafka: KafkaSettings
    acked: list[tuple[float, str]] = field(default_factory=list)
    """When each group's rollouts were acknowledged, in seconds of the monotonic clock, and the group."""
    consumed: set[str] = field(default_factory=set)
    heard: list[float] = field(default_factory=list)
    commits_refused: int = 0
    errors: list[BaseException] = field(default_factory=list)
    _stop_writing: threading.Event = field(default_factory=threading.Event)
    _stop_reading: threading.Event = field(default_factory=threading.Event)
    _threads: dict[str, threading.Thread] = field(default_factory=dict)

    def start(self) -> None:
        """Start both threads."""
        for name, work in (("writer", self._write), ("reader", self._read)):
            self._threads[name] = threading.Thread(target=self._guarded, args=(work,), name=f"chaos-{name}")
            self._threads[name].start()

    def stop_writing(self) -> None:
        """Stop the producer after the current group."""
        self._stop_writing.set()
        self._threads["writer"].join()

    def stop(self) -> None:
        """Stop both threads."""
        self.stop_writing()
        self._stop_reading.set()
        self._threads["reader"].join()

    def check(self) -> None:
        """Raise the error that ended a thread, if there is one."""
        if self.errors:
            raise self.errors[0]

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the main thread raises whatever it was
            self.errors.append(error)

    def _write(self) -> None:
        producer = RecordProducer(self.kafka, "chaos-writer")
        while not self._stop_writing.is_set():
            group = f"g{len(self.acked):06d}"
            records = [rollout(group, index, group_size=GROUP_SIZE) for index in range(GROUP_SIZE)]
            producer.send_acked(Topic.ROLLOUTS, [(group, record) for record in records])
            self.acked.append((time.monotonic(), group))

    def _read(self) -> None:
        member = GroupConsumer(self.kafka, "chaos", [Topic.ROLLOUTS], client_id="chaos-reader")
        try:
            while not self._stop_reading.is_set():
                found = member.poll(0.1, 500)
                self.consumed.update(each.record.rollout_id for each in found if isinstance(each.record, Rollout))
                if found:
                    self.heard.append(time.monotonic())
                    self._commit(member, {(each.topic, each.partition): each.offset + 1 for each in found})
        finally:
            member.close()

    def _commit(self, member: GroupConsumer, offsets: dict[tuple[Topic, int], int]) -> None:
        try:
            member.commit(offsets)
        except KafkaException as error:
            # As in a rollout worker: while its group moves to another broker, a later commit replaces this one.
            if error.args[0].code() not in REBALANCING:
                raise
            self.commits_refused += 1


def roll(directory: Path, count: int, say: Say) -> list[dict[str, Any]]:
    """Take down each of `count` brokers and bring it back, one after the other, with each kind of fault.

    Returns one document for each figure. In the last one, each of `OFFENCES` is 0 if nothing is lost or wrong.
    """
    home = directory / f"brokers-{time.strftime('%Y%m%d-%H%M%S')}"
    home.mkdir(parents=True)
    with brokers_in(home / "kafka", count, say) as brokers:
        kafka = KafkaSettings(bootstrap=brokers.bootstrap, replication_factor=count, partitions=PARTITIONS)
        create_topics(kafka)
        until(lambda: _in_sync(kafka), "the topics' replicas", IN_SYNC_S)
        with Supervisor(home / "logs") as supervisor:
            _start_assembly(supervisor, kafka, home)
            load = Load(kafka.model_copy(update={"client_options": QUIET}))
            load.start()
            try:
                order = [(kind, node + 1) for kind in KINDS for node in range(count)]
                turns = [
                    {"figure": "broker_returned", "kind": kind, "brokers": count, "broker": node,
                     **_turn(brokers, load, supervisor, kind, node, say)}
                    for kind, node in order
                ]  # fmt: skip
                load.stop_writing()
                say(f"{len(load.acked)} groups acknowledged; waiting for consumer and assembly")
                worst = max(turn["write_stall_s"] for turn in turns)
                total = {"figure": "brokers_in_turn", "brokers": count, **_judge(kafka, load, supervisor)}
                return [*turns, {**total, "worst_write_stall_s": worst}]
            finally:
                load.stop()


def _start_assembly(supervisor: Supervisor, kafka: KafkaSettings, home: Path) -> None:
    config = home / "settings.toml"
    stream = {"instance": "stream", "data_dir": str(home / "stream")}
    document = {"kafka": kafka.model_dump(exclude_none=True), "run": {"run_id": RUN_ID}, "stream": stream}
    config.write_text(tomli_w.dumps(document), "utf-8")
    supervisor.start("stream", ["stream", "--config", str(config)])


def _turn(
    brokers: Brokers, load: Load, supervisor: Supervisor, kind: FaultKind, node: int, say: Say
) -> dict[str, float]:
    """Take down a broker and bring it back.

    Returns the longest gap between acknowledgements and the longest time without a record for the consumer, both from
    the fault until the broker was in sync again, and the time from its return until every partition had all replicas in
    sync.
    """
    _wait(lambda: bool(load.heard), load, supervisor, IN_SYNC_S, "anything that the consumer hears")
    begun = len(load.acked)
    steady = time.monotonic() + STEADY_S
    _wait(lambda: time.monotonic() > steady and len(load.acked) > begun, load, supervisor, IN_SYNC_S, "new acks")
    gone = time.monotonic()
    (brokers.kill if kind is FaultKind.BROKER_KILL else brokers.pause)(node)
    say(f"{kind} {node}")
    _wait(lambda: time.monotonic() > gone + DOWN_S, load, supervisor, IN_SYNC_S, "")
    returned = time.monotonic()
    if kind is FaultKind.BROKER_KILL:
        brokers.bring_back()
        brokers.settle()
    else:
        brokers.go_on(node)
    _wait(lambda: _in_sync(load.kafka), load, supervisor, IN_SYNC_S, f"broker {node} in sync")
    end = time.monotonic()
    write_stall_s = _longest_gap([at for at, _ in list(load.acked)], gone, end)
    say(f"broker {node} returned: longest gap between acknowledgements {write_stall_s:.2f} s")
    read_stall_s = _longest_gap(list(load.heard), gone, end)
    return {"write_stall_s": write_stall_s, "read_stall_s": read_stall_s, "in_sync_again_s": round(end - returned, 2)}


def _longest_gap(moments: list[float], begin: float, end: float) -> float:
    before = [at for at in moments if at < begin][-1:]
    return round(
        max((b - a for a, b in pairwise([*before, *(at for at in moments if at >= begin), end])), default=0.0), 3
    )


def _in_sync(kafka: KafkaSettings) -> bool:
    topics = admin_client(kafka).list_topics(timeout=60).topics.values()
    return all(len(part.isrs) == len(part.replicas) for topic in topics for part in topic.partitions.values())


def _judge(kafka: KafkaSettings, load: Load, supervisor: Supervisor) -> dict[str, int]:
    """Count the acknowledged rollouts, and those that are lost or wrong."""
    wanted = {group for _, group in load.acked}
    ids = {f"{group}/{index:03d}" for group in wanted for index in range(GROUP_SIZE)}
    groups: dict[str, Group] = {}
    again = 0
    with LogReader(kafka, [Topic.GROUPS], client_id="chaos-groups") as reader:

        def assembled() -> bool:
            nonlocal again
            found = [each.record for each in reader.poll(POLL_S) if isinstance(each.record, Group)]
            for group in (each for each in found if each.closed_by is not CloseReason.LATE):
                again += group.group_id in groups
                groups.setdefault(group.group_id, group)
            return wanted <= groups.keys() and ids <= load.consumed

        # The verdict contains what is still missing at the end.
        with suppress(AssertionError):
            _wait(assembled, load, supervisor, ASSEMBLED_S, "")
    with LogReader(kafka, [Topic.ROLLOUTS], client_id="chaos-rollouts") as reader:
        seen = Counter(each.record.rollout_id for each in reader.read_to_end() if isinstance(each.record, Rollout))
    return {
        "acknowledged": len(ids),
        "lost": len(ids - seen.keys()),
        "twice": sum(seen[each] > 1 for each in ids),
        "not_consumed": len(ids - load.consumed),
        "groups": len(groups),
        "groups_missing": len(wanted - groups.keys()),
        "groups_wrong": sum(not _whole(groups[name]) for name in wanted & groups.keys()),
        "groups_written_again": again,
        "commits_refused": load.commits_refused,
    }


def _whole(group: Group) -> bool:
    return [m.rollout_id for m in group.members] == [f"{group.group_id}/{i:03d}" for i in range(GROUP_SIZE)]


def _wait(done: Callable[[], bool], load: Load, supervisor: Supervisor, timeout_s: float, what: str) -> None:
    def checked() -> bool:
        load.check()
        supervisor.check()
        return done()

    until(checked, what, timeout_s)
