"""Replicas without vLLM, one in each region: the other code of a replica, with arrays in memory as the engine.

    python -m tests.system.region_followers CONFIG

CONFIG is JSON: the log's address for the regions, topic prefix, run, a directory, the time for a fetch, and for each
region the process that keeps its namespace open. The program is loaded once and forks into each region. The end of
standard input ends them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.consumers.array_engine import ArrayEngine
from tests.system.network.devices import enter_namespace
from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.ledger import Ledger, ReplicaStatus
from tidemill.consumers.replica.staging import FOLLOWED, StartVersion, UpdateStaging, join
from tidemill.consumers.replica.state import ReplicaState
from tidemill.consumers.replica.subscriber import Subscriber, follow
from tidemill.kernels.weights.delta_fetch import ChunkFetcher
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Staleness, WeightAck


def follow_branch(config: dict[str, Any], region: str, holder: int) -> None:
    """Enter a region, and join and follow the branch from inside until SIGTERM."""
    enter_namespace(holder)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    kafka = KafkaSettings(bootstrap=config["bootstrap"], topic_prefix=config["topic_prefix"])
    run = RunSettings(run_id=config["run_id"])
    timeout_s = config["fetch_timeout_s"]
    settings = ReplicaSettings(replica_id=f"replica-{region}", region=region, fetch_timeout_s=timeout_s)
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
        staging = UpdateStaging(ChunkFetcher(chunks, settings.fetch_timeout_s).pieces, directory)
        engine = ArrayEngine(joined.manifest.version, joined.mirror)
        subscriber = Subscriber(engine, state, joined.mirror, staging, ledger)
        stack.callback(subscriber.close)
        await subscriber.begin(joined.manifest, joined.reason)
        await follow(subscriber, records, bury, stopped, poll_interval_s=settings.poll_interval_s)


def _forward(stop: threading.Event, loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    stop.wait()
    loop.call_soon_threadsafe(stopped.set)


def main() -> None:
    """Run the replicas; see the module's docstring."""
    config = json.loads(sys.argv[1])
    children = {}
    for region, holder in config["regions"].items():
        pid = os.fork()
        if pid == 0:
            follow_branch(config, region, holder)
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
