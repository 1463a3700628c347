"""The transactional runner: outputs, dead letters, state and offsets of a batch of records in one transaction.

The processor's machines make all decisions, one machine for each partition; this module only does the I/O. Invariants:

- readers of committed records (every reader of Tidemill) see each output once, and never an output without its state;
- a worker continues only from the state topic, read to its end after all transactions there have ended; the offsets in
  the transaction serve lag monitors, and fence a worker that its group has removed: the broker rejects them, and with
  them the transaction;
- all records of a transaction are in the log before its offsets are sent, so that the next owner of a partition waits
  for the end of a transaction that the previous owner may still commit;
- one worker (assignor `range`) reads the partitions of equal number of all inputs and gives them to one machine;
- a transaction that fails is aborted, and its records are decided again from the state in the log.

Ticks are written outside of transactions: they are not outputs, and the inputs remain readable for Faust.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Collection, Iterable
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # its stubs re-export nothing

from tidemill.schemas.codec import RegistryError
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.admin import admin_client, create_missing
from tidemill.schemas.log.client_settings import (
    METADATA_TIMEOUT_S,
    Partition,
    consumer_settings,
    groupless_settings,
    producer_settings,
    raise_lasting,
)
from tidemill.schemas.log.consumed import consumed_record
from tidemill.schemas.log.fenced_producer import CALL_TIMEOUT_S, FENCED, TRANSACTION_TIMEOUT_MS, fence, resumed
from tidemill.schemas.log.guard import OUT_OF_RANGE, RetentionGap
from tidemill.schemas.log.producer import REMEDIES, refusal
from tidemill.schemas.log.watermarks import watermarks
from tidemill.schemas.shutdown import stop_on_signals
from tidemill.streams.config import StreamSettings
from tidemill.streams.machine import Processor
from tidemill.streams.runner.base import (
    LOG,
    STATE_TOPIC_CONFIG,
    Runner,
    Write,
    check_position,
    checked_partitions,
)
from tidemill.streams.runner.watchdog import Watchdog

CLIENT = "tidemill-stream"
CHUNK = 500
"""Most records taken from the client in one call."""
IDLE_S = 0.1
AGAIN_S = 0.5
"""Pause after an aborted transaction."""


class _Stopped(Exception):
    """The worker must end before its state was read to the end."""


class TransactionalRunner(Runner):
    """Runs the partitions that the consumer group assigns to it, in one process and one thread."""

    def __init__(self, kafka: KafkaSettings, run: RunSettings, stream: StreamSettings, processor: Processor) -> None:
        super().__init__(kafka, run, stream, processor)
        self._next: dict[Partition, int] = {}
        self._found: dict[Partition, int] = {}
        """Last offset read of each partition of the state topic, during recovery."""
        self._touched: set[int] = set()
        """Partitions with records in the open transaction; empty while none is open."""
        self._taken = 0
        self._ends_at = self._tick_at = 0.0
        self._stop = threading.Event()
        self._failure: str | None = None
        self._make_changelog(checked_partitions(kafka, processor))
        self._consumer = Consumer(
            {
                **consumer_settings(kafka, CLIENT, self._application),
                "auto.offset.reset": "error",
                "partition.assignment.strategy": "range",
                "fetch.wait.max.ms": stream.fetch_wait_ms,
                "session.timeout.ms": round(stream.session_timeout_s * 1000),
                "heartbeat.interval.ms": round(stream.heartbeat_interval_s * 1000),
                **({"group.instance.id": stream.instance} if stream.instance else {}),
            }
        )
        # The end of the state is known when a fetch brings nothing: such a fetch need not wait.
        to_the_end = {"enable.partition.eof": True, "fetch.wait.max.ms": 10}
        self._state_reader = Consumer(groupless_settings(kafka, f"{CLIENT}-state") | to_the_end)
        # The end of committed records would hide a transaction that may still be committed.
        uncommitted = {"isolation.level": "read_uncommitted"}
        self._log_ends = Consumer(groupless_settings(kafka, f"{CLIENT}-ends") | uncommitted)
        self._producer = Producer(
            {
                **producer_settings(kafka, CLIENT),
                # A restarted worker with the same name ends the open transaction of its predecessor at once.
                "transactional.id": f"{self._application}-{stream.instance or uuid.uuid4().hex}",
                "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
                "delivery.timeout.ms": TRANSACTION_TIMEOUT_MS,
                "linger.ms": 20,
            }
        )
        self._ticks = Producer(producer_settings(kafka, f"{CLIENT}-ticks"))

    def _make_changelog(self, partitions: int) -> None:
        """Create the state topic if it is missing. Raises RuntimeError if it has another partition count."""
        client = admin_client(self._kafka)
        config = {"cleanup.policy": "compact", **STATE_TOPIC_CONFIG}
        topic = NewTopic(self._changelog, partitions, self._kafka.replication_factor, config=config)
        create_missing(client, [topic])
        found = len(client.list_topics(self._changelog, METADATA_TIMEOUT_S).topics[self._changelog].partitions)
        if found != partitions:
            raise RuntimeError(
                f"the state topic {self._changelog} has {found} partitions, and the inputs have {partitions}: give the "
                "processor another `application` name, or delete the state topic"
            )

    # Lifecycle

    def serve(self, stop: threading.Event) -> None:
        """Process records until `stop` is set. Raises RuntimeError if the worker cannot continue."""
        self._stop = stop
        watchdog = Watchdog(
            self._kafka,
            self._stream.stall_timeout_s,
            lambda: (self._ready, dict(self._next if self._ready else self._found)),
            self._end,
        )
        watchdog.start()
        try:
            fence(self._producer)
            self._consumer.subscribe(
                [self._names.of(topic) for topic in self._processor.inputs],
                on_assign=self._assigned,
                on_revoke=self._revoked,
                on_lost=self._lost,
            )
            while not stop.is_set():
                try:
                    self._turn()
                except KafkaException as error:
                    self._restart_transaction(error)
            try:
                self._commit()
            except KafkaException as error:
                LOG.warning("the last transaction was not committed, its records are read again: %s", error.args[0])
        except _Stopped:
            pass
        except (KafkaException, RegistryError, RetentionGap, ValueError) as error:
            raise RuntimeError(self.ended(error)) from error
        finally:
            watchdog.stop()
            # Closing the consumer revokes its partitions, and that would commit an unfinished transaction in part.
            self._forget()
            for client in (self._consumer, self._state_reader, self._log_ends):
                client.close()
        if self._failure is not None:
            raise RuntimeError(self.ended(self._failure))

    def _end(self, reason: object) -> None:
        self._failure = str(reason)
        self._stop.set()

    # Reading

    def _turn(self) -> None:
        """Read and decide available records; commit the transaction when its time or size is reached."""
        now_s = time.monotonic()
        most, wait_s = 1, IDLE_S
        if self._touched:
            most = min(CHUNK, self._stream.transaction_records - self._taken)
            wait_s = max(0.0, min(IDLE_S, self._ends_at - now_s))
        messages = self._consumer.consume(most, wait_s)
        for message in messages:
            self._observe(message)
        now_s = time.monotonic()
        # If more records wait to be read, one larger transaction costs less than two.
        ends_at = self._ends_at + (self._stream.commit_interval_s if len(messages) == most else 0.0)
        if self._touched and (now_s >= ends_at or self._taken >= self._stream.transaction_records):
            self._commit()
        elif not messages:
            # The consumer's own position moves past transaction markers and compacted records.
            for tp in self._consumer.position([TopicPartition(*place) for place in self._next]):
                place = (tp.topic, tp.partition)
                self._next[place] = max(self._next[place], tp.offset)
        if now_s >= self._tick_at:
            self._tick_at = now_s + self._stream.tick_interval_s
            self._send_ticks()

    def _observe(self, message: Message) -> None:
        topic, partition, offset = message.topic() or "", message.partition() or 0, message.offset() or 0
        error = message.error()
        if error is not None:
            if error.code() in OUT_OF_RANGE:
                place = (topic, partition)
                self._next[place] = self._kept(place, self._next[place])
                self._consumer.assign([TopicPartition(*found, offset) for found, offset in self._next.items()])
            # The poll interval was exceeded: the group reacts, and the callbacks report it.
            elif error.code() != KafkaError._MAX_POLL_EXCEEDED:
                raise_lasting(error)
            return
        machine = self._machines.get(partition)
        if machine is None:
            return
        if not self._touched:
            self._producer.begin_transaction()
            self._taken, self._ends_at = 0, time.monotonic() + self._stream.transaction_s
        self._touched.add(partition)
        self._taken += 1
        self._next[topic, partition] = offset + 1
        for output in machine.observe(consumed_record(message, self._names, self._codec)):
            self._write(self.write_of(output))

    def _kept(self, place: Partition, offset: int) -> int:
        """Return the first offset from `offset` on that the log still has. Raises RetentionGap, RuntimeError."""
        first, end = watermarks(self._log_ends, place)
        check_position(*place, offset, end)
        if offset >= first:
            return offset
        if offset == 0:
            LOG.warning("%s[%d] is read from its beginning, which is now offset %d", *place, first)
            return first
        self.pass_over(RetentionGap(*place, offset, first))
        return first

    # Writing

    def _write(self, write: Write) -> None:
        headers: dict[str, str | bytes | None] | None = dict(write.headers) if write.headers else None
        # -1 tells librdkafka to choose the partition from the key.
        partition = -1 if write.partition is None else write.partition
        while True:
            try:
                self._producer.produce(write.topic, write.value, write.key, partition, headers=headers)
            except BufferError:
                self._producer.poll(0.05)
            else:
                return

    def _commit(self) -> None:
        """Commit the open transaction, if any. Raises KafkaException."""
        if not self._touched:
            return
        offsets = []
        for partition in sorted(self._touched):
            machine = self._machines[partition]
            for key, value in self._journals[partition].commit(machine.take_changes()).items():
                self._write(Write(self._changelog, key.encode(), value, partition))
            for topic in self._processor.inputs:
                offsets.append(TopicPartition(self._names.of(topic), partition, machine.next_offset(topic)))
        if self._producer.flush(TRANSACTION_TIMEOUT_MS / 1000):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the log did not accept the transaction's records"))
        member = self._consumer.consumer_group_metadata()
        resumed(lambda timeout_s: self._producer.send_offsets_to_transaction(offsets, member, timeout_s))
        resumed(self._producer.commit_transaction)
        self._touched.clear()

    def _restart_transaction(self, error: KafkaException) -> None:
        """Abort, and decide the records of the transaction again. Raises RuntimeError if that is impossible."""
        cause: KafkaError = error.args[0]
        over = cause.fatal() or cause.code() in (*FENCED, KafkaError._FATAL)
        if not (over or cause.txn_requires_abort() or cause.code() == KafkaError._TIMED_OUT):
            raise error
        if over:
            raise RuntimeError(
                f"{self._processor.name} ended: another worker has the same transactional id ({cause}): two have one "
                "`stream.instance`, or this one was suspended and has been replaced"
            ) from error
        if cause.code() in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD):
            # The log would refuse the same record again. The reason names its topic.
            raise RuntimeError(f"{self._processor.name} ended: {cause.str()}{REMEDIES[cause.code()]}") from error
        LOG.warning("a transaction is aborted, its records are decided again: %s", cause)
        owned = set(self._machines)
        self._abort()
        time.sleep(AGAIN_S)
        if owned:
            self._restore(owned)

    def _abort(self) -> None:
        self._forget()
        # The broker may still be ending the previous transaction, and rejects additions to this one until then. An
        # abort before that names a transaction that the broker does not know, which is fatal for the producer.
        self._producer.flush(CALL_TIMEOUT_S)
        try:
            resumed(self._producer.abort_transaction)
        except KafkaException as error:
            # There may be no open transaction; after a fatal error there is none, and the next call reports the error.
            if error.args[0].code() != KafkaError._STATE and not error.args[0].fatal():
                raise

    def _send_ticks(self) -> None:
        def written(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                # Without the tick, a deadline would have no effect.
                self._end(refusal(message.topic() or "", error.code(), error.str()))

        for tick in self.due_ticks():
            place: dict[str, Any] = {"partition": tick.partition, "timestamp": tick.timestamp_ms}
            self._ticks.produce(tick.topic, tick.value, tick.key, **place, on_delivery=written)
        self._ticks.poll(0)

    # Partitions

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._restore(self.owned([(tp.topic, tp.partition) for tp in partitions]))

    def _revoked(self, consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        try:
            self._commit()
        except KafkaException as error:
            LOG.warning("a transaction is aborted, the next worker decides its records: %s", error.args[0])
            self._abort()
        self._forget()
        consumer.unassign()

    def _lost(self, consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        LOG.warning("the group removed this worker; it joins again")
        self._abort()
        consumer.unassign()

    def _forget(self) -> None:
        for held in (self._machines, self._journals, self._next, self._touched, self._found):
            held.clear()
        self._ready = False

    def _restore(self, partitions: Collection[int]) -> None:
        """Create the machines of these partitions from the log, and continue reading at their next offsets."""
        self._forget()
        written = self._read_state(partitions)
        begin = self.make_machines({partition: found.items() for partition, found in written.items()})
        self._next = {place: self._kept(place, offset) for place, offset in begin.items()}
        self._consumer.assign([TopicPartition(*place, offset) for place, offset in self._next.items()])
        self._ready = True

    def _read_state(self, partitions: Iterable[int]) -> dict[int, dict[str, bytes]]:
        """Return all committed values of the state topic, after all transactions there are committed or aborted."""
        found: dict[int, dict[str, bytes]] = {partition: {} for partition in partitions}
        # Connects this client; otherwise, after a rest, it would notice a new assignment only after 0.5 s.
        self._state_reader.list_topics(self._changelog, METADATA_TIMEOUT_S)
        bounds = {p: watermarks(self._log_ends, (self._changelog, p)) for p in found}
        self._found = {(self._changelog, p): low for p, (low, _) in bounds.items()}
        left = {p: end for p, (low, end) in bounds.items() if end > low}
        self._state_reader.assign([TopicPartition(self._changelog, p, bounds[p][0]) for p in left])
        while left:
            if self._stop.is_set():
                raise _Stopped
            # The client would wait for a whole chunk.
            first = self._state_reader.consume(1, IDLE_S)
            for message in [*first, *self._state_reader.consume(CHUNK, 0.0)]:
                error, partition, offset = message.error(), message.partition() or 0, message.offset() or 0
                if error is None:
                    key, value = (message.key() or b"").decode(), message.value()
                    if value is None:
                        found[partition].pop(key, None)
                    else:
                        found[partition][key] = value
                elif error.code() != KafkaError._PARTITION_EOF:
                    raise_lasting(error)
                    continue
                self._found[self._changelog, partition] = offset
                # The last offset may be a transaction marker, which is not delivered as a message.
                if offset + (error is None) >= left.get(partition, 0):
                    left.pop(partition, None)
        self._state_reader.unassign()
        return found


def serve(kafka: KafkaSettings, run: RunSettings, stream: StreamSettings, processor: Processor) -> None:
    """Run a processor in transactions until SIGINT or SIGTERM. Raises RuntimeError if it cannot continue."""
    stop = stop_on_signals()
    TransactionalRunner(kafka, run, stream, processor).serve(stop)
