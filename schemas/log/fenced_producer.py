"""A producer for records that only one process at a time may write: a new process fences the previous one.

Each call of `send_acked` is one transaction under a name. Invariants:

- when the call returns, each record is in the log exactly once; after an error, it is not there, or this is unknown;
- calls from several threads run one after the other;
- after a second process has started to write under the name, the first one cannot write any more: its next call raises
  FencedError, however long it was paused.

The end marker of a transaction uses an offset that contains no record.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.access import AccessRefused, check_access
from tidemill.schemas.log.client_settings import DELIVERY_TIMEOUT_MS, producer_settings
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.log.producer import METADATA_S, DeliveryError
from tidemill.schemas.records import Record

TRANSACTION_TIMEOUT_MS = 15_000
"""Time after which a transaction whose writer has ended no longer blocks readers from the records after it."""
CALL_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0
"""Maximum time to wait until the log has fenced the previous writer."""
FENCED = frozenset({KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})


def resumed(call: Callable[[float], object], within_s: float = 2 * CALL_TIMEOUT_S) -> None:
    """Make a call of the transaction protocol, and repeat it after a timeout, which resumes it.

    Raises KafkaException for an error that is not retriable, or when `within_s` seconds have passed.
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


def fence(producer: Producer) -> None:
    """Prepare a producer for transactions, and fence the previous producer of its name. Raises as `resumed`."""
    # librdkafka loses the request for the name's coordinator if it comes before the connection, and repeats it after
    # 0.5 s.
    with suppress(KafkaException):
        producer.list_topics(timeout=METADATA_S)
    resumed(producer.init_transactions, START_TIMEOUT_S)


class FencedError(DeliveryError):
    """Another process now writes under the name; the unfinished writes of this process are not in the log."""


class FencedProducer:
    """A writer of records under `name`, which from now on only this process may use.

    Raises DeliveryError if the log cannot be reached.
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
            fence(self._producer)
        except KafkaException as error:
            try:
                check_access(kafka)
            except AccessRefused as refused:
                raise DeliveryError(str(refused)) from refused
            raise self._explained(error) from error

    def send_acked(self, topic: Topic, records: Sequence[tuple[str, Record]]) -> list[Position]:
        """Write (key, record) pairs, all or none, wait until they are committed, and return their positions in order.

        Raises FencedError if another process has taken over the name, DeliveryError if the log does not accept the
        records, ValueError for a record that does not fit its schema.
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
        # If a record was not delivered, the commit fails and the transaction is started again.
        self._producer.flush(CALL_TIMEOUT_S)
        resumed(self._producer.commit_transaction, deadline - time.monotonic())
        self._producer.poll(0)
        return [positions[place] for place in range(len(values))]

    def _explained(self, error: KafkaException) -> DeliveryError:
        cause: KafkaError = error.args[0]
        if cause.code() in FENCED:
            return FencedError(
                f"another process has begun to write as {self._name}, so this process can write nothing more: "
                "one of the two was started by mistake, or this process was suspended and has been replaced; let the "
                "other process continue"
            )
        return DeliveryError(f"the log did not accept the records of {self._name}: {cause}")
