"""Replicas without vLLM, one in each region: the other code of a replica, with arrays in memory as the engine.

    python region_followers.py CONFIG

CONFIG is JSON: the log's address for the regions, topic prefix, run, a directory, and for each region the process that
keeps its namespace open. The program is loaded once and forks into each region. The end of standard input ends them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from network.devices import enter_namespace

from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.ledger import Applied, Ledger, Proof, ReplicaStatus
from tidemill.consumers.replica.staging import FOLLOWED, StartVersion, UpdateStaging, join
from tidemill.consumers.replica.state import ReplicaState
from tidemill.consumers.replica.subscriber import Subscriber, follow
from tidemill.kernels.fingerprint import ZERO, TensorKey, fingerprint
from tidemill.kernels.weights.checkpoint import bits_in_memory, map_checkpoint
from tidemill.kernels.weights.delta_fetch import ChunkFetcher
from tidemill.kernels.weights.mirror import ElementChange
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Staleness, WeightAck


class ArrayEngine:
    """The subscriber's engine over arrays in checkpoint coordinates."""

    def __init__(self, directory: Path) -> None:
        self._read(directory)

    async def apply(self, changes: Sequence[ElementChange], version: int) -> Applied:
        """Write changed elements."""
        self._undo = [(change.name, change.indices, self._live[change.name][change.indices]) for change in changes]
        for change in changes:
            self._live[change.name][change.indices] = change.bits
        return Applied(0.0, 0.0, 0.0, 0)

    async def load(self, directory: Path, version: int) -> Applied:
        """Overwrite all elements."""
        self._read(directory)
        return Applied(0.0, 0.0, 0.0, 0)

    async def undo(self) -> None:
        """Undo the last `apply`."""
        for name, indices, bits in self._undo:
            self._live[name][indices] = bits

    async def prove(self) -> Proof:
        """Fingerprint the arrays."""
        made = {name: fingerprint(bits, TensorKey.of(name)) for name, bits in self._live.items()}
        total = sum(made.values(), start=ZERO).hex()
        return Proof(total, {name: value.hex() for name, value in made.items()}, "", 0.0)

    def _read(self, directory: Path) -> None:
        tensors = map_checkpoint(directory)
        self._live = {name: bits_in_memory(tensors, name) for name in tensors}
        self._undo: list[Any] = []


def follow_branch(config: dict[str, Any], region: str, stop: threading.Event) -> None:
    """Join and follow the branch from inside a region until stopped."""
    kafka = KafkaSettings(bootstrap=config["bootstrap"], topic_prefix=config["topic_prefix"])
    run = RunSettings(run_id=config["run_id"])
    settings = ReplicaSettings(replica_id=f"replica-{region}", region=region, fetch_timeout_s=60.0)
    state = ReplicaState(run.run_id, run.branch)
    directory = Path(config["directory"]) / region
    joined = join(kafka, settings, state, directory, stop.is_set)
    if joined is not None:
        asyncio.run(_serve(kafka, run, settings, state, joined, directory, stop))


async def _serve(
    kafka: KafkaSettings, run: RunSettings, settings: ReplicaSettings, state: ReplicaState, joined: StartVersion,
    directory: Path, stop: threading.Event,
) -> None:  # fmt: skip
    stopped = asyncio.Event()
    asyncio.get_running_loop().run_in_executor(None, _forward, stop, asyncio.get_running_loop(), stopped)
    with ExitStack() as stack:
        producer = stack.enter_context(RecordProducer(kafka, settings.replica_id))
        chunks = stack.enter_context(LogReader(kafka, [Topic.DELTAS], start="end", client_id=settings.replica_id))
        records = stack.enter_context(LogReader(kafka, FOLLOWED, start=joined.offsets, client_id=settings.replica_id))

        def say(record: WeightAck | Staleness) -> None:
            topic = Topic.ACKS if isinstance(record, WeightAck) else Topic.STALENESS
            producer.send(topic, record, key=record.replica_id)

        def bury(located: ConsumedRecord, reason: str) -> None:
            raise AssertionError(f"record {located.offset} of {located.topic}: {reason}")

        status = ReplicaStatus(settings.replica_id, settings.region, run.run_id, run.branch, "test", os.getpid())
        ledger = Ledger(status, say, now_us, lambda: state.head)
        staging = UpdateStaging(ChunkFetcher(chunks, settings.fetch_timeout_s), directory)
        subscriber = Subscriber(ArrayEngine(joined.directory), state, joined.mirror, staging, ledger)
        stack.callback(subscriber.close)
        await subscriber.begin(joined.manifest, joined.reason)
        await follow(subscriber, records, bury, stopped, poll_interval_s=settings.poll_interval_s)


def _forward(stop: threading.Event, loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    stop.wait()
    loop.call_soon_threadsafe(stopped.set)


def _child(config: dict[str, Any], region: str, holder: int) -> None:
    enter_namespace(holder)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    follow_branch(config, region, stop)


def main() -> None:
    """Run the replicas; see the module's docstring."""
    config = json.loads(sys.argv[1])
    children = {}
    for region, holder in config["regions"].items():
        pid = os.fork()
        if pid == 0:
            _child(config, region, holder)
            os._exit(0)
        children[pid] = region
    print("forked", flush=True)
    sys.stdin.read()
    for pid in children:
        os.kill(pid, signal.SIGTERM)
    codes = {region: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, region in children.items()}
    sys.exit(max(map(abs, codes.values())))


if __name__ == "__main__":
    main()
