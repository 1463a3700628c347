"""Group assembly run by Faust: `rollouts` in, `groups` out, at least once, the state in a changelog topic.

The decisions are `GroupAssembler`'s, one a partition; here is only the talking. Invariants:

- per batch, and in this order: groups and dead letters are acknowledged by the broker; the state that they left is
  written and acknowledged (group states, then the head, then deletions); the records are marked as done;
- so a worker killed anywhere goes on from the head of each partition, and can only repeat groups byte for byte;
- a group goes to the partition with the number of its rollouts' partition;
- any failure to write ends the worker: a fresh one begins from what the log says.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faust
from faust.types import TP
from yarl import URL

from tidemill.schemas.admin import admin_client
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.client_settings import MAX_RECORD_BYTES
from tidemill.schemas.clock import now_us, to_ms
from tidemill.schemas.codec import Codec, DecodeError
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.dead_letter import dead_letter_headers
from tidemill.schemas.located import Located
from tidemill.schemas.records import Group, Tick
from tidemill.streams import group_state
from tidemill.streams.config import StreamSettings
from tidemill.streams.faust_transport import PositionedTransport
from tidemill.streams.group_assembly import AssemblyRules, Changes, GroupAssembler, Output, Rejected
from tidemill.streams.watchdog import Progress, Stall, Watchdog

TABLE = "groups"
STOP_TIMEOUT_S = 20.0
EXIT_STALLED = 70
METADATA_TIMEOUT_S = 20.0
LEADER_POLL_S = 0.1
LOG = logging.getLogger("tidemill.streams")


class StreamFailure(RuntimeError):
    """The stream worker cannot go on; the message says why and what to do."""


def application_id(kafka: KafkaSettings, run: RunSettings, stream: StreamSettings) -> str:
    """Consumer group, and prefix of the state topic: one a run and topic prefix."""
    return f"{kafka.topic_prefix}{stream.application}.{run.run_id}"


def assembly_rules(run: RunSettings, stream: StreamSettings) -> AssemblyRules:
    """The part of the settings that decides outcomes."""
    return AssemblyRules(
        run_id=run.run_id,
        done_ttl_us=int(stream.done_ttl_s * 1_000_000),
        min_completed=stream.min_completed,
        shuffle_rewards=stream.shuffle_rewards,
    )


def checked_partitions(kafka: KafkaSettings) -> int:
    """Partition count shared by `rollouts` and `groups`; waits for their leaders. Raises StreamFailure."""
    names = Names(kafka.topic_prefix)
    wanted = [names.of(Topic.ROLLOUTS), names.of(Topic.GROUPS), names.dead_letter(Topic.ROLLOUTS)]
    client = admin_client(kafka)
    deadline = time.monotonic() + METADATA_TIMEOUT_S
    while True:
        topics = client.list_topics(timeout=METADATA_TIMEOUT_S).topics
        leaders = {n: [p.leader for p in topics[n].partitions.values()] if n in topics else [] for n in wanted}
        if all(found and min(found) >= 0 for found in leaders.values()):
            return _equal_count({name: len(leaders[name]) for name in wanted[:2]})
        missing = " and ".join(name for name, found in leaders.items() if not found)
        if missing:
            raise StreamFailure(f"missing topics: {missing}. Create them with `tidemill topics --create`")
        if time.monotonic() > deadline:
            raise StreamFailure(f"partitions without a leader for {METADATA_TIMEOUT_S:g} s: {leaders}")
        # Leaders of new topics are elected within moments; aiokafka refuses to write to a partition without one.
        time.sleep(LEADER_POLL_S)


def _equal_count(counts: Mapping[str, int]) -> int:
    if len(set(counts.values())) != 1:
        raise StreamFailure(f"groups go where their rollouts lie, so these need equal partition counts: {counts}")
    return next(iter(counts.values()))


def refuse_unsupported(kafka: KafkaSettings) -> None:
    """Raises StreamFailure for client options that Faust would silently go without."""
    secured = sorted(k for k in kafka.client_options if k.startswith(("security.", "sasl.", "ssl.")))
    if secured:
        raise StreamFailure(
            f"the stream worker speaks to Kafka without TLS and SASL only, but the configuration sets {secured}: give "
            "it a plain listener inside of the trusted network"
        )


def faust_settings(kafka: KafkaSettings, stream: StreamSettings, partitions: int) -> dict[str, Any]:
    """Faust's settings: at least once, no web server, no topics of its own but the state's changelog.

    `exactly_once` is left out on purpose: Faust's leaves outputs outside of the transaction.
    """
    return {
        "broker": [URL(f"kafka://{address.strip()}") for address in kafka.address().split(",")],
        "broker_client_id": "tidemill-stream",
        "broker_commit_interval": stream.commit_interval_s,
        "broker_session_timeout": stream.session_timeout_s,
        "broker_heartbeat_interval": stream.heartbeat_interval_s,
        "broker_rebalance_timeout": stream.session_timeout_s,
        "consumer_auto_offset_reset": "earliest",
        "consumer_group_instance_id": stream.instance or None,
        "datadir": Path(stream.data_dir),
        "producer_acks": -1,
        "producer_linger": 0,
        "producer_max_batch_size": 262_144,
        "producer_max_request_size": MAX_RECORD_BYTES,
        "store": "memory://",
        "stream_wait_empty": False,
        "table_standby_replicas": 0,
        "topic_disable_leader": True,
        "topic_partitions": partitions,
        "topic_replication_factor": kafka.replication_factor,
        "web_enabled": False,
    }


@dataclass(frozen=True, slots=True)
class _Write:
    """One record to send."""

    topic: str
    key: bytes | None
    value: bytes | None
    partition: int | None
    headers: Mapping[str, bytes] | None = None
    timestamp_s: float | None = None


class AssemblyWorker:
    """One Faust worker: as many partitions as the consumer group gives it, in one process."""

    def __init__(self, kafka: KafkaSettings, run: RunSettings, stream: StreamSettings) -> None:
        refuse_unsupported(kafka)
        self._kafka = kafka
        self._stream = stream
        self._rules = assembly_rules(run, stream)
        self._names = Names(kafka.topic_prefix)
        self._codec = Codec(kafka.registry_url)
        self._application = application_id(kafka, run, stream)
        self._assemblers: dict[int, GroupAssembler] = {}
        self._failure: BaseException | None = None
        self._ended = asyncio.Event()
        self._stopping = False
        self._reading: set[int] = set()
        self._ready = False
        partitions = checked_partitions(kafka)
        self.app = faust.App(self._application, **faust_settings(kafka, stream, partitions))
        self.app.transport = PositionedTransport(
            self.app.conf.broker_consumer, self.app, positions=self._input_positions, fetch_wait_ms=stream.fetch_wait_ms
        )
        self._rollouts = self.app.topic(
            self._names.of(Topic.ROLLOUTS),
            key_type=bytes,
            value_type=bytes,
            key_serializer="raw",
            value_serializer="raw",
            allow_empty=True,
            partitions=partitions,
        )
        self._table = self.app.Table(
            TABLE,
            key_type=bytes,
            value_type=bytes,
            partitions=partitions,
            # Short segments let compaction keep up, and with it the time that a recovery takes.
            extra_topic_configs={"segment.ms": "3600000", "min.cleanable.dirty.ratio": "0.1"},
        )
        self.app.agent(self._rollouts, name="assemble", concurrency=1)(self._assemble)
        self.app.timer(stream.tick_interval_s, name="ticks")(self._send_ticks)
        self.app.on_partitions_revoked.connect(self._lose, weak=False)
        self.app.on_rebalance_complete.connect(self._restore, weak=False)

    # Reading

    async def _assemble(self, stream: Any) -> None:  # noqa: ANN401 - a faust stream
        batch: list[Any] = []
        try:
            # Faust would acknowledge a record when the next one is asked for, or when an exception leaves the loop.
            manual = stream.noack()
            async for event in manual.events():
                batch.append(event)
                if len(batch) >= self._stream.max_batch or manual.channel.queue.empty():
                    await self._decide(batch, manual)
                    batch = []
        except BaseException as error:
            # Faust would start the agent anew, over a state in memory that is ahead of what was written.
            self._fail(error)
            raise

    async def _decide(self, batch: Sequence[Any], stream: Any) -> None:  # noqa: ANN401 - faust's own
        generation = self.app.consumer_generation_id
        events = [event for event in batch if event.message.generation_id == generation]
        outputs = [(e.message.partition, output) for e in events for output in self._observe(e)]
        await self._write([self._output_write(partition, output) for partition, output in outputs])
        if not self._owns(generation):
            return
        partitions = sorted({event.message.partition for event in events})
        changes = {p: self._assemblers[p].take_changes() for p in partitions}
        await self._write([write for p, change in changes.items() for write in self._state_writes(p, change)])
        if self._owns(generation):
            for event in events:
                await stream.ack(event)

    def _owns(self, generation: int) -> bool:
        # After a rebalance somebody else, or this worker from its written heads, decides these records.
        return bool(generation == self.app.consumer_generation_id)

    def _observe(self, event: Any) -> list[Output]:  # noqa: ANN401 - a faust event
        message = event.message
        record, error = None, ""
        try:
            record = self._codec.decode(message.value)
        except DecodeError as failure:
            error = str(failure)
        located = Located(
            topic=Topic.ROLLOUTS,
            partition=message.partition,
            offset=message.offset,
            timestamp_ms=round(message.timestamp * 1000),
            key=message.key,
            value=message.value,
            record=record,
            error=error,
        )
        assembler = self._assemblers[message.partition]
        self._check_gap(message.partition, message.offset, assembler.next_offset)
        return assembler.observe(located)

    def _check_gap(self, partition: int, offset: int, expected: int) -> None:
        # The first record after a seek is what the broker still has; from there on the log has no holes.
        if offset > expected and partition in self._reading:
            raise StreamFailure(
                f"partition {partition} went from offset {expected} to {offset}: records were lost on the way, or a "
                "transactional producer writes to this topic; start the worker again to read from its last position"
            )
        self._reading.add(partition)

    # Writing

    def _output_write(self, partition: int, output: Output) -> _Write:
        match output:
            case Group():
                record = self._codec.encode(output)
                return _Write(self._names.of(Topic.GROUPS), output.group_id.encode(), record, partition)
            case Rejected(located, reason):
                headers = dead_letter_headers(self._names, located, reason, self._application)
                topic = self._names.dead_letter(Topic.ROLLOUTS)
                timestamp_s = located.timestamp_ms / 1000
                # aiokafka refuses a record without key and value; the reason still says that the value was a tombstone.
                value = b"" if located.key is None and located.value is None else located.value
                return _Write(topic, located.key, value, None, headers, timestamp_s)

    def _state_writes(self, partition: int, changes: Changes) -> list[_Write]:
        topic = self._table.changelog_topic_name
        head_key, head = changes.head
        entries: list[tuple[str, bytes | None]] = [
            *changes.states.items(),
            (head_key, head),
            *((key, None) for key in changes.forgotten),
        ]
        for key, value in entries:
            self._remember(key.encode(), value)
        return [_Write(topic, key.encode(), value, partition) for key, value in entries]

    def _remember(self, key: bytes, value: bytes | None) -> None:
        # The table's own setter would write the changelog without an acknowledgement to wait for.
        if value is None:
            self._table.data.pop(key, None)
        else:
            self._table.data[key] = value

    async def _write(self, writes: Sequence[_Write]) -> None:
        """Send in order and wait for every acknowledgement."""
        producer = self.app.producer
        waiting: list[Awaitable[Any]] = [
            await producer.send(w.topic, w.key, w.value, w.partition, w.timestamp_s, w.headers) for w in writes
        ]
        for acknowledgement in waiting:
            await acknowledgement

    async def _send_ticks(self) -> None:
        # Kafka keeps milliseconds: a tick must not fall short of the deadline that it is sent for.
        now_ms = to_ms(now_us())
        due = [p for p, a in self._assemblers.items() if (a.next_deadline_us() or now_ms * 1000 + 1) <= now_ms * 1000]
        tick = self._codec.encode(Tick(source=self._application, at=now_ms * 1000))
        topic = self._names.of(Topic.ROLLOUTS)
        await self._write([_Write(topic, None, tick, partition, None, now_ms / 1000) for partition in due])

    # State

    async def _restore(self, *_sender: object, **_arguments: object) -> None:
        """Build the assemblers of the partitions that this worker has now from the recovered table."""
        # Faust seeks next, and then empties the queues as it resumes the flow. A record delivered between the two would
        # be dropped and never fetched again, so nothing may flow until then.
        self.app.consumer.stop_flow()
        self.app.flow_control.suspend()
        topic = self._names.of(Topic.ROLLOUTS)
        owned = {tp.partition for tp in self.app.consumer.assignment() if tp.topic == topic}
        states: dict[int, list[tuple[str, group_state.State]]] = {partition: [] for partition in owned}
        for key, value in list(self._table.data.items()):
            state = group_state.decode(value)
            if state.partition in owned:
                states[state.partition].append((key.decode(), state))
            else:
                self._table.data.pop(key, None)
        self._assemblers = {p: GroupAssembler(p, self._rules, found) for p, found in states.items()}
        self._reading.clear()
        self._ready = True

    async def _lose(self, *_sender: object, **_arguments: object) -> None:
        self._ready = False

    def _input_positions(self) -> Mapping[TP, int]:
        topic = self._names.of(Topic.ROLLOUTS)
        return {TP(topic, p): a.next_offset for p, a in self._assemblers.items() if a.next_offset}

    # Life

    async def serve(self) -> None:
        """Work until SIGINT or SIGTERM. Raises StreamFailure when the worker cannot go on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._ended.set)
        watchdog = self._watchdog(loop)
        self.app.loop = loop
        self.app.finalize()
        start = loop.create_task(self.app.maybe_start())
        try:
            await self.app.wait(self._ended.wait())
        finally:
            await self._stop(start, watchdog)
        reason = self._failure or self.app.crash_reason
        if reason is not None:
            raise StreamFailure(f"group assembly ended: {reason}") from reason

    async def _stop(self, start: asyncio.Task[Any], watchdog: Watchdog | None) -> None:
        self._stopping = True
        start.cancel()
        try:
            await asyncio.wait_for(self.app.stop(), STOP_TIMEOUT_S)
        except TimeoutError:
            # A worker that joins a group does not hear a stop. Nothing is lost: what was not written is read again.
            LOG.error("Faust did not stop within %g s; ending the process", STOP_TIMEOUT_S)
            os._exit(EXIT_STALLED)
        finally:
            if watchdog:
                await asyncio.to_thread(watchdog.stop)

    def _fail(self, error: BaseException) -> None:
        if not self._stopping:
            self._failure = self._failure or error
            self._ended.set()

    def _watchdog(self, loop: asyncio.AbstractEventLoop) -> Watchdog | None:
        if not self._stream.stall_timeout_s:
            return None

        def end(stall: Stall) -> None:
            LOG.error("%s", stall)
            loop.call_soon_threadsafe(self._fail, StreamFailure(str(stall)))
            # A hung event loop never gets there.
            threading.Timer(STOP_TIMEOUT_S, os._exit, [EXIT_STALLED]).start()

        topic = self._names.of(Topic.ROLLOUTS)
        watchdog = Watchdog(self._kafka, topic, self._stream.stall_timeout_s, self._progress, end)
        watchdog.start()
        return watchdog

    def _progress(self) -> Progress:
        if self._ready:
            return Progress(True, {partition: a.next_offset for partition, a in self._assemblers.items()})
        recovered = self.app.tables.recovery.active_offsets
        return Progress(False, {tp.partition: offset or 0 for tp, offset in list(recovered.items())})


def run(kafka: KafkaSettings, run: RunSettings, stream: StreamSettings) -> None:
    """Assemble groups until SIGINT or SIGTERM. Raises StreamFailure when the worker cannot go on."""
    logging.basicConfig(level=stream.log_level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("faust").setLevel(stream.log_level)
    logging.getLogger("mode").setLevel(stream.log_level)
    logging.getLogger("aiokafka").setLevel(stream.log_level)
    Path(stream.data_dir).mkdir(parents=True, exist_ok=True)

    async def work() -> None:
        await AssemblyWorker(kafka, run, stream).serve()

    asyncio.run(work())
