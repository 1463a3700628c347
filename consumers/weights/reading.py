"""Reads a branch's chain from the log, as it is now."""

from __future__ import annotations

from tidemill.consumers.weights.chain import Chain
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.reader import LogReader

CLIENT_ID = "tidemill-weights"


def read_chain(kafka: KafkaSettings, run: RunSettings) -> Chain:
    """Everything that the log says of the run's branch.

    Raises LookupError when the topics do not exist, TimeoutError when the log does not answer.
    """
    chain = Chain(run.run_id, run.branch, kept_from(kafka))
    # One topic after the other: an acknowledgement or a decision means nothing before the manifests are known.
    for topic in (Topic.MANIFESTS, Topic.GATE, Topic.ACKS):
        with LogReader(kafka, [topic], client_id=CLIENT_ID) as reader:
            for located in reader.read_to_end():
                chain.observe(located.record)
    return chain


def kept_from(kafka: KafkaSettings) -> dict[int, int]:
    """First offset that the log keeps of the deltas, by partition."""
    with LogReader(kafka, [Topic.DELTAS], client_id=CLIENT_ID) as reader:
        return {partition: offset for (_, partition), offset in reader.next_offsets().items()}
