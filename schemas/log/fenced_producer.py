"""Writing records that one process at a time may write: a process that begins to write shuts out the one before.

Each call of `send_acked` is one transaction under a name. What this keeps true:

- a record is in the log once, when the call returns; after an error it is not there, or nobody can tell;
- calls of several threads follow one another;
- once a second process has begun to write under the name, nothing more of the first one's gets into the log: its next
  call raises FencedError, however long it was away.

A transaction's end takes an offset that holds no record.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.access import AccessRefused, check_access
from tidemill.schemas.log.client_settings import DELIVERY_TIMEOUT_MS, producer_settings
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.log.producer import DeliveryError
from tidemill.schemas.records import Record

TRANSACTION_TIMEOUT_MS = 15_000
"""After this a transaction whose writer is gone no longer keeps readers from what lies behind it."""
CALL_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0
"""Longest wait for the log to shut the writer before out."""
FENCED = frozenset({KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})


def resumed(call: Callable[[float], object], within_s: float = 2 * CALL_TIMEOUT_S) -> None:
    """Make a call of the transaction protocol; one that ran out of time is resumed by calling again.

    Raises KafkaException for an error of another kind, or once `within_s` have passed.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            call(CALL_TIMEOUT_S)
        except KafkaException as error:
            if not error.args[0].retriable() or time.monotonic() > deadline:
                raise
        else:
            return


class FencedError(DeliveryError):
    """Another process writes under the name now; nothing that this one had under way is in the log."""


class FencedProducer:
    """Writes records under `name`, which is this process's alone from here on.

    Raises DeliveryError when the log cannot be reached.
    """

    def __init__(self, kafka: KafkaSettings, client_id: str, name: str) -> None:
        self._name = name
        self._names = Names(kafka.topic_prefix)
        self._codec = Codec(kafka.registry_url)
        self._one_call = threading.Lock()
        self._producer = Producer(
            {
                **producer_settings(kafka, client_id),
                "transactional.id": name,
                "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
                "delivery.timeout.ms": TRANSACTION_TIMEOUT_MS,
                "linger.ms": 0,
            }
        )
        try:
            resumed(self._producer.init_transactions, START_TIMEOUT_S)
        except KafkaException as error:
            try:
                check_access(kafka)
            except AccessRefused as refused:
                raise DeliveryError(str(refused)) from refused
            raise self._explained(error) from error

    def send_acked(self, topic: Topic, records: Sequence[tuple[str, Record]]) -> list[Position]:
        """Write (key, record) pairs, all or none, and wait for the log: their positions, in order.

        Raises FencedError when another process has taken over, DeliveryError when the log does not take them,
        ValueError for a record that does not fit its schema.
        """
        with self._one_call:
            values = [(key.encode(), self._codec.encode(record)) for key, record in records]
            deadline = time.monotonic() + DELIVERY_TIMEOUT_MS / 1000
            while True:
                try:
                    return self._transaction(topic, values, deadline)
                except KafkaException as error:
                    if not error.args[0].txn_requires_abort() or time.monotonic() > deadline:
                        raise self._explained(error) from error
                    try:
                        resumed(self._producer.abort_transaction, deadline - time.monotonic())
                    except KafkaException as failure:
                        raise self._explained(failure) from failure

    def _transaction(self, topic: Topic, values: Sequence[tuple[bytes, bytes]], deadline: float) -> list[Position]:
        positions: dict[int, Position] = {}

        def delivered(place: int) -> Any:  # noqa: ANN401 - librdkafka's callback
            def callback(error: KafkaError | None, message: Message) -> None:
                if error is None:
                    positions[place] = Position(topic, message.partition() or 0, message.offset() or 0)

            return callback

        self._producer.begin_transaction()
        for place, (key, value) in enumerate(values):
            self._producer.produce(self._names.of(topic), value, key=key, on_delivery=delivered(place))
        # A record that was not delivered makes the commit fail, and the transaction is begun again.
        self._producer.flush(CALL_TIMEOUT_S)
        resumed(self._producer.commit_transaction, deadline - time.monotonic())
        self._producer.poll(0)
        return [positions[place] for place in range(len(values))]

    def _explained(self, error: KafkaException) -> DeliveryError:
        cause: KafkaError = error.args[0]
        if cause.code() in FENCED:
            return FencedError(
                f"another process has begun to write as {self._name}, so this process can write nothing more: "
                "one of the two was started by mistake, or this process was away and has been replaced; let the other "
                "process continue"
            )
        return DeliveryError(f"the log did not take what {self._name} wrote: {cause}")
