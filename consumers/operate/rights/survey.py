"""Reads the topics that hold users' data, to their ends and again from there, for as long as the broker delivers."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from tidemill.consumers.operate.reading import Progress, no_progress, read_whole
from tidemill.consumers.operate.rights.holdings import SWEPT, Holdings
from tidemill.consumers.operate.rights.requests import Demands
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.reader import LogReader

CLIENT_ID = "tidemill-rights"
TELL_EVERY = 500
"""Records between two words about progress."""


class Survey:
    """The topics of users' data, each read forward once however often it is asked for more."""

    def __init__(self, kafka: KafkaSettings, progress: Progress = no_progress) -> None:
        self._progress = progress
        with ExitStack() as opening:
            self._readers = [opening.enter_context(LogReader(kafka, [t], client_id=CLIENT_ID)) for t in SWEPT]
            self._open = opening.pop_all()
        self._from = sum(sum(reader.next_offsets().values()) for reader in self._readers)

    def read_on(self, holdings: Holdings) -> None:
        """Hand over everything up to the ends as they are now. Raises TimeoutError when the broker falls silent."""
        total = sum(sum(reader.end_offsets().values()) for reader in self._readers) - self._from
        for reader in self._readers:
            for n, located in enumerate(read_whole(reader)):
                holdings.observe(located)
                if n % TELL_EVERY == 0:
                    self._progress(self._done(), total)
        self._progress(total, total)

    def partitions(self, topic: Topic) -> list[int]:
        """Partition numbers of a topic. Raises LookupError when it does not exist."""
        return self._readers[0].partitions(topic)

    def _done(self) -> int:
        return sum(sum(reader.next_offsets().values()) for reader in self._readers) - self._from

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def demands_of(kafka: KafkaSettings, user_id: str) -> Demands:
    """What a user has demanded so far."""
    demands = Demands(user_id)
    with LogReader(kafka, [Topic.USER_REQUESTS], client_id=CLIENT_ID) as reader:
        for located in reader.read_to_end():
            demands.observe(located.record)
    return demands
