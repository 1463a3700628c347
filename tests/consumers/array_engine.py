"""The engine of a replica without vLLM: arrays in memory."""

import numpy as np

from tidemill.consumers.replica.ledger import Applied, Proof, WriteRefusedError
from tidemill.kernels.fingerprint import ZERO, TensorKey, fingerprint
from tidemill.kernels.weights.checkpoint import bits_in_memory, map_checkpoint


class ArrayEngine:
    """The subscriber's engine on arrays in checkpoint coordinates; its memory can be made to fail."""

    def __init__(self, version, mirror):
        self.live = {name: mirror.bits(name).reshape(-1).copy() for name in mirror.fingerprints}
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
            tensors = map_checkpoint(directory)
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
