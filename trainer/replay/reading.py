"""What a replay of the trainer reads beside the recorded inputs; and the producer that it has, which writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NoReturn

from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Group

CLIENT = "tidemill-replay"


class ReadOnlyError(RuntimeError):
    """Something in a replay tried to write to the live log."""


class NoProducer(RecordProducer):
    """Stands where a producer is asked for, and refuses to write: a replay leaves the live topics alone."""

    def __init__(self) -> None:
        """Connects to nothing."""

    def send_bytes(self, full_topic: str, *_value: object, **_options: object) -> NoReturn:
        """Raises ReadOnlyError."""
        raise ReadOnlyError(f"a replay does not write to {full_topic}")

    def flush(self, timeout_s: float = 0.0) -> None:
        """Nothing was queued."""


def read_groups(kafka: KafkaSettings, wanted: Set[Position], silence_s: float) -> Mapping[Position, Group]:
    """The groups at some positions; those that the log no longer holds are left out.

    Raises TimeoutError when the log delivers nothing for `silence_s`.
    """
    with LogReader(kafka, client_id=CLIENT) as reader:
        found = reader.fetch(wanted, silence_s)
    return {position: read.record for position, read in found.items() if isinstance(read.record, Group)}
