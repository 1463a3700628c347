"""Helpers of the replica's tests: programs with real engines, and a subscriber with an engine of plain arrays."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from tests.consumers import replica_driver as driver
from tidemill.consumers.replica.config import Pool
from tidemill.consumers.replica.ledger import Applied, Ledger, Proof, ReplicaStatus, WriteRefusedError
from tidemill.consumers.replica.staging import UpdateStaging, interrupt_if
from tidemill.consumers.replica.state import ReplicaState
from tidemill.consumers.replica.subscriber import Subscriber
from tidemill.kernels.fingerprint import ZERO, TensorKey, fingerprint
from tidemill.kernels.weights.checkpoint import bits_in_memory
from tidemill.kernels.weights.delta_fetch import ChunkFetcher
from tidemill.schemas.records import Manifest, WeightAck

ROOT = Path(__file__).parents[2]


def driven(program: str, *arguments: object) -> Any:
    """Run a program of this folder in its own process, as vLLM requires, and return its last line, parsed as JSON."""
    command = [sys.executable, "-m", f"tests.consumers.{program}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


SHAPES = {"a.weight": (40, 30), "b.weight": (500,)}


def small_view(seed: int = 0):
    """Return a few tensors of finite bf16 patterns."""
    random = np.random.default_rng(seed)
    return {name: random.integers(0, 1 << 14, shape, dtype=np.uint16) for name, shape in SHAPES.items()}


def base_directory(directory: Path) -> Path:
    """Make a model directory from which anchors can be written."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


class ArrayEngine:
    """The subscriber's engine on arrays in checkpoint coordinates; its memory can be made to fail."""

    def __init__(self, version, view):
        self.live = {name: bits.reshape(-1).copy() for name, bits in view.items()}
        self.undo_log = []
        self.version = version
        self.lose_writes = self.lose_changes = False
        self.refuse_changes = ""
        self.written = []
        """Elements written by each `apply`."""
        self.loads = 0

    async def apply(self, changes, version):
        if self.refuse_changes:
            raise WriteRefusedError(self.refuse_changes)
        self.undo_log = [(c.name, c.indices, self.live[c.name][c.indices]) for c in changes]
        for change in changes[1 if self.lose_writes or self.lose_changes else 0 :]:
            self.live[change.name][change.indices] = change.bits
        self.written.append(sum(change.indices.size for change in changes))
        self.undo_before, self.version = self.version, version
        return Applied(0.1, 0.2, 1.0, 3)

    async def undo(self):
        if not self.undo_log:
            raise WriteRefusedError("there is no update to undo")
        for name, indices, bits in self.undo_log:
            self.live[name][indices] = bits
        self.version = self.undo_before

    async def load(self, directory, version):
        self.loads += 1
        if not self.lose_writes:
            tensors = driver.map_checkpoint(directory)
            self.live = {name: bits_in_memory(tensors, name) for name in tensors}
        self.version = version
        return Applied(0.1, 0.2, 1.0, 3)

    async def prove(self):
        tensors = {name: fingerprint(bits, TensorKey.of(name)) for name, bits in self.live.items()}
        total = sum(tensors.values(), start=ZERO).hex()
        return Proof(total, {name: value.hex() for name, value in tensors.items()}, "", 0.1)

    def holds(self, view) -> bool:
        """Return whether it serves exactly these weights."""
        return all(np.array_equal(self.live[name], bits.reshape(-1)) for name, bits in view.items())


class ArrayReplica:
    """A subscriber with an `ArrayEngine` that serves the version of an anchor."""

    def __init__(
        self, first: Manifest, chunks, directory: Path, timeout_s: float = 0.5, reason="start", pool=Pool.ALL
    ):  # fmt: skip
        self.stopped = threading.Event()
        interrupt = interrupt_if(self.stopped.is_set)
        anchor = Path(first.anchor.uri)
        mirror = driver.anchored(anchor, first)
        self.engine = ArrayEngine(first.version, {name: mirror.bits(name) for name in mirror.fingerprints})
        self.acks, self.lags = [], []
        self.state = ReplicaState(first.run_id, first.branch, pool)
        self.state.observe(first)
        status = ReplicaStatus("replica-t", "here", first.run_id, first.branch, "i", 1)
        self.ledger = Ledger(status, self._say, lambda: 0, lambda: self.state.head)
        self.fetcher = ChunkFetcher(chunks, timeout_s, interrupt=interrupt)
        staging = UpdateStaging(self.fetcher, directory, interrupt=interrupt)
        self.subscriber = Subscriber(self.engine, self.state, mirror, staging, self.ledger)
        asyncio.run(self.subscriber.begin(first, reason))

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
