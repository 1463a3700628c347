"""Several connections to the log, each for its share of the partitions: one alone is slow over a long or lossy way.

A client keeps one connection to a broker, whose window grows with every round trip and shrinks with every loss. Shards
lie in partitions of their own, so that they can come over several connections at once. A connection is idle for a round
trip between an answer of the log and the next, so that an answer is to carry several chunks.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tidemill.kernels.weights.delta_fetch import ChunkFetcher
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Manifest, ShardPosition


class SharedFetcher:
    """The fetchers of all connections as one; a partition is always read over the same one.

    Args:
        fetchers: the n-th of them reads the partitions of number n modulo their count.
    """

    def __init__(self, fetchers: Sequence[ChunkFetcher]) -> None:
        self._fetchers = fetchers

    def pieces(self, manifest: Manifest, shard: ShardPosition) -> Generator[bytes, None, None]:
        """The bytes of one shard, as `ChunkFetcher.pieces`."""
        return self._fetchers[shard.partition % len(self._fetchers)].pieces(manifest, shard)


@contextmanager
def open_fetcher(
    kafka: KafkaSettings, timeout_s: float, connections: int, client_id: str, fetch_bytes: int
) -> Iterator[SharedFetcher]:
    """A fetcher of deltas over so many connections, following the log from its end on.

    Args:
        timeout_s: how long a chunk may take after the last one that came.
        fetch_bytes: the most that one answer of the log carries over a connection.

    Raises LookupError when the topic does not exist.
    """
    with ExitStack() as stack:
        readers = [
            LogReader(
                kafka,
                [Topic.DELTAS],
                start="end",
                client_id=f"{client_id}-{n}",
                share=(n, connections),
                fetch_bytes=fetch_bytes,
            )
            for n in range(connections)
        ]
        for reader in readers:
            stack.enter_context(reader)
        yield SharedFetcher([ChunkFetcher(reader, timeout_s) for reader in readers])
