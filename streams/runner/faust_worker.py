"""The Faust runner: processes inputs at least once, with the state in a changelog topic as a redo log.

The processor's machines make all decisions, one machine for each partition; this module only does the I/O. Invariants:

- for each batch, in this order, each acknowledged by the broker before the next: outputs and dead letters; the steps
  of the redo log (`journal`); then the records are acknowledged;
- so a killed worker continues from the head of each partition, and can only repeat outputs byte for byte;
- one worker reads the partitions of equal number of all inputs; one machine gets them, and observes each record once;
- any failure to read or write ends the worker: a new one continues from the state in the log.

Limits of this runner only: no input and no state topic may be written in transactions. Faust commits past the end
marker of only one transaction at a time, cannot distinguish a marker from a lost record, never reaches the end of a
state topic that ends in a marker, and reads aborted records. So a processor whose input the transactional runner
writes (`batches` and the gate after `join`) needs that runner too, and must keep it for a state that it wrote.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import faust
from aiokafka.errors import BrokerResponseError
from faust.types import TP

from tidemill.schemas.catalogue import is_compacted
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.client_settings import Partition
from tidemill.schemas.log.consumed import ConsumedRecord, decoded
from tidemill.schemas.log.guard import RetentionGap
from tidemill.schemas.log.liveness import EXIT_HUNG
from tidemill.schemas.log.producer import refusal
from tidemill.streams.config import StreamSettings
from tidemill.streams.machine import Output, Processor
from tidemill.streams.runner.base import LOG, STATE_TOPIC_CONFIG, Runner, Write, checked_partitions
from tidemill.streams.runner.faust_access import (
    PositionedTransport,
    broker_credentials,
    faust_settings,
    refuse_transactional_state,
)
from tidemill.streams.runner.journal import partition_of_state
from tidemill.streams.runner.watchdog import STOP_TIMEOUT_S, Watchdog


class FaustRunner(Runner):
    """Runs the partitions that the consumer group assigns to it, in one process."""

    def __init__(self, kafka: KafkaSettings, run: RunSettings, stream: StreamSettings, processor: Processor) -> None:
        super().__init__(kafka, run, stream, processor)
        self._next: dict[TP, int] = {}
        self._reading: set[TP] = set()
        self._writing = asyncio.Lock()
        self._failure: BaseException | None = None
        self._ended = asyncio.Event()
        self._stopping = False
        credentials = broker_credentials(kafka)
        partitions = checked_partitions(kafka, processor)
        self.app = faust.App(self._application, **faust_settings(kafka, stream, partitions, credentials))
        self._transport = PositionedTransport(
            self.app.conf.broker_consumer,
            self.app,
            positions=lambda: self._next,
            fetch_wait_ms=stream.fetch_wait_ms,
            may_have_holes={self._names.of(topic) for topic in processor.inputs if is_compacted(topic)},
            accept_gaps=stream.accept_gaps,
        )
        self.app.transport = self._transport
        inputs = self.app.topic(
            *map(self._names.of, processor.inputs),
            key_type=bytes,
            value_type=bytes,
            key_serializer="raw",
            value_serializer="raw",
            allow_empty=True,
            partitions=partitions,
        )
        self._table = self.app.Table(
            processor.table,
            key_type=bytes,
            value_type=bytes,
            partitions=partitions,
            extra_topic_configs=STATE_TOPIC_CONFIG,
        )
        refuse_transactional_state(kafka, self._table.changelog_topic_name)
        self.app.agent(inputs, name="decide", concurrency=1)(self._work)
        self.app.timer(stream.tick_interval_s, name="ticks")(self._send_ticks)
        self.app.on_partitions_revoked.connect(self._lose, weak=False)
        self.app.on_rebalance_complete.connect(self._restore, weak=False)

    # Reading

    async def _work(self, stream: Any) -> None:  # noqa: ANN401 - a faust stream
        batch: list[Any] = []
        try:
            # Faust would acknowledge a record when the next one is requested, or when an exception leaves the loop.
            manual = stream.noack()
            async for event in manual.events():
                batch.append(event)
                if len(batch) >= self._stream.max_batch or manual.channel.queue.empty():
                    await self._decide(batch, manual)
                    batch = []
        except BaseException as error:
            # Faust would restart the agent with a state in memory that is ahead of the written one.
            self._fail(error)
            raise

    async def _decide(self, batch: Sequence[Any], stream: Any) -> None:  # noqa: ANN401 - faust's own
        generation = self.app.consumer_generation_id
        events = [event for event in batch if event.message.generation_id == generation]
        outputs = [output for event in events for output in self._observe(event.message)]
        await self._write([self.write_of(output) for output in outputs])
        if not self._owns(generation):
            return
        partitions = sorted({event.message.partition for event in events})
        changes = {p: self._journals[p].redo(self._machines[p].take_changes()) for p in partitions}
        for step in zip(*changes.values(), strict=True):
            # The new owner of the partition may have written newer heads, and deletions that depend on them.
            if not self._owns(generation):
                return
            writes = []
            for partition, written in zip(changes, step, strict=True):
                for key, value in written.items():
                    writes.append(Write(self._table.changelog_topic_name, key.encode(), value, partition))
                    # The table's own setter would write the changelog without waiting for an acknowledgement.
                    if value is None:
                        self._table.data.pop(key.encode(), None)
                    else:
                        self._table.data[key.encode()] = value
            await self._write(writes)
        if self._owns(generation):
            for event in events:
                await stream.ack(event)

    def _owns(self, generation: int) -> bool:
        # After a rebalance another worker, or this one from its written heads, decides these records.
        return bool(self._ready and generation == self.app.consumer_generation_id)

    def _observe(self, message: Any) -> list[Output]:  # noqa: ANN401 - a faust message
        """Return the outputs that a record decides; none if the machine has observed it. Raises RuntimeError if
        records before it are missing.
        """
        tp, offset = TP(message.topic, message.partition), message.offset
        expected = self._next[tp]
        if offset < expected:
            return []
        if offset > expected:
            holes = self._transport.holes
            first = holes.first_kept(tp, expected)
            if first is not None:
                self.pass_over(RetentionGap(tp.topic, tp.partition, expected, first))
            # The first record after a seek is the first one still in the log. After it, only compaction may remove
            # records.
            elif tp in self._reading and not holes.take(tp, expected, offset):
                raise RuntimeError(
                    f"{tp.topic}[{tp.partition}] went from offset {expected} to {offset}: the records between were "
                    "lost, or a transactional producer writes to this topic; restart the worker to read from its last "
                    "position"
                )
        self._reading.add(tp)
        self._next[tp] = offset + 1
        record, error = decoded(self._codec, message.value)
        located = ConsumedRecord(
            topic=self._names.parse(message.topic),
            partition=message.partition,
            offset=offset,
            timestamp_ms=round(message.timestamp * 1000),
            key=message.key,
            value=message.value,
            record=record,
            error=error,
        )
        return self._machines[message.partition].observe(located)

    # Writing

    async def _write(self, writes: Sequence[Write]) -> None:
        """Send the writes in order and wait for all acknowledgements."""
        async with self._writing:
            producer = self.app.producer
            waiting: list[Awaitable[Any]] = []
            for w in writes:
                at_s = None if w.timestamp_ms is None else w.timestamp_ms / 1000
                waiting.append(await producer.send(w.topic, w.key, w.value, w.partition, at_s, w.headers))
            for w, acknowledgement in zip(writes, waiting, strict=True):
                try:
                    await acknowledgement
                except BrokerResponseError as error:
                    raise RuntimeError(refusal(w.topic, error.errno, str(error))) from error

    async def _send_ticks(self) -> None:
        try:
            await self._write(list(self.due_ticks()))
        except Exception as error:  # without this, deadlines would silently stop having an effect
            self._fail(error)
            raise

    # State

    async def _restore(self, *_sender: object, **_arguments: object) -> None:
        """Create the machines of the partitions that this worker has now, from the recovered table."""
        try:
            # Faust seeks next, and then empties the queues when it resumes the flow. A record delivered between the two
            # would be dropped and never fetched again, so the flow must remain stopped until then.
            self.app.consumer.stop_flow()
            self.app.flow_control.suspend()
            owned = self.owned(self.app.consumer.assignment())
            states: dict[int, list[tuple[str, bytes]]] = {partition: [] for partition in owned}
            for raw_key, value in list(self._table.data.items()):
                key = raw_key.decode()
                partition = partition_of_state(key, value)
                if partition in states:
                    states[partition].append((key, value))
                else:
                    self._table.data.pop(raw_key, None)
            self._next = {TP(*place): offset for place, offset in self.make_machines(states).items()}
            self._transport.holes.clear()
            self._reading.clear()
        except Exception as error:  # Faust would retry endlessly after any error here
            self._fail(error)
            raise
        self._ready = True

    async def _lose(self, *_sender: object, **_arguments: object) -> None:
        # The next owner reads the state while this worker may still write it: finish the current write, and start no
        # further step.
        self._ready = False
        async with self._writing:
            return

    # Lifecycle

    async def serve(self) -> None:
        """Process records until SIGINT or SIGTERM. Raises RuntimeError if the worker cannot continue."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._ended.set)

        def stalled(stall: str) -> None:
            loop.call_soon_threadsafe(self._fail, RuntimeError(stall))

        def progress() -> tuple[bool, dict[Partition, int]]:
            ready = self._ready
            offsets: Mapping[TP, int | None] = self._next if ready else self.app.tables.recovery.active_offsets
            return ready, {(tp.topic, tp.partition): offset or 0 for tp, offset in list(offsets.items())}

        watchdog = Watchdog(self._kafka, self._stream.stall_timeout_s, progress, stalled)
        watchdog.start()
        self.app.loop = loop
        self.app.finalize()

        def started(start: asyncio.Task[Any]) -> None:
            if not start.cancelled() and (error := start.exception()) is not None:
                self._fail(error)

        start = loop.create_task(self.app.maybe_start())
        start.add_done_callback(started)
        try:
            await self.app.wait(self._ended.wait())
        finally:
            await self._stop(start, watchdog)
        reason = self._failure or self.app.crash_reason
        if reason is not None:
            raise RuntimeError(self.ended(reason)) from reason

    async def _stop(self, start: asyncio.Task[Any], watchdog: Watchdog) -> None:
        self._stopping = True
        start.cancel()
        try:
            await asyncio.wait_for(self.app.stop(), STOP_TIMEOUT_S)
        except TimeoutError:
            # Faust ignores a stop while it joins a group. No data is lost: unwritten records are read again.
            LOG.error("Faust did not stop within %g s: the process ends", STOP_TIMEOUT_S)
            os._exit(EXIT_HUNG)
        finally:
            await asyncio.to_thread(watchdog.stop)

    def _fail(self, error: BaseException) -> None:
        if not self._stopping:
            self._failure = self._failure or error
            self._ended.set()


def serve(kafka: KafkaSettings, run: RunSettings, stream: StreamSettings, processor: Processor) -> None:
    """Run a processor in Faust until SIGINT or SIGTERM. Raises RuntimeError if the worker cannot continue."""
    for name in ("faust", "mode", "aiokafka"):
        logging.getLogger(name).setLevel(stream.log_level)
    Path(stream.data_dir).mkdir(parents=True, exist_ok=True)

    async def work() -> None:
        # Faust's own objects belong to the event loop that runs when they are created.
        await FaustRunner(kafka, run, stream, processor).serve()

    asyncio.run(work())
