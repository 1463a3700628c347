"""Faust's access to Kafka: its settings and credentials, and a corrected transport.

Faust runs at least once, without a web server and with the state's changelog as its only own topic. It uses aiokafka,
which does not know librdkafka's options: its credentials are made from Tidemill's Kafka settings. Certificates and host
names are always verified; no option turns that off here. The transport is corrected in four places:

- Reading continues at the positions in the state topic, not at the group's committed offsets: Faust may commit offsets
  of records whose state changes are still in its buffers (its flush ends after 0.1 s), and a crash would lose them.
- The wait time of fetches can be set. aiokafka has one fetch in flight for each broker, so with Faust's fixed 1.5 s a
  record of a partition that is not in this fetch may wait that long.
- Holes in the log are distinguished from records that Faust drops between fetch and stream, as it does when the flow
  is stopped: a hole is a range that the fetcher itself skips, because compaction removed its records.
- Records that the log deleted before they were read are distinguished from such holes by the first offset in the log:
  aiokafka would continue there silently.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition
from faust.auth import Credentials, SASLCredentials, SSLCredentials
from faust.tables.manager import TableManager
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from yarl import URL

from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.access import FILES, WITH_PASSWORD, Security, SecurityError, security_of, security_options
from tidemill.schemas.log.client_settings import MAX_LETTER_BYTES, METADATA_TIMEOUT_S, groupless_settings
from tidemill.schemas.log.guard import RetentionGap
from tidemill.schemas.log.watermarks import watermarks
from tidemill.streams.config import StreamSettings
from tidemill.streams.runner.base import check_position

LOG = logging.getLogger("tidemill.streams")
TAKEN = frozenset(
    {
        *FILES,
        "security.protocol",
        "ssl.key.password",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.password",
    }
)
ONLY = MappingProxyType(
    {"ssl.endpoint.identification.algorithm": "https", "enable.ssl.certificate.verification": "true"}
)
"""Options that are accepted only with the value that always applies."""


def broker_credentials(kafka: KafkaSettings) -> Credentials | None:
    """Return Faust's credentials for the brokers, and its checks of theirs; None for plain connections.

    Raises SecurityError, also for an option that Faust would ignore.
    """
    security = security_of(kafka)
    given = security_options(kafka.client_options)
    refused = sorted(name for name, value in given.items() if name not in TAKEN and value.lower() != ONLY.get(name))
    if refused:
        raise SecurityError(
            f"kafka.client_options: a stream worker does not support {', '.join(refused)}. It supports "
            f"{', '.join(sorted(TAKEN))}, and always verifies the broker's certificate and host name: leave the others "
            "out of its configuration, and write certificates and keys to PEM files"
        )
    context = _tls(security) if security.encrypted else None
    if not security.sasl:
        return SSLCredentials(context) if context else None
    if security.mechanism not in WITH_PASSWORD:
        raise SecurityError(
            f"kafka.client_options: sasl.mechanism is {security.mechanism!r}, and a stream worker supports only "
            f"{', '.join(WITH_PASSWORD)}: give it a user of one of these, or a listener that asks for a certificate "
            "(security.protocol SSL)"
        )
    return SASLCredentials(
        username=security.user,
        password=security.password.get_secret_value(),
        ssl_context=context,
        mechanism=security.mechanism,
    )


def _tls(security: Security) -> ssl.SSLContext:
    """Return the TLS context of a client that verifies the server. Raises SecurityError for unreadable files."""
    directory = bool(security.ca) and Path(security.ca).is_dir()
    try:
        context = ssl.create_default_context(
            cafile=None if directory else security.ca or None, capath=security.ca if directory else None
        )
    except (ssl.SSLError, OSError) as error:
        raise SecurityError(f"kafka.client_options: ssl.ca.location, {security.ca}: {error}") from error
    if security.certificate or security.key:
        try:
            # Without a password argument, OpenSSL would ask for one at the terminal.
            context.load_cert_chain(security.certificate, security.key or None, security.key_password.get_secret_value)
        except (ssl.SSLError, OSError) as error:
            raise SecurityError(
                f"kafka.client_options: ssl.certificate.location ({security.certificate or 'not set'}), "
                f"ssl.key.location ({security.key or 'not set'}) and ssl.key.password do not match: {error}"
            ) from error
    return context


class _Tables(TableManager):  # type: ignore[misc]  # faust is untyped here
    async def on_start(self) -> None:
        """Start when the agents have started; Faust's own method waits for a second."""
        await self.app.agents.wait_until_agents_started()
        if not self.should_stop:
            await self._update_channels()
            await self.recovery.start()


def faust_settings(
    kafka: KafkaSettings, stream: StreamSettings, partitions: int, credentials: Credentials | None
) -> dict[str, Any]:
    """Return Faust's settings.

    `exactly_once` is not set on purpose: Faust's implementation writes outputs outside of the transaction.
    """
    return {
        "broker": [URL(f"kafka://{address.strip()}") for address in kafka.address().split(",")],
        "broker_client_id": "tidemill-stream",
        "broker_credentials": credentials,
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
        "producer_max_request_size": MAX_LETTER_BYTES,
        "store": "memory://",
        "stream_buffer_maxsize": stream.buffer_records,
        "stream_wait_empty": False,
        "table_standby_replicas": 0,
        "TableManager": _Tables,
        "topic_disable_leader": True,
        "topic_partitions": partitions,
        "topic_replication_factor": kafka.replication_factor,
        "web_enabled": False,
    }


def refuse_transactional_state(kafka: KafkaSettings, topic: str) -> None:
    """Raise RuntimeError if a state topic ends in a transaction marker: Faust would never reach its end."""
    log = Consumer(groupless_settings(kafka, "tidemill-stream-state") | {"enable.partition.eof": True})
    try:
        metadata = log.list_topics(timeout=METADATA_TIMEOUT_S).topics.get(topic)
        for partition in metadata.partitions if metadata else ():
            low, end = watermarks(log, (topic, partition))
            if end == low:
                continue
            log.assign([TopicPartition(topic, partition, end - 1)])
            found = log.poll(METADATA_TIMEOUT_S)
            error = found.error() if found is not None else None
            if error is not None and error.code() == KafkaError._PARTITION_EOF:
                raise RuntimeError(
                    f"the state in {topic} was written by the transactional runner, and Faust cannot read it: use "
                    "`stream.runner=transactional`, or give the processor another `application` name, to start it "
                    "again from the beginning of the log"
                )
    finally:
        log.close()


class OffsetGaps:
    """The holes in the log, by partition: offsets that follow each other although they are not consecutive.

    Recorded in the consumer's thread and queried in the worker's; each hole is queried once.

    Args:
        topics: full names of the topics in which compaction may make holes.
    """

    def __init__(self, topics: Collection[str]) -> None:
        self._topics = topics
        self._next: dict[TP, int] = {}
        self._found: dict[tuple[TP, int], int] = {}
        self._deleted: dict[tuple[TP, int], int] = {}

    def expect(self, tp: TP, offset: int) -> None:
        """Record that the next fetch begins at `offset`."""
        self._next[tp] = offset

    def note(self, tp: TP, offsets: Iterable[int]) -> list[int]:
        """Record the offsets of one fetch, ascending. A lower offset than expected follows a seek and is not a hole.

        Returns the expected offsets that the fetch skipped.
        """
        stepped_over = []
        for offset in offsets:
            expected = self._next.get(tp, offset)
            if offset > expected:
                stepped_over.append(expected)
                if tp.topic in self._topics:
                    self._found[tp, expected] = offset
            self._next[tp] = offset + 1
        return stepped_over

    def note_first(self, tp: TP, stepped_over: Iterable[int], first: int) -> None:
        """Record that the log begins at `first`, so that skipped offsets before it were deleted."""
        self._deleted.update({(tp, expected): first for expected in stepped_over if expected < first})

    def first_kept(self, tp: TP, expected: int) -> int | None:
        """Return the first offset in the log if it deleted the expected one; otherwise None."""
        return self._deleted.pop((tp, expected), None)

    def take(self, tp: TP, expected: int, offset: int) -> bool:
        """Return whether the log has no records in [expected, offset)."""
        return self._found.pop((tp, expected), expected) == offset

    def clear(self) -> None:
        """Delete all entries; the next record of a partition is not checked."""
        self._next.clear()
        self._found.clear()
        self._deleted.clear()


class _ActivePartitions:
    """The partitions that a fetch may return; Faust changes them while the fetch waits.

    aiokafka takes an empty collection for all partitions. This one is never false: otherwise a fetch that waits while
    a rebalance empties it returns records of the state, which Faust drops, and the recovery waits for them forever.
    """

    def __init__(self, partitions: Collection[TP]) -> None:
        self._partitions = partitions

    def __contains__(self, tp: TP) -> bool:
        return tp in self._partitions


class _ConsumerThread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]  # faust is untyped here
    def _create_worker_consumer(self, transport: Any) -> Any:  # noqa: ANN401 - aiokafka's consumer
        consumer = super()._create_worker_consumer(transport)
        # Faust fixes the constructor's argument; aiokafka reads this attribute when the consumer starts.
        consumer._fetch_max_wait_ms = self.transport.fetch_wait_ms
        return consumer

    async def _fetch_records(self, consumer: Any, active: Collection[TP], **options: Any) -> Any:  # noqa: ANN401 - aiokafka's
        found = await super()._fetch_records(consumer, _ActivePartitions(active), **options)
        holes, inputs = self.transport.holes, self.transport.positions()
        noted = {tp: holes.note(tp, [r.offset for r in found[tp]]) for tp in map(TP._make, found) if tp in inputs}
        stepped_over = {tp: expected for tp, expected in noted.items() if expected}
        if stepped_over:
            first = await consumer.beginning_offsets(list(stepped_over))
            for tp, expected in stepped_over.items():
                holes.note_first(tp, expected, first[tp])
        return found


class _Consumer(driver.Consumer):  # type: ignore[misc]  # faust is untyped here
    def _new_consumer_thread(self) -> _ConsumerThread:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def seek_to_committed(self) -> Mapping[TP, int]:
        """Seek to the committed offsets, then to the positions in the state for partitions that have one.

        Raises RetentionGap if records after a position were deleted and gaps are not accepted.
        """
        found = await super().seek_to_committed()
        assigned = self.assignment()
        wanted = {tp: offset for tp, offset in self.transport.positions().items() if tp in assigned}
        ends = await self.highwaters(*wanted) if wanted else {}
        firsts = await self.earliest_offsets(*wanted) if wanted else {}
        for tp, offset in wanted.items():
            check_position(tp.topic, tp.partition, offset, ends.get(tp))
            first = firsts.get(tp, 0)
            if offset == 0 and first > 0:
                LOG.warning("%s[%d] is read from its beginning, which is now offset %d", tp.topic, tp.partition, first)
                continue
            self.transport.holes.expect(tp, offset)
            if offset < first and not self.transport.accept_gaps:
                raise RetentionGap(tp.topic, tp.partition, offset, first)
        if wanted:
            # `seek_wait` runs in the consumer's own thread; `seek` would use aiokafka's futures from this one.
            await self.seek_wait(wanted)
        return {**found, **wanted}


class PositionedTransport(driver.Transport):  # type: ignore[misc]  # faust is untyped here
    """aiokafka transport that continues reading at the positions in the state.

    Args:
        positions: returns the next offset to read, by input partition; called whenever Faust seeks.
        fetch_wait_ms: longest time that a fetch waits for records.
        may_have_holes: full names of the inputs in which compaction may make holes.
        accept_gaps: continue if the log has deleted the next records.
    """

    Consumer = _Consumer

    def __init__(
        self,
        url: Any,  # noqa: ANN401 - a list of yarl URLs
        app: Any,  # noqa: ANN401 - faust.App
        *,
        positions: Callable[[], Mapping[TP, int]],
        fetch_wait_ms: int,
        may_have_holes: Collection[str] = (),
        accept_gaps: bool = False,
    ) -> None:
        super().__init__(url, app)
        self.positions = positions
        self.fetch_wait_ms = fetch_wait_ms
        self.accept_gaps = accept_gaps
        self.holes = OffsetGaps(may_have_holes)
