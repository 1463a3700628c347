"""The gate's process: rebuilds the branch's state from the log, then follows the log and writes decisions.

After a decision is written and acknowledged, the gate takes no other until it has read this one back from the log. If
two gates run on one branch, the one that started later continues, and the other stops when it reads its first decision.
The decisions of both before that do no harm, since every gate derives its state from the log.
"""

from __future__ import annotations

import heapq
import logging
import threading
from contextlib import ExitStack

from tidemill.schemas.catalogue import CATALOGUE, Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.gate_decisions import GENERATION
from tidemill.schemas.log.client_settings import LOG_WAIT_S
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.log.liveness import Liveness
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import GateDecision, GateVerdict
from tidemill.schemas.shutdown import stop_on_signals
from tidemill.streams.gate.config import GateSettings
from tidemill.streams.gate.controller import GateController

LOG = logging.getLogger(__name__)
TOPICS = (Topic.MANIFESTS, Topic.ACKS, Topic.GROUPS, Topic.OUTCOMES, Topic.GATE)
"""In the order in which records of equal time are processed: a decision comes after the records that it is based on."""
CLIENT_ID = "tidemill-gate"
POLL_S = 0.1
REBUILD_S = 3600.0
_GRAVE = (GateVerdict.REJECT, GateVerdict.HOLD, GateVerdict.ROLL_BACK)


def event_time(located: ConsumedRecord) -> int:
    """Return the event time of a record, microseconds: `at` of a decision, otherwise the record's timestamp."""
    return located.record.at if isinstance(located.record, GateDecision) else located.timestamp_ms * 1_000


def rebuild(
    kafka: KafkaSettings, run: RunSettings, gate: GateSettings, started_at: int
) -> tuple[GateController, dict[tuple[Topic, int], int]]:
    """Read the log to its end, with all partitions merged by event time, in the order at the time of the decisions.

    Args:
        started_at: microseconds; the new gate's generation is at least this, and greater than any in the log.

    Returns the gate's controller and the next offset of each partition. Raises LookupError if a topic does not exist,
    TimeoutError if the log does not answer.
    """
    controller = GateController(run, gate, float(started_at))
    with ExitStack() as stack:
        readers = []
        for topic in TOPICS:
            # One for each partition: only the records of a partition are read in the order of their times.
            count = CATALOGUE[topic].partition_count(kafka)
            for number in range(count):
                reader = LogReader(kafka, [topic], client_id=CLIENT_ID, share=(number, count))
                readers.append(stack.enter_context(reader))
        # At equal times, records of the earlier topic come first; within a topic, those of the lower partition.
        for located in heapq.merge(*(reader.read_to_end(REBUILD_S) for reader in readers), key=event_time):
            if located.record is not None:
                controller.observe(located.record, event_time(located))
        begin = {place: offset for reader in readers for place, offset in reader.next_offsets().items()}
    controller.generation = max(controller.generation, controller.greatest_generation() + 1)
    return controller, begin


def run(kafka: KafkaSettings, run: RunSettings, gate: GateSettings, stop: threading.Event | None = None) -> None:
    """Run the gate of the run's branch until `stop` is set (if None, until SIGINT or SIGTERM).

    Raises RuntimeError if another gate of the branch started later, DeliveryError, LookupError if a topic is missing.
    """
    stop = stop or stop_on_signals()
    controller, begin = rebuild(kafka, run, gate, now_us())
    state = controller.snapshot()
    served = f"version {state.promoted} is served" if state.promoted >= 0 else "no version is served yet"
    LOG.info("gate of %s/%s: %s; %s", run.run_id, run.branch, state.stage, served)
    awaited: Position | None = None
    """The position of the newest decision of this gate, until it is read back."""

    def observe(located: ConsumedRecord) -> None:
        nonlocal awaited
        if located.record is None:
            if located.value is not None:
                LOG.warning("skipped an unreadable record at %s: %s", located.position, located.error)
            return
        controller.observe(located.record, event_time(located))
        decision = located.record
        if isinstance(decision, GateDecision):
            if awaited is not None and located.offset >= awaited.offset:
                awaited = None
            generation = decision.numbers.get(GENERATION, 0.0)
            if controller.greatest_generation() > controller.generation:
                raise RuntimeError(
                    f"another gate decides for branch {decision.branch} of run {decision.run_id}: it started later, at "
                    f"{generation:.0f}, and wrote {decision.verdict.value} {decision.version} at {located.position}; "
                    "this one stops"
                )

    def decide() -> None:
        """Write the decision that is due, unless the previous one was not read back yet."""
        nonlocal awaited
        for decision in controller.due() if awaited is None else ():
            awaited = producer.send_acked(Topic.GATE, [(decision.branch, decision)])[0]
            level = logging.WARNING if decision.verdict in _GRAVE else logging.INFO
            LOG.log(level, "%s %s: %s", decision.verdict.value, decision.version, decision.reason)

    with (
        RecordProducer(kafka, CLIENT_ID) as producer,
        LogReader(kafka, TOPICS, start=begin, client_id=CLIENT_ID) as reader,
        Liveness("the gate", kafka.stall_timeout_s) as liveness,
    ):
        while not stop.is_set():
            liveness.beat("following the log", LOG_WAIT_S)
            decide()
            for located in reader.poll(POLL_S):
                observe(located)
                decide()
