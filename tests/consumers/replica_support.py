"""Helpers of the replica's tests: a subscriber with an engine of plain arrays."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np

from tests.consumers import replica_driver as driver
from tests.consumers.array_engine import ArrayEngine
from tidemill.consumers.replica.config import Pool
from tidemill.consumers.replica.ledger import Ledger, ReplicaStatus
from tidemill.consumers.replica.staging import UpdateStaging, interrupt_if
from tidemill.consumers.replica.state import ReplicaState
from tidemill.consumers.replica.subscriber import Subscriber
from tidemill.kernels.weights.delta_fetch import ChunkFetcher
from tidemill.schemas.records import Manifest, WeightAck

SHAPES = {"a.weight": (40, 30), "b.weight": (500,)}
FETCH_S = 240.0


def small_view(seed: int = 0):
    """Return a few tensors of finite bf16 patterns."""
    random = np.random.default_rng(seed)
    return {name: random.integers(0, 1 << 14, shape, dtype=np.uint16) for name, shape in SHAPES.items()}


def base_directory(directory: Path) -> Path:
    """Make a model directory from which anchors can be written."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


class ArrayReplica:
    """A subscriber with an `ArrayEngine` that serves the version of an anchor."""

    def __init__(self, first: Manifest, chunks, directory: Path, pool=Pool.ALL):
        self.stopped = threading.Event()
        interrupt = interrupt_if(self.stopped.is_set)
        anchor = Path(first.anchor.uri)
        mirror = driver.anchored(anchor, first)
        self.engine = ArrayEngine(first.version, mirror)
        self.acks, self.lags = [], []
        self.state = ReplicaState(first.run_id, first.branch, pool)
        self.state.observe(first)
        status = ReplicaStatus("replica-t", "here", first.run_id, first.branch, "i", 1)
        self.ledger = Ledger(status, self._say, lambda: 0, lambda: self.state.head)
        self.fetcher = ChunkFetcher(chunks, FETCH_S, interrupt=interrupt)
        staging = UpdateStaging(self.fetcher.pieces, directory, interrupt=interrupt)
        self.subscriber = Subscriber(self.engine, self.state, mirror, staging, self.ledger)
        asyncio.run(self.subscriber.begin(first, "start"))

    def _say(self, record):
        (self.acks if isinstance(record, WeightAck) else self.lags).append(record)

    def observe(self, *records):
        """Pass records at once to the subscriber; return the acknowledgements that they caused."""
        before = len(self.acks)
        for record in records:
            self.subscriber.receive(record)
        asyncio.run(self.subscriber.advance())
        return [(ack.status, ack.version, ack.serving_version) for ack in self.acks[before:]]

    def close(self):
        self.subscriber.close()
